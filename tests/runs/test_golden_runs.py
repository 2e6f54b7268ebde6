"""Tiny whole runs over every kind of teacher whose figures are recorded: a refactor leaves each bit as it was.

The figures are in golden_runs.json: the losses and gradient norms of each step, the held-out figures before and after,
and a hash of the trained weights, by the machine that they were recorded on. They are compared to the bit on a machine
whose arithmetic is that of a recording (`machine`: processor, instruction set, versions), and to rounding on any other.
The runs have no warm-up and one thread.

    python tests/runs/test_golden_runs.py                       # record the present figures, on the present machine
    python tests/runs/test_golden_runs.py --only lora sharded   # some of them

The file is also the program of the two processes of runs that take two.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from forked import PLACES

RECORDED = Path(__file__).with_name("golden_runs.json")
HELD_OUT = (
    "forward_kl",
    "reverse_kl",
    "agreement",
    "student_cross_entropy",
    "teacher_cross_entropy",
    "student_entropy",
    "teacher_entropy",
)
VERSIONS = ("torch", "transformers", "tokenizers", "peft")

COMMON = """
train: {steps: 4, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, schedule: constant, warmup: 0,
        log_every: 1, device: cpu}
generate: {prompts: []}
"""
TEXT = "data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}\n" + COMMON
PAIRS = (
    "data: {source: pairs.jsonl, max_length: 128, cache: false, validation: {fraction: 0.1}, "
    "fields: {prompt: question, completion: answer%s}%s}\n" + COMMON.replace("128", "512")
)
ROLLOUTS = ", on_policy: {fraction: 0.5, max_new_tokens: 6}"
TWO_TERMS = "loss: {temperature: 2.0, terms: [{type: jsd, beta: 0.3}, {type: cross_entropy, weight: 0.5}]}\n"
REVERSE = "loss: {terms: [{type: reverse_kl}]}\n"
OTHER_TOKENIZER = "teacher: {model: merged}\nstudent: {model: pieces, vocabulary: cross, lora: {r: 2, head: true}}\n"
TEACHER, STUDENT = "teacher: {model: teacher}\n", "student: {model: student}\n"
INFORMED = "context: {template: 'A hint. {hint}', place: before}"
LAYER_TERMS = (
    "loss: {terms: [{type: forward_kl}, {type: hidden_state, projection: learned, weight: 0.5}, "
    "{type: attention_relation}]}\n"
)
REWARDED = (
    "loss: {terms: [{type: reverse_kl}, {type: policy_gradient, reward: 'code.py:vowels', teacher_weight: 0, "
    "weight: 0.5}]}\n"
)
ENVIRONMENT = (
    "data: {source: chats.jsonl, chat_template: chat.jinja, max_length: 256, cache: false, validation: {fraction: 0.1},"
    " on_policy: {environment: 'code.py:roll', max_new_tokens: 40, stop: [a, e, i, o, u, r, s, t, l, n]}}\n"
) + COMMON.replace("128", "1024")
SOURCES = (
    "data: {sources: [{source: text.txt}, {source: pairs.jsonl, weight: 3, fields: {prompt: question, completion: "
    "answer}}], max_length: 64, cache: false, chat_template: none, validation: {fraction: 0.1}}\n"
) + COMMON
STAGES = """
student: {from_teacher: {layers: 3, intermediate: 48, importance: {rows: 4, layer_rows: 2}}}
stages:
  - {name: prune}
  - {name: again, student: {from_teacher: {layers: 2, intermediate: 32}}}
"""
# what a reward and an environment of the runs call
CODE = """
import re


def vowels(prompt, answer, row):
    answer = re.sub("<[^>]*>", "", answer)  # the text holds special tokens, whose letters are no vowels of the answer
    return sum(letter in "aeiou" for letter in answer) / 10


def roll(messages, tools, row):
    if len(messages) > 4:
        return None
    return [{"role": "user", "content": f"{row['name']} {len(messages[-1]['content']) * 7919 % 997}"}]
"""


class Golden(NamedTuple):
    """A recorded run.

    Attributes:
        recipe: its text; `{url}` is the address of a teacher that is served, `{vllm}` that of recorded_vllm.py.
        before: command lines of `distill` that come first, in the same folder.
        processes it takes, joined by gloo; several are left to `-m full`.
        resumed_at: step from whose checkpoint the finished run is made once more; None for a run in one go.
        plugin: file of functions that the recipe names, allowed as by `--plugin`.
    """

    recipe: str
    before: tuple[str, ...] = ()
    processes: int = 1
    resumed_at: int | None = None
    plugin: str | None = None


RUNS = {
    "local": Golden(TEACHER + STUDENT + TWO_TERMS + TEXT),
    "cut": Golden(TEACHER + "student: {from_teacher: {layers: 2}}\n" + TWO_TERMS + TEXT),
    "lora": Golden(TEACHER + "student: {model: student, lora: {r: 4, head: true}}\n" + TWO_TERMS + TEXT),
    "top k of the student": Golden(TEACHER + STUDENT + "loss: {terms: [{type: top_k_reverse_kl, k: 8}]}\n" + TEXT),
    "mixture": Golden("teachers: [{model: teacher, weight: 3}, {model: other}]\n" + STUDENT + TWO_TERMS + TEXT),
    "retokenised": Golden(OTHER_TOKENIZER + TWO_TERMS + TEXT),
    "retokenised, on-policy": Golden(OTHER_TOKENIZER + REVERSE + PAIRS % ("", ROLLOUTS)),
    "retokenised, on-policy, copies": Golden(OTHER_TOKENIZER + REVERSE + PAIRS % ("", ROLLOUTS), processes=2),
    "served": Golden("teacher: {type: server, url: '{url}'}\n" + STUDENT + TWO_TERMS + TEXT),
    "served top k": Golden("teacher: {type: server, url: '{url}', top_k: 8}\n" + STUDENT + REVERSE + TEXT),
    "filled while read": Golden("teacher: {model: teacher, online_cache: kept}\n" + STUDENT + TWO_TERMS + TEXT),
    "top k filled while read": Golden(
        "teacher: {model: teacher, online_cache: kept-top-k, online_cache_format: top_k, top_k: 8}\n"
        + STUDENT
        + "loss: {terms: [{type: forward_kl}]}\n"
        + TEXT
    ),
    "stored": Golden(
        "teacher: {type: cache, path: hidden, model: teacher}\n" + STUDENT + TWO_TERMS + TEXT,
        before=("cache golden.yaml --hidden --dtype float32 --out hidden",),
    ),
    "stored top k": Golden(
        "teacher: {type: cache, path: top-k, model: teacher}\n"
        + STUDENT
        + "loss: {terms: [{type: forward_kl}]}\n"
        + TEXT,
        before=("cache golden.yaml --top-k 8 --tail sampled --out top-k",),
    ),
    "on-policy": Golden(TEACHER + STUDENT + REVERSE + PAIRS % ("", ROLLOUTS)),
    "policy gradient": Golden(
        TEACHER
        + STUDENT
        + "loss: {terms: [{type: policy_gradient}]}\n"
        + PAIRS % ("", ", on_policy: {fraction: 1.0, max_new_tokens: 6}")
    ),
    "context": Golden(f"teacher: {{model: teacher, {INFORMED}}}\n" + STUDENT + TWO_TERMS + PAIRS % ("", "")),
    "running average": Golden(
        f"teacher: {{type: student, ema: 0.9, {INFORMED}}}\n" + STUDENT + REVERSE + PAIRS % ("", ROLLOUTS)
    ),
    "routed": Golden(
        "teachers: [{model: teacher, route: even}, {model: other, route: odd, weight: 3}, {model: teacher, route: odd}]"
        "\n" + STUDENT + TWO_TERMS + PAIRS % (", teacher: domain", "")
    ),
    "routed with all": Golden(
        f"teachers: [{{model: other, route: even, {INFORMED}}}, {{type: server, url: '{{url}}', route: odd}}]\n"
        + STUDENT
        + REVERSE
        + PAIRS % (", teacher: domain", ROLLOUTS)
    ),
    "copies": Golden(TEACHER + STUDENT + TWO_TERMS + TEXT, processes=2),
    "sharded": Golden(
        TEACHER + STUDENT + TWO_TERMS + TEXT + "parallel: {strategy: fsdp, teacher: sharded}\n", processes=2
    ),
    "resumed": Golden(
        f"teacher: {{type: student, ema: 0.9, {INFORMED}}}\n" + STUDENT + REVERSE + PAIRS % ("", ROLLOUTS),
        resumed_at=2,
    ),
    "layer terms": Golden(TEACHER + STUDENT + LAYER_TERMS + TEXT),
    "quantised student": Golden(
        TEACHER + "student: {model: student, quantise: {format: q4_0, calibration_tokens: 512}}\n" + TWO_TERMS + TEXT
    ),
    "reward": Golden(
        TEACHER + STUDENT + REWARDED + PAIRS % ("", ", on_policy: {max_new_tokens: 6, samples: 2}"), plugin="code.py"
    ),
    "environment": Golden(TEACHER + STUDENT + REVERSE + ENVIRONMENT, plugin="code.py"),
    "stages": Golden(TEACHER + STAGES + TEXT),
    "several sources": Golden(TEACHER + STUDENT + TWO_TERMS + SOURCES),
    "vLLM": Golden(
        "teacher: {type: server, url: '{vllm}', protocol: vllm, top_k: 4, model: teacher}\n" + STUDENT + REVERSE + TEXT
    ),
}


def machine() -> dict[str, object]:
    """All that decides how this machine rounds; figures recorded on an equal one are equal to the bit."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "dispatch": {
            name: os.environ[name]
            for name in ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
            if name in os.environ
        },
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
    }


def write_place(folder: Path) -> Path:
    """Models and data of all runs, in `folder`."""
    from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
    from two_tokenizers import MERGED, PIECES

    tokenizer = tiny_tokenizer(chat_template=None)
    save_tiny(folder / "teacher", tiny_model(tokenizer, layers=3, seed=1), tokenizer)
    save_tiny(folder / "student", tiny_model(tokenizer, seed=2), tokenizer)
    other = tiny_model(tokenizer, hidden=64, seed=5, kind="gemma2", final_logit_softcapping=9.0)
    save_tiny(folder / "other", other, tokenizer)
    save_tiny(folder / "merged", tiny_model(MERGED, 2, 64, seed=1), MERGED)
    save_tiny(folder / "pieces", tiny_model(PIECES, 2, seed=3, tie=False), PIECES)
    lines = [f"{n * 7919 % 997} {'so ' * (n % 4)}the teacher explains {n * 31337 % 9973}" for n in range(40)]
    (folder / "text.txt").write_text("\n".join(lines))
    pairs = (
        {"question": f"Is {line}?", "answer": f"It is {number * 7}.", "hint": f"Say {number}.", "domain": domain}
        for number, line in enumerate(lines)
        for domain in ("odd" if number % 2 else "even",)
    )
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    chats = (
        {
            "name": f"n{number}",
            "messages": [{"role": "user", "content": f"Roll {number}"}, {"role": "assistant", "content": "?"}],
        }
        for number in range(20)
    )
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    (folder / "code.py").write_text(CODE)
    return folder


def figures_of(golden: Golden, url: str | None) -> dict[str, object]:
    """Make a run in the working directory; its figures, once all processes have ended it."""
    import recorded_vllm

    from distill.cli import run_command
    from distill.commands.arguments import plugin_override
    from distill.recipe import parse
    from distill.run import run
    from distill.training.progress import read_metrics

    plugin = None if golden.plugin is None else Path(golden.plugin)
    with contextlib.ExitStack() as opened:
        text = golden.recipe.replace("{url}", url or "")
        if "{vllm}" in text:
            text = text.replace("{vllm}", opened.enter_context(recorded_vllm.serving()))
        Path("golden.yaml").write_text(text)
        for line in golden.before:
            assert run_command(line.split()) == 0, line
        recipe = parse(text, plugin_override(plugin), name="golden")
        if golden.resumed_at is not None:
            recipe = parse(text, [f"train.save_every={golden.resumed_at}", *plugin_override(plugin)], name="golden")
        result = run(recipe, name="golden", plugin=plugin)
        if golden.resumed_at is not None:
            undo_steps_after(golden.resumed_at, result.folder)
            result = run(recipe, name="golden", resume=True, plugin=plugin)
    rows = [row for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]
    return {
        "loss": [row["loss"] for row in rows],
        "gradient norm": [row["grad_norm"] for row in rows],
        **{
            when: {name: finite(getattr(held_out, name)) for name in HELD_OUT}
            for when, held_out in (("before", result.before), ("after", result.after))
        },
        "weights": hash_of(result.folder / "student"),
    }


def undo_steps_after(step: int, folder: Path) -> None:
    """Make a finished run one that was ended after the checkpoint of a step."""
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(checkpoint)
    assert (folder / f"checkpoint-{step}").is_dir()
    shutil.rmtree(folder / "student")
    (folder / "result.json").unlink()


def finite(value: float) -> float | None:
    """The value, or None for what a top k does not tell, which JSON has no number for."""
    return value if math.isfinite(value) else None


def hash_of(folder: Path) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a saved model's tensors."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def alone(place: Path):
    """One thread, in a new folder with links to what is in `place`."""
    threads, before = torch.get_num_threads(), Path.cwd()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for each in place.iterdir():
            Path(folder, each.name).symlink_to(each)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            torch.set_num_threads(threads)


@contextlib.contextmanager
def teacher_served(place: Path):
    """The address of `teacher` behind HTTP."""
    from served import engine_in, serving

    with serving(engine_in(place)) as url:
        yield url


def make(name: str, place: Path, url: str | None) -> dict[str, object]:
    """The figures of a run by its name, in as many processes as it takes."""
    golden = RUNS[name]
    with alone(place) as folder:
        if golden.processes == 1:
            return figures_of(golden, url)
        from two_ranks import run_as_two

        run_as_two(__file__, "--one-of-several", name, cwd=folder, processes=golden.processes)
        return json.loads((folder / "figures.json").read_text())


def one_of_several(name: str) -> None:
    """Return one process of a run with several."""
    from distill.core.ranks import exit_process

    torch.set_num_threads(1)
    figures = figures_of(RUNS[name], None)
    if torch.distributed.get_rank() == 0:
        Path("figures.json").write_text(json.dumps(figures))
    torch.distributed.barrier()
    exit_process(0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def url(place):
    with teacher_served(place) as address:
        yield address


@pytest.fixture(scope="module")
def recordings():
    return read_recordings()


def recorded_figures(name, recordings):
    """The recorded figures of a run, and whether they are of a machine like this one, which is preferred."""
    of_run = [recording for recording in recordings if name in recording["runs"]]
    like_this = [recording for recording in of_run if recording["machine"] == machine()]
    (recording, *_) = like_this or of_run
    return recording["runs"][name], bool(like_this)


def flat(figures):
    """Numbers by where they stand."""
    for key, value in figures.items():
        if isinstance(value, dict | list):
            inner = value if isinstance(value, dict) else dict(enumerate(value))
            yield from ((f"{key}.{name}", number) for name, number in flat(inner))
        elif isinstance(value, float):
            yield key, value


MANY = [pytest.param(name, marks=pytest.mark.full) for name, golden in RUNS.items() if golden.processes > 1]


@pytest.mark.plain(
    "local",
    "stored",
    "served",
    "retokenised, on-policy",
    "context",
    "mixture",
    "lora",
    "routed",
    "quantised student",
    "reward",
    "layer terms",
)
@pytest.mark.parametrize("name", [*(name for name, golden in RUNS.items() if golden.processes == 1), *MANY])
def test_figures_are_those_recorded(name, place, url, recordings):
    figures = make(name, place, url)
    expected, is_of_this_machine = recorded_figures(name, recordings)
    if is_of_this_machine:
        assert figures == expected
        return
    found, wanted = dict(flat(figures)), dict(flat(expected))
    assert found.keys() == wanted.keys()
    for where, value in wanted.items():  # instruction sets of 1995 and of 2017 differ by 1e-5 at most
        assert found[where] == pytest.approx(value, rel=5e-5, abs=1e-6), where


def test_source_of_the_hidden_states_changes_nothing(recordings):
    """Computed here, by one of two processes, by a server, or read from a folder that is being filled: the same bits.
    `distill cache` reads rows in batches of its own: the same figures to rounding."""
    runs = {name: recorded_figures(name, recordings)[0] for name in RUNS}
    local = runs["local"]
    assert all(runs[name] == local for name in ("served", "filled while read", "copies"))
    assert runs["retokenised, on-policy, copies"] == runs["retokenised, on-policy"]
    assert dict(flat(runs["stored"])) == pytest.approx(dict(flat(local)), rel=1e-5)
    twins = {"served", "filled while read", "copies", "retokenised, on-policy, copies", "resumed"}
    weights = [runs[name]["weights"] for name in RUNS if name not in twins]
    assert len(set(weights)) == len(weights), "no other two runs are alike"


@pytest.mark.full
def test_a_resumed_run_is_the_run_in_one_go(place):
    assert make("resumed", place, None) == make("running average", place, None)


def test_a_run_of_other_figures_is_noticed(place, recordings, monkeypatch):
    """A change of one term's weight by a thousandth is noticed."""
    golden = RUNS["local"]
    monkeypatch.setitem(RUNS, "local", Golden(golden.recipe.replace("weight: 0.5", "weight: 0.5005")))
    figures, (expected, _) = make("local", place, None), recorded_figures("local", recordings)
    assert figures["weights"] != expected["weights"]
    assert figures["loss"][0] != pytest.approx(expected["loss"][0], rel=5e-5)


def read_recordings() -> list[dict[str, dict[str, object]]]:
    """The recordings, each of one `machine` with its `runs`."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else []


def record(names: list[str]) -> None:
    """Write the present figures of the named runs into the recording of this machine."""
    recordings = read_recordings()
    recording = next((each for each in recordings if each["machine"] == machine()), None)
    if recording is None:
        recording = {"machine": machine(), "runs": {}}
        recordings.append(recording)
    runs = recording["runs"]
    with tempfile.TemporaryDirectory() as folder:
        place = write_place(Path(folder))
        with teacher_served(place) as url:
            for name in names:
                before = runs.get(name)
                with contextlib.redirect_stdout(io.StringIO()):
                    runs[name] = make(name, place, url)
                changed = before not in (None, runs[name])
                print(f"{name}: {runs[name]['weights'][:12]}{' (changed)' * changed}", flush=True)
    recording["runs"] = {name: runs[name] for name in RUNS if name in runs}
    RECORDED.write_text(json.dumps(recordings, indent=1) + "\n")


if __name__ == "__main__":
    sys.path[:0] = PLACES
    parser = argparse.ArgumentParser(description="Record the figures of the golden runs.")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--one-of-several", choices=RUNS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one_of_several:
        one_of_several(given.one_of_several)
        sys.exit()
    record(given.only)
