"""The shipped recipes with other teachers: headers say what `distill check` predicts, and each one runs, in small."""

import json
import re
from pathlib import Path

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import load
from distill.training.progress import read_metrics

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CLOSED = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% else %}<bos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PLANNED = {"llama3-8b-to-1b-cached": "40GB", "llama3-8b-to-1b-on-policy": "80GB", "qwen2.5-7b-to-llama3-1b": "80GB"}
GIB = 2**30
# everything that is the size of the models and the data, and nothing that makes the recipe what it is
SMALL = [
    "teacher.dtype=float32",
    "data.source=chats.jsonl",
    "data.subset=null",
    "data.max_length=160",
    "data.workers=0",
    "data.validation={fraction: 0.2, max_rows: 4}",
    "train.tokens_per_step=320",
    "train.batch_size=1",
    "train.precision=float32",
    "train.save_every=null",
    "train.eval_every=null",
    "train.device=cpu",
    "train.log_every=1",
    "generate.prompts=[]",
]


@pytest.mark.plain("llama3-8b-to-1b-cached")
@pytest.mark.parametrize("name", PLANNED)
def test_recipe_headers_have_the_estimates_of_check(name):
    header = (RECIPES / f"{name}.yaml").read_text().split("\n\nteacher:")[0]
    assert f"`distill check {name} --gpu {PLANNED[name]}`, not measured" in header
    report = check_run(load(RECIPES / f"{name}.yaml"), find_device(PLANNED[name]), read_data=False)
    assert report.ok and report.fits, report.problems
    said = {part: float(gib) for part, gib in re.findall(r"^#   (\w[\w ]*?)  .* (\d+\.\d) GiB$", header, re.M)}
    expected = {part: size / GIB for part, size in report.memory.parts.items() if size >= 0.05 * GIB}
    expected["peak"] = report.memory.peak / GIB
    assert set(said) == set(expected)
    for part, gib in expected.items():
        assert abs(said[part] - gib) <= 0.051, f"{part}: the header says {said[part]}, check {gib:.2f} GiB"


def test_check_prints_the_size_of_a_cache(capsys):
    assert run_command(["check", "llama3-8b-to-1b-cached", "--gpu", "40GB", "--no-data"]) == 0
    out = capsys.readouterr().out
    header = (RECIPES / "llama3-8b-to-1b-cached.yaml").read_text()
    each, whole = re.search(r"(\d+) bytes per trained token .*?([\d.]+) GiB for each", out, re.S).groups()
    assert (
        "still to be made" in out and f"{each} bytes per trained token" in header and f"{whole} GiB for each" in header
    )
    assert float(whole) == pytest.approx(int(each) * 1e8 / GIB, abs=0.05)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A teacher, a student of its family, one with a tokenizer of its own, and chats."""
    root = tmp_path_factory.mktemp("models")
    tokenizer, other = tiny_tokenizer(300), tiny_tokenizer(340, CLOSED, ("<eos>", "<bos>"))
    save_tiny(root / "teacher", tiny_model(tokenizer, layers=2, seed=1), tokenizer)
    save_tiny(root / "runs" / "llama3-8b-to-1b" / "student", tiny_model(tokenizer, layers=1, seed=2), tokenizer)
    save_tiny(root / "other", tiny_model(other, layers=1, seed=3), other)
    rows = [
        [
            {"role": "user", "content": f"How many tokens is {n}?"},
            {"role": "assistant", "content": f"The teacher said {n}."},
        ]
        for n in range(24)
    ]
    (root / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return root


@pytest.fixture
def here(models, monkeypatch):
    monkeypatch.chdir(models)


def small(*more):
    return [*SMALL, *more]


STEPS = ["train.epochs=null", "train.steps=2"]


@pytest.mark.full
def test_the_cached_recipe_caches_and_runs(here, capsys):
    models = ["teacher.model=teacher", "teacher.config=null", "student.model=runs/llama3-8b-to-1b/student"]
    settings = small(*models, "student.config=null", *STEPS)
    assert run_command(["run", "llama3-8b-to-1b-cached", *settings]) == 2
    assert "no cache in caches/llama3-8b-to-1b" in capsys.readouterr().err
    assert run_command(["cache", "llama3-8b-to-1b-cached", *settings, "teacher.model=null"]) == 2
    assert "requires a model to run over the data; got teacher.type: cache" in capsys.readouterr().err
    assert run_command(["cache", "llama3-8b-to-1b-cached", "--top-k", "64", *settings]) == 0
    said = capsys.readouterr().out
    assert "caches/llama3-8b-to-1b: " in said and said.splitlines()[-1].startswith("train from it:")
    assert run_command(["run", "llama3-8b-to-1b-cached", *settings, "--name", "cached"]) == 0
    assert "estimated kl" in capsys.readouterr().out
    assert len([row for row in read_metrics(Path("runs/cached/metrics.jsonl")) if "loss" in row]) == 2


def test_the_on_policy_recipe_continues_from_a_runs_student(here):
    settings = small("teacher.model=teacher", "data.on_policy.max_new_tokens=8", "train.steps=2")
    assert run_command(["run", "llama3-8b-to-1b-on-policy", *settings, "--name", "own"]) == 0
    rows = read_metrics(Path("runs/own/metrics.jsonl"))
    assert sum(row.get("rollouts", 0) for row in rows) > 0
    recipe = load(RECIPES / "llama3-8b-to-1b-on-policy.yaml")
    assert recipe.student.model == f"runs/{load(RECIPES / 'llama3-8b-to-1b.yaml').name}/student"


def test_the_recipe_with_contexts_from_rollouts_runs(here):
    Path("sums.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": f"What is {n}?", "completion": f"It is {n}.", "solution": "-"}) for n in range(24)
        )
    )
    reward = "def right(prompt, answer, row):\n    return len(answer) % 2, f'{len(answer)} letters'\n"
    Path("mine.py").write_text(reward)
    settings = [setting for setting in SMALL if not setting.startswith(("data.source", "data.max_length", "train.b"))]
    settings += ["data.source=sums.jsonl", "data.max_length=256", "train.batch_size=4", "train.tokens_per_step=1024"]
    settings += ["student.model=teacher", "student.config=null", "train.steps=2"]
    settings += ["data.on_policy.max_new_tokens=8", "data.on_policy.reward=mine.py:right"]
    name = "self-distil-from-rollouts"
    assert run_command(["run", name, *settings, "--plugin", "mine.py", "--name", "rollouts"]) == 0
    rows = [row for row in read_metrics(Path("runs/rollouts/metrics.jsonl")) if "rollout_context" in row]
    assert len(rows) == 2 and all(row["rollout_context"] > 0 and row["loss"] > 0 for row in rows)


def test_the_recipe_across_tokenizers_runs(here, capsys):
    settings = small("teacher.model=teacher", "student.model=other", "train.steps=2")
    assert run_command(["run", "qwen2.5-7b-to-llama3-1b", *settings, "--name", "across"]) == 0
    assert "of the teacher's probability is on shared tokens" in capsys.readouterr().out
    assert "forward_divergence" in json.loads(Path("runs/across/result.json").read_text())["after"]
