"""Multiple choice by log-probability: the option that a plain loop over transformers' logits finds most probable."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import save_models, tiny_model
from two_ranks import run_as_two

from distill.cli import run_command
from distill.generation.option_scores import OptionPrompt, OptionScorer, encode_options
from distill.generation.task_answers import read_task
from distill.models.head import probe_logits
from distill.recipe import RecipeError, parse
from distill.recipe.evaluation import Task
from distill.run import run

FACTS = {
    "The capital of {} is": {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid"},
    "The opposite of {} is": {"hot": "cold", "tall": "short", "up": "down", "rich": "poor", "early": "late"},
    "A baby {} is called a": {"cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "horse": "foal"},
    "The colour of {} is usually": {
        "grass": "green",
        "snow": "white",
        "blood": "red",
        "coal": "black",
        "gold": "yellow",
    },
    "Someone who works as a {} spends the day": {
        "baker": "making bread early in the morning",
        "pilot": "flying aeroplanes from one city to another",
        "farmer": "growing crops and looking after animals",
        "teacher": "explaining things to children at school",
        "dentist": "looking after teeth — and filling them",
    },
}


def facts():
    """25 prompts, each with five options."""
    return [
        OptionPrompt(f"row {number}", text.format(name), list(answers.values()))
        for text, answers in FACTS.items()
        for number, name in enumerate(answers)
    ]


def right_answers():
    return [answer for answers in FACTS.values() for answer in answers.values()]


def plain_scores(model, tokenizer, prompt, chat):
    """Sum of log-probabilities, number of tokens and of bytes of each option, one forward each, in float64."""
    found = []
    for option in prompt.options:
        if chat:
            turns = [{"role": "user", "content": prompt.text}]
            context = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            text = context + option
        else:
            context = prompt.text
            text = f"{context} {option}"
        begin = len(tokenizer(context, add_special_tokens=False)["input_ids"])
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            log_p = model(input_ids=ids).logits[0].double().log_softmax(-1)
        own = [log_p[at - 1, ids[0, at]].item() for at in range(begin, ids.shape[1])]
        found.append((sum(own), len(own), len(option.encode())))
    return found


DIVISORS = {"none": lambda score: 1, "tokens": lambda score: score[1], "bytes": lambda score: score[2]}


def assert_as_a_plain_loop(model, tokenizer, prompts, chat, tolerance, normalised=tuple(DIVISORS)):
    expected = [plain_scores(model, tokenizer, prompt, chat) for prompt in prompts]
    scorer = OptionScorer(model, tokenizer, probe_logits(model, "model"), batch_size=7)
    rows = [row for prompt in prompts for row in encode_options(tokenizer, prompt, chat=chat)]
    values = torch.tensor(scorer.log_probs(rows))
    sums = torch.tensor([score for scores in expected for score, _, _ in scores])
    assert (values - sums).abs().max() < tolerance
    chosen = {}
    for normalise in normalised:
        best = []
        divisor = DIVISORS[normalise]
        for prompt, scores in zip(prompts, expected, strict=True):
            ratios = [score[0] / divisor(score) for score in scores]
            best.append(prompt.options[ratios.index(max(ratios))])
        chosen[normalise] = scorer.choose(prompts, chat=chat, normalise=normalise)
        assert chosen[normalise] == best
    return chosen


@pytest.mark.plain("True-llama")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("chat", [True, False])
def test_options_are_chosen_as_by_a_plain_loop(tokenizer, kind, chat):
    model = tiny_model(tokenizer, kind=kind, seed=3).train()
    assert_as_a_plain_loop(model.eval(), tokenizer, facts()[::3], chat, 1e-3)
    model.train()
    OptionScorer(model, tokenizer, probe_logits(model, "model"), 4).choose(facts()[:1], chat=chat, normalise="none")
    assert model.training


def test_a_student_with_adapters_on_its_head_is_scored_with_them(tokenizer):
    torch.manual_seed(0)
    model = tiny_model(tokenizer, seed=3, tie=False)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    assert_as_a_plain_loop(adapted.eval(), tokenizer, facts()[::6], False, 1e-3)


@pytest.mark.full
def test_a_real_models_choices_are_those_of_a_plain_loop(smollm2_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    chosen = assert_as_a_plain_loop(model, tokenizer, facts()[::2], False, 2e-3, ["none"])
    right = sum(map(str.__eq__, chosen["none"], right_answers()[::2]))
    assert right >= 8, "it knows most of the 13"


@pytest.mark.parametrize(
    "row, options, answer",
    [
        ({"question": "Q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}, ("a", "b"), "b"),
        ({"question": "Q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": 3}, ("a", "b", "c", "d"), "d"),
        ({"ind": 1, "ctx": "Q", "ctx_a": "x", "endings": ["a", "b"], "label": "0"}, ("a", "b"), "a"),
        (
            {"question_stem": "Q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
            ("a", "b"),
            "a",
        ),
    ],
    ids=["ARC", "MMLU", "HellaSwag", "OpenBookQA"],
)
def test_common_layouts_are_read_without_naming_columns(tmp_path, monkeypatch, row, options, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.jsonl").write_text(json.dumps(row) + "\n")
    task = Task.model_validate({"name": "one", "source": "task.jsonl", "format": "choices"})
    (found,) = read_task(task, "eval.tasks.0")
    assert (found.text, found.options, found.answer) == ("Q", options, answer)


def test_spaces_at_a_prompts_end_belong_to_the_option(tokenizer):
    with_space, without = (
        encode_options(tokenizer, OptionPrompt("row", text, ["x"]), chat=False) for text in ("a ", "a")
    )
    assert with_space == without


# ------------------------------------------------------------------ runs

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: chats.jsonl, max_length: 128, cache: false, validation: {fraction: 0.2}}
train: {steps: 4, batch_size: 2, tokens_per_step: 256, learning_rate: 1e-30, log_every: 2, device: cpu, eval_every: 2,
        keep_best: facts_accuracy}
eval: {tasks: [{name: facts, source: facts.jsonl, format: choices, normalise: bytes, limit: null}]}
generate: {prompts: []}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 4, "seed": 1}, student={"seed": 2})
    chats = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}, of course."} for n in range(30)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    rows = [
        {"question": prompt.text, "choices": prompt.options, "answer": answer}
        for prompt, answer in zip(facts(), right_answers(), strict=True)
    ]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def answers(folder):
    return [json.loads(line) for line in (folder / "tasks" / "facts.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_run_measures_them_with_its_teacher_and_eval_measures_the_same(here, capsys):
    result = run(parse(RECIPE, ["student.model=teacher"], name="one"))
    accuracy = result.tasks["facts"]
    assert accuracy["teacher"] == accuracy["before"] == accuracy["after"] and accuracy["after"].prompts == 25
    assert {row["response"] for row in answers(result.folder)} <= set(right_answers())
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval_facts_accuracy"] for row in rows if "eval_facts_accuracy" in row] == [accuracy["after"].value] * 2
    capsys.readouterr()
    assert run_command(["eval", "one", "--tasks", "facts", "--json"]) == 0
    (score,) = json.loads(capsys.readouterr().out)
    assert (score["task"], score["metric"]) == ("facts", "accuracy")
    assert score["of"]["student"]["value"] == score["of"]["teacher"]["value"] == accuracy["after"].value


@pytest.mark.full
def test_a_teacher_that_answers_nothing_is_named(here, caplog):
    result = run(parse(RECIPE, ["teacher.context={template: Be brief.}"], name="brief"))
    assert result.tasks["facts"].keys() == {"before", "after"}
    assert "eval.tasks: no accuracy of the teacher (" in caplog.text


@pytest.mark.full  # copies too are held to one process in test_task_answers.py
def test_two_processes_choose_as_one_does(here):
    more = ["parallel.strategy=fsdp", "train.batch_size=1"]
    alone = run(parse(RECIPE, more, name="alone"))
    (here / "r.yaml").write_text(RECIPE)
    run_as_two("-m", "distill", "run", "r.yaml", "--name", "two", *more, cwd=here)
    assert answers(here / "runs/two") == answers(alone.folder)
    written = [json.loads((here / f"runs/{name}/result.json").read_text())["tasks"] for name in ("two", "alone")]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    "override, says",
    [
        ("eval.tasks.0.checker=exact", "checker and extract: expected none with format choices"),
        ("eval.tasks.0.format=multiple_choice", "normalise and apply_chat_template belong to format choices"),
    ],
)
def test_settings_without_effect_are_refused(override, says):
    with pytest.raises(RecipeError, match=says):
        parse(RECIPE, [override])
