"""Rollouts of several turns with an environment's replies: what is trained on, when they end, how they are resumed."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from test_golden_runs import COMMON, alone, hash_of
from test_golden_runs import place as place
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from distill.commands.arguments import plugin_override
from distill.data.chat import ChatTemplate
from distill.data.collator import Collator
from distill.data.source_rows import SourceRowColumn
from distill.generation.decode_loop import DecodeEngine, Generated
from distill.generation.documents import documents_of
from distill.generation.environment import ChatFormat, Environment, EnvironmentFunction, EnvironmentLog
from distill.generation.function_calls import FunctionInput
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.rewards import Rewards
from distill.generation.sampling import Sampling
from distill.objectives.plugin import allowed_plugin
from distill.recipe import parse
from distill.run import run
from distill.training.progress import read_metrics
from scripts.examples import calculator

TOKENIZER = tiny_tokenizer()
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, TOKENIZER)
ASKED = [{"role": "user", "content": "What is 2 * (3 + 4) - 1?"}]
END = TOKENIZER.eos_token_id
SCRIPT = ["First <calc>3 + 4</calc>", "then <calc>2 * 7</calc>", "and <calc>14 - 1</calc>", "It is 13."]
HEARD = ["7", "14", "13"]


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Scripted(DecodeEngine):
    """An engine that gives the next line of a script, by how many responses the prompt has already."""

    def __init__(self, script, ends=True):
        self.script, self.ends, self.seeds, self.same_weights = script, ends, [], []

    def run(self, request):
        tokens, truncated = [], []
        for prompt, most in zip(request.prompts, request.limits, strict=True):
            turn = TOKENIZER.decode(prompt).count("<|start|>assistant") - 1
            said = [*ids_of(self.script[turn]), *([END] if self.ends else [])]
            tokens.append(said[:most])
            truncated.append(len(said) > most)
        self.seeds += request.seeds
        self.same_weights.append(request.same_weights)
        return Generated(tokens, truncated, [[-0.5] * len(each) for each in tokens])


class InProcess:
    """The user's function, called here."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def call(self, calls):
        self.calls += calls
        found = [self.function(*call.arguments) for call in calls]
        return [[each] if isinstance(each, dict) else each for each in found]

    def error_prefix(self, place=""):
        return f"data.on_policy.environment mine.py:step, {place}"


def environment(function=calculator.step, *, max_turns=8, folder=None, tools=None, template=TEMPLATE, ends=(END,)):
    question = FunctionInput("row 0", ASKED, "", {"answer": "13"}, tools)
    log = EnvironmentLog(folder, 0)
    chat = ChatFormat(template, TOKENIZER, frozenset(ends))
    return Environment(InProcess(function), lambda document, tokens: question, chat, max_turns, log)


def rollouts(engine=None, own=None, **settings):
    defaults = {"max_new_tokens": 400, "sampling": Sampling(1.0), "seed": 3, "max_length": 500, "log_probs": True}
    own = OnPolicyRollouts(engine or Scripted(SCRIPT), 1.0, **(defaults | settings), environment=own or environment())
    prompt = ids_of(TEMPLATE.render(ASKED, prompt=True))
    row = {"input_ids": [*prompt, 5, END], "labels": [-100] * len(prompt) + [5, END]}
    rows = [row | {"position_ids": list(range(len(prompt) + 2))}]
    (batch,) = own.replace([Collator(2)(rows)], 0, Collator(2))
    return batch, own


def test_only_the_students_own_tokens_are_trained_on():
    batch, own = rollouts()
    conversation = [*ASKED]
    for said, heard in zip(SCRIPT, [*HEARD, None], strict=True):
        conversation.append({"role": "assistant", "content": said})
        if heard is not None:
            conversation.append({"role": "tool", "content": heard})
    whole = TEMPLATE.render(conversation).removesuffix("\n")
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    assert ids == ids_of(whole)
    learned = [token if label != -100 else None for token, label in zip(ids, labels, strict=True)]
    assert all(token == label for token, label in zip(ids, labels, strict=True) if label != -100)
    runs = "".join("." if token is None else TOKENIZER.decode([token]) for token in learned).split(".")
    assert TOKENIZER.decode([token for token in learned if token is not None]) == "<|end|>".join([*SCRIPT, ""])
    assert [run for run in runs if run] != [] and learned[0] is None
    drawn = batch["sampled_log_p"][0]
    assert torch.equal(~drawn.isnan(), batch["labels"][0] != -100)
    figures = own.pop_metrics(lambda values: values, torch.device("cpu"))
    assert figures["rollout_turns"] == 4.0 and figures["rollouts"] == 1
    assert figures["rollout_length"] == sum(len(ids_of(said)) + 1 for said in SCRIPT)


def test_the_function_is_given_the_conversation_the_tools_and_the_row():
    own = environment(tools=[{"type": "function", "function": {"name": "calc"}}])
    rollouts(own=own)
    assert [len(call.arguments[0]) for call in own.function.calls] == [2, 4, 6, 8]
    messages, tools, row = own.function.calls[1].arguments
    said = [{"role": "assistant", "content": SCRIPT[0]}, {"role": "tool", "content": "7"}]
    assert messages == [*ASKED, *said, {"role": "assistant", "content": SCRIPT[1]}]
    assert tools[0]["function"]["name"] == "calc" and row == {"answer": "13"}


def test_every_response_has_draws_of_its_own():
    engine = Scripted(SCRIPT)
    rollouts(engine)
    assert len(set(engine.seeds)) == 4
    alone = Scripted(["It is 13."])
    rollouts(alone)
    assert alone.seeds == engine.seeds[:1]


def test_the_weights_are_transferred_once_a_step():
    engine = Scripted(SCRIPT)
    _, own = rollouts(engine)
    assert engine.same_weights == [False, True, True, True]
    ids = ids_of(TEMPLATE.render(ASKED, prompt=True))
    row = {"input_ids": [*ids, END], "labels": [-100] * len(ids) + [END], "position_ids": list(range(len(ids) + 1))}
    own.replace([Collator(2)([row])], 1, Collator(2))
    assert engine.same_weights[4:] == [False, True, True, True]


@pytest.mark.parametrize("max_turns", [2, 3])
def test_the_number_of_turns_is_bounded(max_turns):
    batch, _ = rollouts(own=environment(max_turns=max_turns))
    text = TOKENIZER.decode(batch["input_ids"][0].tolist())
    assert text.count("<|start|>assistant") == max_turns and text.endswith(SCRIPT[max_turns - 1] + "<|end|>")


def test_a_rollout_ends_where_there_is_no_room():
    """It ends in a response, which is then cut off, or before a reply that leaves none for a response."""
    lengths = [len(ids_of(said)) + 1 for said in SCRIPT]
    whole = rollouts()[0]["labels"][0].tolist()
    reply = next(at for at in range(len(whole)) if whole[at] != -100) + lengths[0]
    reply = next(at for at in range(reply, len(whole)) if whole[at] != -100) - reply
    for most, turns, truncated in (
        (lengths[0] - 1, 1, 1.0),
        (lengths[0] + reply, 1, 0.0),
        (lengths[0] + reply + 1, 2, 1.0),
        (lengths[0] + reply + lengths[1], 2, 0.0),
    ):
        batch, own = rollouts(max_new_tokens=most)
        figures = own.pop_metrics(lambda values: values, torch.device("cpu"))
        assert (figures["rollout_turns"], figures["rollout_truncated"]) == (turns, truncated), most
        assert batch["labels"][0, -1] != -100


def test_a_response_that_a_stop_string_ends_is_closed_by_the_template():
    batch, _ = rollouts(Scripted(SCRIPT, ends=False))
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    ends = [label for token, label in zip(ids, labels, strict=True) if token == END]
    assert ends == [-100] * 7 and TOKENIZER.decode(ids).endswith("13.")


def test_another_end_than_the_templates_ends_the_rollout():
    own = environment(ends=(END, TOKENIZER.pad_token_id))
    engine = Scripted([SCRIPT[0] + "<|pad|>", *SCRIPT[1:]], ends=False)
    assert rollouts(engine, own)[1].pop_metrics(lambda values: values, torch.device("cpu"))["rollout_turns"] == 1


def test_a_reward_is_given_the_whole_conversation():
    given = []

    def judge(questions):
        given.extend(questions)
        return [0.0] * len(questions)

    def question(document, tokens):
        return FunctionInput("row 0", ASKED, TOKENIZER.decode(tokens, skip_special_tokens=True), {})

    batch, _ = rollouts(samples=2, rewards=Rewards(judge, question))
    assert batch["advantages"].shape == batch["labels"].shape
    for one in given:
        assert one.answer == SCRIPT[-1] and [turn["content"] for turn in one.prompt[1::2]] == SCRIPT[:-1]


def test_rows_of_the_same_words_have_replies_of_their_own(tmp_path):
    """Two documents of equal tokens share a seed; the environment sees the columns of each one's row."""

    def step(messages, tools, row):
        return {"role": "tool", "content": f"row {row['number']}"}

    own = environment(step, max_turns=2, folder=tmp_path)
    own.function_input = lambda document, tokens: FunctionInput(
        f"row {document.source_row.row}", ASKED, "", {"number": document.source_row.row}, None
    )
    made = OnPolicyRollouts(
        Scripted(SCRIPT), 1.0, max_new_tokens=400, sampling=Sampling(1.0), seed=3, max_length=500, environment=own
    )
    prompt = ids_of(TEMPLATE.render(ASKED, prompt=True))
    row = {"input_ids": [*prompt, 5, END], "labels": [-100] * len(prompt) + [5, END]}
    row |= {"position_ids": list(range(len(prompt) + 2))}
    collate = Collator(2, columns=[SourceRowColumn()])
    (batch,) = made.replace([collate([row | {"row": [0, number, 1]} for number in range(2)])], 0, collate)
    texts = [TOKENIZER.decode(ids) for ids in batch["input_ids"].tolist()]
    assert ["row 0" in text for text in texts] == [True, False]
    assert ["row 1" in text for text in texts] == [False, True]
    assert "source_rows" not in batch, "models do not read it"


def test_replies_are_read_again(tmp_path):
    """Another process reads them, whose function would say something else."""
    one, _ = rollouts(own=environment(folder=tmp_path))
    with (tmp_path / "environment" / "00000.jsonl").open("a") as file:
        file.write('{"key": "torn')
    again = environment(lambda *given: {"role": "tool", "content": "nonsense"}, folder=tmp_path)
    two, _ = rollouts(own=again)
    assert torch.equal(one["input_ids"], two["input_ids"]) and not again.function.calls
    again.log.add({"new": None})  # after the incomplete line, not on it
    assert "new" in EnvironmentLog(tmp_path, 1)


# ------------------------------------------------------------------ the user's function


@pytest.mark.parametrize(
    "body, message",
    [
        ("def step(m, t, r):\n    return r['missing']\n", "line 2: KeyError: 'missing'"),
        ("def step(m, t, r):\n    return 7\n", "TypeError: expected a message, messages or None, got int"),
        ("def step(m, t, r):\n    return {'role': 'assistant', 'content': ''}\n", "role other than assistant"),
        ("def step(m, t, r):\n    return {'role': 'tool', 'content': 3}\n", "a text as content of a message, got int"),
        ("def step(m, t, r):\n    return {'role': 'tool', 'content': 'a' * 2**21}\n", "at most 1,048,576 bytes"),
        ("def step(m, t, r):\n    return {'role': 'tool', 'content': '', 'x': {1}}\n", "not JSON serializable"),
        (
            "def step(m, t, r):\n    while True: pass\n",
            r"no response within 1 s \(data.on_policy.environment_timeout\)",
        ),
        ("import os\ndef step(m, t, r):\n    os._exit(3)\n", "its process ended with exit code 3"),
    ],
)
def test_faults_of_an_environments_function_are_one_line(tmp_path, body, message):
    own = environment()
    own.function = EnvironmentFunction(tmp_path / "mine.py", body.encode(), "step", 1.0 if "while" in body else 20.0, 1)
    with pytest.raises(ValueError, match=rf"^data\.on_policy\.environment .*mine\.py:step, row 0.*{message}") as caught:
        rollouts(own=own)
    assert "\n" not in str(caught.value)


def test_a_role_that_the_template_refuses_is_one_line():
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    own = environment(template=ChatTemplate(strict + CHAT_TEMPLATE, TOKENIZER))
    with pytest.raises(ValueError, match=r"mine\.py:step, row 0: the chat template refuses the row: no tools"):
        rollouts(own=own)
    silent = CHAT_TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
    )
    own = environment(template=ChatTemplate(silent, TOKENIZER))
    with pytest.raises(ValueError, match="does not render a message of the role tool after an answer; return one of"):
        rollouts(own=own)


@pytest.mark.parametrize(
    "text, value",
    [("2 * (3 + 4) - 1", "13"), ("-7 / 2", "-3.5"), ("1 / 0", "error: division by zero"), ("x", "error: ")],
)
def test_calculator_example_answers_with_results(text, value):
    message = {"role": "assistant", "content": f"let me see <calc>{text}</calc>"}
    assert calculator.step([message], None, {})["content"].startswith(value)
    assert calculator.step([{"role": "assistant", "content": text}], None, {}) is None


# ------------------------------------------------------------------ runs

DICE = """
import random

def roll(messages, tools, row):
    if len(messages) > 6:
        return None
    return [{"role": "user", "content": f"{row['name']} {random.SystemRandom().randrange(10**6)}"}]
"""
STOPS = json.dumps([chr(code) for code in range(97, 123)])
RUN = f"""
teacher: {{model: teacher}}
student: {{model: student}}
loss: {{terms: [{{type: reverse_kl}}]}}
data:
  source: rows.jsonl
  chat_template: chat.jinja
  max_length: 256
  cache: false
  validation: {{fraction: 0.2}}
  on_policy: {{environment: 'dice.py:roll', max_new_tokens: 120, stop: {STOPS}}}
{COMMON.replace("128", "1024")}"""


@pytest.fixture
def folder(place):
    with alone(place) as here:
        (here / "chat.jinja").write_text(CHAT_TEMPLATE)
        (here / "dice.py").write_text(DICE)
        rows = [
            {
                "name": f"n{n}",
                "messages": [{"role": "user", "content": f"Roll {n}"}, {"role": "assistant", "content": "?"}],
            }
            for n in range(20)
        ]
        (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        yield here


def recipe_of(*overrides):
    return parse(RUN, [*overrides, *plugin_override(Path("dice.py"))], name="golden")


@pytest.mark.full
def test_a_resumed_run_is_bit_identical_though_the_environment_is_random(folder):
    recipe = recipe_of("train.save_every=2")
    result = run(recipe, name="golden", plugin=Path("dice.py"))
    weights, own = hash_of(result.folder / "student"), result.folder
    rows = [row for row in read_metrics(own / "metrics.jsonl") if "loss" in row]
    assert all(row["rollout_turns"] > 1.5 and math.isfinite(row["loss"]) for row in rows)
    for name in ("checkpoint-4", "student"):
        shutil.rmtree(own / name, ignore_errors=True)
    (own / "result.json").unlink()
    assert hash_of(run(recipe, name="golden", resume=True, plugin=Path("dice.py")).folder / "student") == weights
    shutil.rmtree(own)
    assert hash_of(run(recipe, name="golden", plugin=Path("dice.py")).folder / "student") != weights


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        ["teacher.context={template: 'They are called {name}.', place: system}"],
        ["data.on_policy.max_staleness=1"],
        ["data.on_policy.samples=2"],
        ["data.on_policy.engine=transformers"],
        ["data.packing=false", "data.on_policy.fraction=0.5"],
        ["data.on_policy.store_every=2"],
    ],
)
def test_it_goes_with_other_settings(folder, more):
    result = run(recipe_of(*more), name="golden", plugin=Path("dice.py"))
    rows = [row for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 4 and all(row["rollout_turns"] > 1.5 and row["loss"] > 0 for row in rows)
    if "data.on_policy.store_every=2" in more:
        from pyarrow import parquet

        file = sorted((result.folder / "rollouts").glob("*.parquet"))[0]
        for row in parquet.read_table(file).to_pylist():
            assert row["prompt"].count("<|start|>") == 2 and "<|start|>user" in row["answer"]
            assert row["student_log_p"] == pytest.approx(row["sampled_log_p"], abs=1e-3)


def test_code_runs_only_where_it_is_allowed(folder):
    with pytest.raises(ValueError, match=r"environment: dice\.py:roll runs code; allow it with --plugin dice\.py"):
        run(parse(RUN), name="golden")
    (folder / "dice.py").write_text("raise SystemExit('this process runs it')")
    recipe = recipe_of()
    assert allowed_plugin(recipe.loss, Path("dice.py"), recipe.data.on_policy).terms == {}


def test_prompts_with_completions_are_refused_in_one_line(folder):
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}?", "completion": "no"}) for n in range(20))
    )
    with pytest.raises(ValueError, match=r"data\.on_policy\.environment: needs chats"):
        run(recipe_of("data.chat_template=none"), name="golden", plugin=Path("dice.py"))


def test_documents_of_a_rollout_begin_with_the_datas_prompt():
    batch, _ = rollouts()
    (document,) = documents_of(batch)
    assert document.ids[: document.rollout_start] == ids_of(TEMPLATE.render(ASKED, prompt=True))
