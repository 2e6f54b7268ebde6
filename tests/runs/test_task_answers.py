"""Tasks that a student answers while it trains: prompts, checkers, accuracy, and where the figures go."""

import json

import pytest
from tiny import save_models

from distill.cli import run_command
from distill.generation.task_answers import Accuracy, TaskPrompt, extracted, is_right, read_task
from distill.recipe import parse
from distill.recipe.evaluation import Task
from distill.reports.report import read_run, report_html
from distill.run import run

# ------------------------------------------------------------------ prompts and checkers


def task(**settings):
    return Task.model_validate({"name": "one", "source": "task.jsonl", **settings})


def prompt(answer, letters=""):
    return TaskPrompt("row 0", "?", answer, letters, {})


@pytest.mark.parametrize(
    "checker, answer, response, right",
    [
        ("exact", "Paris", " Paris\n", True),
        ("exact", "New  York", "New York", True),
        ("exact", "Paris", "paris", False),
        ("exact", "Paris", "It is Paris", False),
        ("number", "1234", "So it is 7 + 1227 = 1,234.", True),
        ("number", "-3.50", "#### -3.5", True),
        ("number", "18", "$18.00", True),
        ("number", "18", "18, or rather 19", False),
        ("number", "18", "eighteen", False),
        ("number", "none", "none", False),
        ("letter", "B", "B", True),
        ("letter", "B", "(B) blue", True),
        ("letter", "B", "**B**", True),
        ("letter", "B", "The answer is B.", True),
        ("letter", "A", "A good question; the answer is B", False),
        ("letter", "B", "A good question; the answer is B", True),
        ("letter", "I", "I'd say C", False),
        ("letter", "C", "I'd say C", True),
        ("letter", "D", "E", False),
    ],
)
def test_checkers(checker, answer, response, right):
    assert is_right(task(checker=checker), prompt(answer, "ABCDEFGHI"), response) == right


@pytest.mark.parametrize(
    "pattern, response, found",
    [
        (None, "all of it", "all of it"),
        (r"\d+", "1 and 2", "2"),
        (r"answer: (\w+)", "answer: one, no, answer: two", "two"),
        (r"answer: (\w+)", "two", None),
    ],
)
def test_the_last_match_is_compared(pattern, response, found):
    assert extracted(pattern, response) == found
    assert is_right(task(extract=pattern), prompt(found or "two"), response) == (found is not None)


ARC = {"text": ["red", "blue"], "label": ["1", "2"]}


@pytest.mark.parametrize(
    "settings, row, text, answer",
    [
        ({}, {"prompt": "Say a", "answer": "a"}, "Say a", "a"),
        ({"template": "Q: {prompt}\nA:"}, {"question": "{x}?", "target": 3}, "Q: {x}?\nA:", "3"),
        ({"fields": {"prompt": "q", "answer": "gold"}}, {"q": "Q", "gold": "g", "answer": "x"}, "Q", "g"),
        ({"format": "gsm8k"}, {"question": "Q", "answer": "2+3=5\n#### 5"}, None, "5"),
        ({"format": "multiple_choice"}, {"question": "Q", "choices": ["red", "blue"], "answer": 1}, None, "B"),
        ({"format": "multiple_choice"}, {"question": "Q", "choices": ["red", "blue"], "answer": "A"}, None, "A"),
        ({"format": "multiple_choice"}, {"question": "Q", "choices": ["red", "blue"], "answer": "blue"}, None, "B"),
        ({"format": "multiple_choice"}, {"question": "Q", "choices": ARC, "answerKey": "2"}, None, "B"),
    ],
)
def test_prompts_are_read(tmp_path, monkeypatch, settings, row, text, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_task(task(**settings), "eval.tasks.0")
    assert found.answer == answer
    assert text is None or found.text == text
    if "choices" in row:
        assert "Q\n\nA. red\nB. blue\n" in found.text and found.letters == "AB"


@pytest.mark.parametrize(
    "settings, row, message",
    [
        ({}, {"text": "a"}, "eval.tasks.0.fields.prompt: row 0 of task.jsonl: expected the column one of prompt"),
        ({}, {"prompt": "a"}, "fields.answer: row 0 of task.jsonl: expected the column one of answer"),
        ({"fields": {"prompt": "q"}}, {"prompt": "a"}, "expected the column 'q', got prompt"),
        ({"format": "multiple_choice"}, {"question": "a", "answer": 0}, "fields.choices"),
        (
            {"format": "multiple_choice"},
            {"question": "a", "choices": ["x", "y"], "answer": 2},
            "expected one of the 2 options, got 2",
        ),
    ],
)
def test_rows_that_are_no_prompts_are_refused(tmp_path, monkeypatch, settings, row, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        read_task(task(**settings), "eval.tasks.0")


@pytest.mark.parametrize("right, prompts", [(0, 20), (1, 3), (9, 30), (7, 7), (812, 1319)])
def test_the_interval_holds_the_shares_that_the_score_test_does_not_reject(right, prompts):
    z = 1.959963984540054
    for bound in Accuracy(right, prompts).interval:
        # the definition, of which the formula is the solution: the distance is z standard errors of the bound itself
        distance = right / prompts - bound
        assert distance**2 == pytest.approx(z**2 * bound * (1 - bound) / prompts, abs=1e-15)
    low, high = Accuracy(right, prompts).interval
    assert 0 <= low <= right / prompts <= high <= 1 and low < high


# ------------------------------------------------------------------ runs

# the teacher that is made here answers nothing sensible: what a response is, the student decides
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2}}
data: {source: chats.jsonl, max_length: 128, cache: false, validation: {fraction: 0.2}}
train: {steps: 6, batch_size: 2, tokens_per_step: 256, learning_rate: 3e-3, warmup: 0, log_every: 2, device: cpu,
        eval_every: 2}
eval: {tasks: [{name: sums, source: sums.jsonl, checker: checks.py:starts, max_new_tokens: 8}]}
generate: {prompts: []}
"""
# right where the response has a byte that about half of all responses have
CHECKS = """
def starts(prompt, response, row):
    assert row["question"] in prompt
    return sum(map(ord, response)) % 2 == 0
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 4, "seed": 1}, student={"seed": 2})
    chats = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}, of course."} for n in range(30)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    sums = [{"question": f"What is {n} and 1?", "answer": str(n + 1)} for n in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (tmp_path / "checks.py").write_text(CHECKS)
    return tmp_path


def recipe_with(here, *overrides, name="tasks"):
    from distill.commands.arguments import plugin_override

    return parse(RECIPE, [*plugin_override(here / "checks.py"), *overrides], name=name)


def run_with(here, *overrides, **settings):
    return run(recipe_with(here, *overrides), plugin=here / "checks.py", **settings)


def evaluations(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval_sums_accuracy"] for row in rows if "eval_sums_accuracy" in row}


def answers(folder):
    return [json.loads(line) for line in (folder / "tasks" / "sums.jsonl").read_text().splitlines()]


def test_a_run_answers_its_tasks(here, capsys):
    result = run_with(here)
    values = evaluations(result.folder)
    assert list(values) == [2, 4, 6]
    after = result.tasks["sums"]["after"]
    assert after.value == values[6] and after.prompts == 9
    rows = answers(result.folder)
    assert [row["prompt"] for row in rows] == [f"What is {n} and 1?" for n in range(9)]
    assert {row["step"] for row in rows} == {6} and sum(row["right"] for row in rows) == after.right
    assert all(row["right"] == (sum(map(ord, row["response"])) % 2 == 0) for row in rows)
    written = json.loads((result.folder / "result.json").read_text())["tasks"]["sums"]
    low, high = after.interval
    assert written["after"] == {"accuracy": after.value, "low": low, "high": high, "right": after.right, "prompts": 9}
    assert written.keys() == {"teacher", "before", "after"}
    out = capsys.readouterr().out
    assert f"step 4/6  sums: accuracy {values[4]:.1%} (" in out and f"student after {after}" in out
    assert "sums" in report_html(read_run(result.folder))
    assert run_command(["compare", "tasks"]) == 0
    assert "sums: accuracy" in capsys.readouterr().out


@pytest.mark.full
def test_the_teacher_is_asked_the_same_and_answers_as_a_student_of_its_weights_does(here):
    result = run_with(here, "student={model: teacher}")
    assert result.tasks["sums"]["teacher"] == result.tasks["sums"]["before"]


@pytest.mark.full
def test_training_is_the_same_with_and_without_tasks(here):
    ours = run_with(here, name="with")
    alone = run(parse(RECIPE, ["eval.tasks=[]"]), name="without")
    assert ours.after == alone.after
    assert (ours.folder / "student/model.safetensors").read_bytes() == (
        alone.folder / "student/model.safetensors"
    ).read_bytes()


@pytest.mark.full
def test_a_resumed_run_answers_as_an_uninterrupted_one(here, interrupted):
    more = ("train.save_every=1", "train.keep_best=sums_accuracy", "eval.tasks.0.limit=7")
    whole = run_with(here, *more, name="whole")
    interrupted(lambda: run_with(here, *more, name="cut"), 4)
    resumed = run_with(here, *more, name="cut", resume=True)
    assert evaluations(resumed.folder) == evaluations(whole.folder)
    assert resumed.tasks == whole.tasks and answers(resumed.folder) == answers(whole.folder)
    # another file of prompts, or another checker, would be another figure
    (here / "sums.jsonl").write_text(json.dumps({"question": "What?", "answer": "3"}) + "\n")
    with pytest.raises(ValueError, match=r"tasks\.sums"):
        run_with(here, *more, name="cut", resume=True)
    (here / "checks.py").write_text(CHECKS + "# changed\n")
    with pytest.raises(ValueError, match=r"loss\.plugin\.sha256 differs"):
        run_with(here, *more, name="cut", resume=True)


@pytest.mark.full
def test_a_task_is_answered_every_so_many_evaluations_and_after_the_last_step(here):
    result = run_with(here, "train.steps=7", "eval.tasks.0.every=2")
    assert list(evaluations(result.folder)) == [4, 7]


@pytest.mark.parametrize(
    "more, message",
    [
        (["eval.tasks.0.checker=fuzzy"], "checker: expected exact, number, letter or FILE.py:FUNCTION, got 'fuzzy'"),
        (["eval.tasks.0.extract='('"], "extract: expected a regular expression"),
        (["eval.tasks.0.template=Answer"], "template: expected a text with {prompt} in it"),
        (["data.source=synthetic"], "eval.tasks: expected a data.source of text"),
        (["train.keep_best=sums_accuracy", "eval.tasks.0.every=2"], "expected a held-out figure"),
        (["eval.tasks=[{name: a, source: b}, {name: a, source: c}]"], "expected different names, got 'a' twice"),
    ],
)
def test_tasks_that_cannot_be_answered_are_refused(here, more, message):
    with pytest.raises(ValueError, match=message):
        recipe_with(here, *more)


@pytest.mark.full
def test_a_function_is_run_only_where_the_plugin_allows_it_and_must_return_1_or_0(here):
    with pytest.raises(ValueError, match=r"eval.tasks.0.checker: checks.py:starts runs code; allow it with --plugin"):
        run(parse(RECIPE))
    (here / "checks.py").write_text("def starts(prompt, response, row):\n    return 0.5\n")
    with pytest.raises(ValueError, match=r"checker checks.py:starts, row 0 of sums.jsonl: expected 1 or 0, got 0.5"):
        run_with(here)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_answer_as_one_does(here, strategy):
    from two_ranks import run_as_two

    # the student of the best evaluation is loaded on both; a rate of 0 leaves all weights as they are on one and on two
    more = ["train.keep_best=kl", f"parallel.strategy={strategy}", "train.learning_rate=1e-30", "train.batch_size=1"]
    alone = run_with(here, *more, name="alone")
    (here / "tasks.yaml").write_text(RECIPE)
    run_as_two("-m", "distill", "run", "tasks.yaml", "--plugin", "checks.py", "--name", "two", *more, cwd=here)
    two = here / "runs" / "two"
    assert evaluations(two) == evaluations(alone.folder) and list(evaluations(two)) == [2, 4, 6]
    assert answers(two) == answers(alone.folder)
    written = [json.loads((folder / "result.json").read_text()) for folder in (two, alone.folder)]
    assert written[0]["tasks"] == written[1]["tasks"]
    assert written[0]["best"]["step"] in (2, 4, 6)
