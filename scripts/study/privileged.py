"""`python -m scripts.study.privileged`: teachers that see more than the student, or know one domain, compared.

    python -m scripts.study.privileged --out scripts/study/results --workers 6 --minutes 7.5
    python -m scripts.study.privileged --out /tmp/rows --work /tmp/work --device cpu --quick

Rows of small tasks are written, the model is asked with and without its prompt, then `--workers` processes train the
runs of privileged_plan.py, each by `distill.run` as `distill run` would, and are judged by exact answers to held-out
questions. A run whose row is in FOLDER is not made again; one that fails leaves a row with its error and stops no
other. FOLDER gets <gpu>-privileged.jsonl, a row a run, as they end.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distill.core.files import write_text
from scripts.study.privileged_plan import BOTH, CONTEXT, PROMPTS, SOLUTIONS, TAUGHT, Run, runs
from scripts.study.tasks import MIXED, TASKS, rows_of

PLAN = "privileged"
QUICK = (
    "train.steps=2",
    "train.tokens_per_step=512",
    "train.batch_size=1",
    "train.warmup=1",
    "train.log_every=1",
    "data.validation.max_rows=4",
)
BEFORE, INFORMED = "before training", "the teacher, which reads the prompt"
Rows = list[dict[str, str]]


def write_rows(folder: Path, most: int | None) -> None:
    """The tasks' rows in `folder`; `most` of each file for a first try."""
    both: dict[str, Rows] = {"train": [], "held-out": []}
    for task in (*MIXED, "sums"):
        for name, rows in zip(both, rows_of(task), strict=True):
            _write(folder / f"{task}-{name}.jsonl", rows[:most])
            both[name] += rows[:most] if task in MIXED else []
    for name, rows in both.items():
        _write(folder / f"{BOTH}-{name}.jsonl", rows)


def _write(path: Path, rows: Rows) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))  # whole, or not there


def read(path: Path) -> Rows:
    """Rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answers(model: Any, tokenizer: Any, prompts: Sequence[str], most: int) -> list[str]:
    """The likeliest answer to each text, of `most` tokens at most."""
    from distill.generation.engines import engine_for, settings_for

    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    settings = settings_for(model, tokenizer, None, max_length=max(map(len, ids)) + most)
    made = engine_for("distill", model, settings).generate(ids, max_new_tokens=most, batch_size=128)
    return tokenizer.batch_decode(made.tokens, skip_special_tokens=True)  # type: ignore[no-any-return]


def judged(model: Any, tokenizer: Any, prompts: Sequence[str], rows: Rows) -> dict[str, Any]:
    """Return the correctness of answers by domain: 1 or 0 for each question, in the order of the rows."""
    said = answers(model, tokenizer, prompts, max(TASKS[row["domain"]].longest for row in rows))
    right: dict[str, str] = {}
    for answer, row in zip(said, rows, strict=True):
        domain = row["domain"]
        right[domain] = right.get(domain, "") + str(int(TASKS[domain].is_right(answer, row["right"])))
    return {"right": right, "answers": said[:6]}


def load_model(folder: Path, device: str) -> tuple[Any, Any]:
    """A model in float32 and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def prepare(folder: Path, quick: bool) -> None:
    """The tasks' rows and the model as folders."""
    import torch

    from distill.models.loading import load_student, load_tokenizer

    write_rows(folder, 24 if quick else None)
    if not (folder / "base" / "config.json").is_file():
        recipe = runs(1)[0].recipe(folder)
        model = load_student(recipe.student, device=torch.device("cpu"), dtype=torch.float32)
        model.save_pretrained(folder / "base")
        load_tokenizer(recipe.student).save_pretrained(folder / "base")


def before_training(folder: Path, device: str) -> Iterator[dict[str, Any]]:
    """Return result rows of the model's answers with and without its prompts; also write the teacher's answers."""
    model, tokenizer = load_model(folder / "base", device)
    of_part = [(CONTEXT, task, "shots") for task in MIXED] + [(SOLUTIONS, "sums", "solution")]
    of_part += [(PROMPTS, BOTH, "shots"), (PROMPTS, BOTH, "both")]
    for part, task, column in of_part:
        rows = read(folder / f"{task}-held-out.jsonl")
        asked = {
            BEFORE: [row["prompt"] for row in rows],
            INFORMED: [f"{row[column]}\n\n{row['prompt']}" for row in rows],
        }
        if column == "both":
            asked = {f"{INFORMED} with half of each": asked[INFORMED]}
        for method, prompts in asked.items():
            found = judged(model, tokenizer, prompts, rows)
            yield {"part": part, "task": task, "method": method, "seed": 0, **found}
        if part == CONTEXT:
            rows = read(folder / f"{task}-train.jsonl")
            informed = [f"{row[column]}\n\n{row['prompt']}" for row in rows]
            said = [
                text.strip().partition("\n")[0] for text in answers(model, tokenizer, informed, TASKS[task].longest)
            ]
            taught = [row | {"completion": f" {answer}"} for row, answer in zip(rows, said, strict=True) if answer]
            _write(folder / f"{task}-{TAUGHT}.jsonl", taught)


def run_one(run: Run, folder: Path, device: str, more: Sequence[str]) -> dict[str, Any]:
    """Train a run and judge its student: what its row holds."""
    from distill.run import run as distill_run

    start = time.perf_counter()
    base = (f"student.model={folder}/base", f"output_dir={folder}/runs", f"train.device={device}")
    result = distill_run(run.recipe(folder, [*base, *more]), name=run.key)
    trained = time.perf_counter()
    student = result.folder / "student"
    model, tokenizer = load_model(student, device)
    rows = read(folder / f"{run.task}-held-out.jsonl")
    found = judged(model, tokenizer, [row["prompt"] for row in rows], rows)
    if run.keeps:
        student.rename(folder / run.keeps)
    shutil.rmtree(result.folder)
    before, after = result.before, result.after
    return found | {
        "kl": [before.forward_kl, after.forward_kl],
        "reverse_kl": [before.reverse_kl, after.reverse_kl],
        "held_out_tokens": after.tokens,
        "train_seconds": round(trained - start, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def row_of(run: Run) -> dict[str, Any]:
    """Return the fields that identify a run in its row."""
    named = {name: getattr(run, name) for name in ("part", "task", "method", "seed", "rows", "settings")}
    return {"plan": PLAN, "key": run.key, **named}


def work(args: argparse.Namespace) -> int:
    """Make one run after another that nobody else has begun, until time is up; 3 where the GPU cannot be used more."""
    import torch
    import transformers

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // (args.workers + 1)))
    transformers.utils.logging.disable_progress_bar()
    device = args.device
    wanted = chosen(args)
    while True:
        waiting = [run for run in wanted if not (args.work / "begun" / run.key).exists()]
        ready = [run for run in waiting if all((args.work / path).is_file() for path in needed(run))]
        if not waiting or time.time() > args.until - args.last:
            return 0
        run = next((run for run in ready if _claim(args.work / "begun" / run.key)), None)
        if run is None:
            time.sleep(1.0)
            continue
        try:
            row = row_of(run) | run_one(run, args.work, device, QUICK if args.quick else args.set)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            last = (traceback.format_exception_only(error)[-1].strip().splitlines() or ["?"])[0]
            row = row_of(run) | {"error": last[:300]}
        append(args, row)
        print(f"row: {run}: {row.get('error') or shown(row)}", flush=True)
        gc.collect()
        if device == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception:
                return 3


def needed(run: Run) -> list[str]:
    """Files that others make before a run can begin."""
    return [f"{run.task}-{run.rows}.jsonl", *(f"{kept}/config.json" for kept in run.needs)]


def _claim(path: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


def append(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Add a row to the results, in one write."""
    line = json.dumps(row | json.loads((args.work / "facts.json").read_text(encoding="utf-8"))) + "\n"
    path = args.out / (args.work / "name").read_text(encoding="utf-8")
    with contextlib.closing(open(path, "ab", buffering=0)) as file:
        file.write(line.encode())


def shown(row: dict[str, Any]) -> str:
    """A row's figures in a line."""
    exact = ", ".join(f"{name} {right.count('1') / len(right):.1%}" for name, right in row["right"].items())
    kl = f", KL {row['kl'][0]:.3f} to {row['kl'][1]:.3f}, {row['seconds']} s" if "kl" in row else ""
    return f"{exact}{kl}"


def chosen(args: argparse.Namespace) -> list[Run]:
    """The runs that have no row in the folder of results yet, in their order."""
    done = set((args.work / "done").read_text(encoding="utf-8").split())
    return [run for run in runs(args.seeds) if run.key not in done and any(part in str(run) for part in args.only)]


def lead(args: argparse.Namespace) -> int:
    """Prepare, keep the workers going until all is made or time is up, and say what came of it."""
    import torch

    from scripts.bench.harness import environment
    from scripts.study.runs import finished

    args.device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.work / "begun", ignore_errors=True)
    (args.work / "begun").mkdir(parents=True)
    facts = environment()
    (args.work / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    (args.work / "name").write_text(facts["gpu"].replace(" ", "-").lower() + f"-{PLAN}.jsonl", encoding="utf-8")
    kept = {run.key for run in runs(args.seeds) if run.keeps and not (args.work / run.keeps).is_dir()}
    rows = [row for row in finished(args.out, PLAN) if "error" not in row]
    (args.work / "done").write_text("\n".join({row["key"] for row in rows} - kept), encoding="utf-8")
    start = time.time()
    prepare(args.work, args.quick)
    for stale in args.work.glob(f"*-{TAUGHT}.jsonl"):
        stale.unlink()
    own = [sys.executable, "-m", "scripts.study.privileged", *sys.argv[1:], "--device", args.device]
    begun = [_started(own, args) for _ in range(args.workers)]
    print(f"rows and model after {time.time() - start:.0f} s; {len(chosen(args))} runs wait", flush=True)
    try:
        for row in before_training(args.work, args.device):
            key = "-".join((row["part"], row["task"], row["method"]))
            if key not in {row["key"] for row in rows}:
                append(args, {"plan": PLAN, "key": key, **row})
            name = f"{row['part']}, {row['task']}, {row['method']}"
            print(f"{name}: {shown(row)}, {time.time() - start:.0f} s", flush=True)
    except Exception:  # the workers' rows are worth their time without these
        traceback.print_exc()
    while any(worker.poll() is None for worker in begun) and time.time() < args.until:
        time.sleep(0.5)
        for number, worker in enumerate(begun):
            if worker.poll() not in (None, 0) and time.time() < args.until - args.last:
                print(f"worker {number} ended with {worker.poll()}, and is begun again", flush=True)
                begun[number] = _started(own, args)
                time.sleep(2.0)  # one that cannot begin at all is not begun a hundred times a second
    for worker in begun:
        if worker.poll() is None:
            worker.kill()
    rows = finished(args.out, PLAN)
    print(f"{len(rows)} rows, {sum('error' in row for row in rows)} of them errors, {time.time() - start:.0f} s\n")
    from scripts.study.privileged_verdict import markdown

    print(markdown(rows), flush=True)
    return 0


def _started(own: Sequence[str], args: argparse.Namespace) -> subprocess.Popen[bytes]:
    more = {"STUDY_UNTIL": str(args.until), "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    with (args.out / "workers.log").open("ab") as log:
        return subprocess.Popen([*own, "--worker"], stdout=log, stderr=log, env=os.environ | more)


def main() -> int:
    """Lead, or work for the leader."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.privileged",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of rows and the log")
    parser.add_argument("--work", type=Path, default=Path("/tmp/study-privileged"), help="folder of data and models")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--workers", type=int, default=6, help="processes that train at once on the one device")
    parser.add_argument("--minutes", type=float, default=60.0, help="everything is over by then")
    parser.add_argument("--last", type=float, default=45.0, help="seconds before that in which no run begins")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="runs whose name holds one of these")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe settings of every run")
    parser.add_argument("--quick", action="store_true", help="two steps and few rows: does the path work?")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.until = float(os.environ.get("STUDY_UNTIL", 0)) or time.time() + 60 * args.minutes
    return work(args) if args.worker else lead(args)


if __name__ == "__main__":
    sys.exit(main())
