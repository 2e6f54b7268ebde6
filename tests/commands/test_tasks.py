"""`distill eval --tasks`: the harness's own tasks on a student and its teacher."""

import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import pytest
from tiny import save_models, save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.evaluation.tasks import INSTALL, run_tasks

RECIPE = "{teacher: {model: teacher}, student: {from_teacher: {layers: 1}}, data: {source: x.jsonl}, train: {steps: 2}}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A finished run and its teacher."""
    monkeypatch.chdir(tmp_path)
    tokenizer = save_models(tmp_path, teacher={"layers": 2, "seed": 1})
    save_tiny(tmp_path / "runs" / "mine" / "student", tiny_model(tokenizer, seed=2), tokenizer)
    (tmp_path / "runs/mine/recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def harness(monkeypatch):
    """Stands in for `lm_eval`: two tasks, answers by the model's number of layers; records what it was asked."""
    root, tasks, models = (types.ModuleType(f"lm_eval{name}") for name in ("", ".tasks", ".models"))
    huggingface = types.ModuleType("lm_eval.models.huggingface")
    root.__spec__ = importlib.util.spec_from_loader("lm_eval", None)
    root.calls = []

    class TaskManager:
        def __init__(self, include_path=None):
            root.include_path = include_path

        def match_tasks(self, names):
            return [task for task in ("arc_easy", "arc_hard") if any(n in (task, "arc_*") for n in names)]

    class HFLM:
        def __init__(self, pretrained, tokenizer, batch_size):
            assert not pretrained.training and pretrained.config.use_cache
            self.layers = pretrained.config.num_hidden_layers
            root.batch_size = batch_size

    def simple_evaluate(model, tasks, **settings):
        root.calls.append((model.layers, tasks, settings))
        figures = {"alias": "x", "acc,none": model.layers / 4, "acc_stderr,none": 0.25, "f1,strict": 0.5}
        return {"results": {task: figures | {"f1_stderr,strict": "N/A"} for task in tasks}}

    root.simple_evaluate, tasks.TaskManager, huggingface.HFLM = simple_evaluate, TaskManager, HFLM
    for module in (root, tasks, models, huggingface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return root


def test_student_and_teacher_are_put_side_by_side(folder, harness, capsys):
    more = ["--limit", "7", "--batch-size", "3", "--chat", "--before", "teacher", "--task-folder", "runs"]
    assert run_command(["eval", "mine", "--tasks", "arc_*", *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["task"], row["metric"]) for row in found] == [
        (task, metric) for task in ("arc_easy", "arc_hard") for metric in ("acc", "f1 (strict)")
    ]
    assert list(found[0]["of"]) == ["student", "before", "teacher"] and found[1]["of"]["student"]["error"] is None
    assert found[0]["of"]["student"] == {"value": 0.5, "error": 0.25}
    for _, tasks, settings in harness.calls:
        assert tasks == ["arc_easy", "arc_hard"] and settings["limit"] == 7 and settings["apply_chat_template"] is True
    assert harness.batch_size == 3 and harness.include_path == "runs"
    assert run_command(["eval", "mine", "--tasks", "arc_easy"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["task", "metric", "student", "teacher"] and "0.5000 ± 0.2500" in out[1]


def test_a_model_alone_needs_no_teacher(folder, harness, capsys):
    assert run_command(["eval", "teacher", "--tasks", "arc_easy", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)[0]["of"]) == ["student"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["mine", "--tasks", "arc_easy,nonsense"], "--tasks: expected tasks of lm-evaluation-harness"),
        (["mine", "--tasks", ","], "got none"),
        (["mine", "--tasks", "arc_easy", "--task-folder", "gone"], "--task-folder: expected a folder, got gone"),
        (["mine", "--limit", "3"], "expected together with --tasks"),
    ],
)
def test_mistakes_are_found_before_models_are_loaded(arguments, message, folder, harness, capsys, unread):
    unread("teacher"), unread("runs/mine/student")
    assert run_command(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_the_harness_the_error_names_the_package(folder, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a))
    assert run_command(["eval", "mine", "--tasks", "hellaswag"]) == 2
    assert INSTALL in capsys.readouterr().err


def test_the_real_harness_on_a_task_of_ones_own(folder):
    """Scores equal a likelihood comparison by hand; runs where lm_eval is installed."""
    pytest.importorskip("lm_eval")
    import torch

    from distill.evaluation.tasks import check_tasks

    lines = [{"q": f"The student listens to {n}:", "right": n % 2, "a": " listens", "b": " teacher"} for n in range(12)]
    Path("tasks").mkdir()
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path("tasks/sums.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{right}}'\n"
        "doc_to_choice: [' listens', ' teacher']\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    tokenizer = tiny_tokenizer()
    models = {"one": tiny_model(tokenizer, seed=2), "two": tiny_model(tokenizer, seed=3)}
    (row,) = run_tasks(models, dict.fromkeys(models, tokenizer), check_tasks(["sums"], Path("tasks")))
    assert (row.task, row.metric) == ("sums", "acc") and not math.isnan(row.of["one"].error)

    def likelihood(model, text, answer):
        ids, whole = tokenizer(text).input_ids, tokenizer(text + answer).input_ids
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(float(logs[i - 1, whole[i]]) for i in range(len(ids), len(whole)))

    for name, model in models.items():
        right = sum(
            (likelihood(model, r["q"], r["b"]) > likelihood(model, r["q"], r["a"])) == bool(r["right"]) for r in lines
        )
        assert row.of[name].value == pytest.approx(right / len(lines))
