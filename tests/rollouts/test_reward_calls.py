"""A user's reward function: what it is given of the data's rows, and what its faults are told as."""

import json
import subprocess
import sys
import time

import pytest
from tiny import tiny_tokenizer

from distill.core.launch import is_running
from distill.data.collator import Collator
from distill.data.load import load_data
from distill.data.source_rows import SourceRowColumn
from distill.generation.documents import RolloutDocument, as_row, documents_of
from distill.generation.environment import EnvironmentFunction
from distill.generation.function_calls import Call, FunctionInput, RewardFunction
from distill.generation.reward_rows import row_table_from_recipe
from distill.generation.stopping import response_text
from distill.recipe import parse

COLLATE_ROWS = Collator(2, columns=[SourceRowColumn()])
TERM = {"type": "policy_gradient", "reward": "mine.py:mine"}

# ------------------------------------------------------------------ calls

ONE = FunctionInput("row 17 of x.jsonl", "What is 1 + 1?", "2", {"answer": "2"})


def called(tmp_path, body, question=ONE, name="mine", timeout=20.0, count=1):
    file = tmp_path / "mine.py"
    with RewardFunction(file, body.encode(), name, timeout, workers=2) as function:
        return function([question] * count)


def test_a_function_gets_prompt_answer_and_row(tmp_path):
    (tmp_path / "beside.py").write_text("HALF = 0.5\n")
    body = (
        "import beside\nprint('loading')\n"
        "def mine(prompt, answer, row):\n    print('judging', flush=True)\n"
        "    assert prompt == 'What is 1 + 1?'\n    return beside.HALF * (answer == row['answer'])\n"
    )
    assert called(tmp_path, body, count=5) == [0.5] * 5


@pytest.mark.parametrize(
    "body, message",
    [
        ("def mine(p, a, r):\n    return r['missing']\n", r"row 17 of x\.jsonl: line 2: KeyError: 'missing'"),
        ("def mine(p, a, r):\n    return float('nan')\n", r"row 17 of x\.jsonl: expected a finite number, got nan"),
        ("def mine(p, a, r):\n    return 1e999\n", r"row 17 of x\.jsonl: expected a finite number, got inf"),
        ("def mine(p, a, r):\n    return 1e308\n", r"row 17 of x\.jsonl: expected a number from -1e\+30 to 1e\+30"),
        ("import os, time\ndef mine(p, a, r):\n    os.closerange(0, 99)\n    time.sleep(60)\n", "closed its output"),
        ("def mine(p, a, r):\n    pass\n", r"row 17 of x\.jsonl: TypeError: expected a number, got NoneType"),
        ("def mine(p, a, r):\n    return '1'\n", r"row 17 of x\.jsonl: TypeError: expected a number, got str"),
        ("def mine(p, a):\n    return 1\n", r"row 17 of x\.jsonl: TypeError: mine\(\) takes 2 positional"),
        ("import os\ndef mine(p, a, r):\n    os._exit(3)\n", r"row 17 of x\.jsonl: its process ended with exit code 3"),
        ("def mine(p, a, r):\n    raise SystemExit('no')\n", r"row 17 of x\.jsonl: line 2: SystemExit: no"),
        (
            "def mine(p, a, r):\n    while True: pass\n",
            r"row 17 of x\.jsonl: no response within 1 s \(.*reward_timeout",
        ),
        ("def other(p, a, r): pass\n", r": ValueError: expected a function mine, got other"),
        ("import nothing_of_this_name\n", r": line 1: ModuleNotFoundError: No module named"),
        ("def mine(:\n", r": SyntaxError"),
    ],
)
def test_what_a_function_does_wrong_is_one_line(tmp_path, body, message):
    timeout = 1.0 if "while" in body else 20.0
    with pytest.raises(ValueError, match=rf"^loss\.terms: reward .*mine\.py:mine.*{message}") as caught:
        called(tmp_path, body, timeout=timeout)
    assert "\n" not in str(caught.value)


FORKS = """
import os
def mine(prompt, answer, row):
    if row["number"] == 0:
        os.fork()  # and the copy returns, too
    return row["number"]
"""


def test_replies_belong_to_their_calls_also_after_a_fork(tmp_path):
    file = tmp_path / "mine.py"
    inputs = [ONE._replace(row={"number": number}) for number in range(5)]
    with RewardFunction(file, FORKS.encode(), "mine", 20.0, workers=1) as function:
        assert function(inputs) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert function(inputs) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.full
def test_a_large_request_to_a_process_that_reads_nothing_has_the_same_time_limit(tmp_path):
    """The pipe holds 64 KiB: writing more waits for a reader."""
    body = "import time\ntime.sleep(0.5)\ndef mine(p, a, r):\n    time.sleep(60)\n"
    begun = time.monotonic()
    with pytest.raises(ValueError, match="no response within 1 s"):
        called(tmp_path, body, ONE._replace(answer="x" * 1_000_000), timeout=1.0)
    assert time.monotonic() - begun < 20


def test_a_file_with_a_byte_order_mark_is_read_and_one_in_another_encoding_is_refused(tmp_path):
    body = "def mine(p, a, r):\n    return 1.0  # \u00fc\n"
    file = tmp_path / "mine.py"
    with RewardFunction(file, body.encode("utf-8-sig"), "mine", 20.0) as function:
        assert function([ONE]) == [1.0]
    with (
        RewardFunction(file, body.encode("latin-1"), "mine", 20.0) as function,
        pytest.raises(ValueError, match=r"mine\.py:mine: expected a Python file in UTF-8"),
    ):
        function([ONE])


def test_a_reply_with_half_a_surrogate_pair_is_refused(tmp_path):
    body = "def mine(messages, tools, row):\n    return [{'role': 'user', 'content': 'a\\ud800'}]\n"
    with (
        EnvironmentFunction(tmp_path / "mine.py", body.encode(), "mine", 20.0) as function,
        pytest.raises(ValueError, match="expected texts that UTF-8 can hold"),
    ):
        function.call([Call("row 1", [[], [], {}])])


OWNER = """
import pathlib
from distill.generation.function_calls import FunctionInput, RewardFunction
body = pathlib.Path("mine.py").read_bytes()
RewardFunction(pathlib.Path("mine.py"), body, "mine", 600.0)([FunctionInput("row 1", "q", "a", {})])
"""
ENDLESS = """
import os, pathlib, subprocess, time
def mine(p, a, r):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pids.new").write_text(f"{os.getpid()} {child.pid}")
    os.rename("pids.new", "pids")
    while True:
        time.sleep(1)
"""


@pytest.mark.full
def test_the_processes_of_a_function_end_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(ENDLESS)
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < until:
        time.sleep(0.1)
    owner.kill()
    owner.wait()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert [pid for pid in pids if is_running(pid)] == []


# ------------------------------------------------------------------ rows

ROWS = f"""
teacher: {{model: t}}
student: {{model: s}}
train: {{steps: 3, batch_size: 2}}
loss: {{terms: [{json.dumps(TERM)}]}}
"""


def table(tmp_path, rows, template="tokenizer", **data):
    """Rows as documents of the training data, and what finds their rows again."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "source": str(file),
        "cache": False,
        "packing": False,
        "max_length": 200,
        "chat_template": template,
        "on_policy": {"samples": 2, "max_new_tokens": 4},
        "validation": {"fraction": 0.01},
        **data,
    }
    recipe = parse(ROWS, [f"data={json.dumps(section)}"])
    tokenizer = tiny_tokenizer()
    splits = load_data(recipe.data, tokenizer, seed=0)
    documents = documents_of(COLLATE_ROWS([*splits.train, *splits.validation]))
    return documents, row_table_from_recipe(recipe, tokenizer, [tokenizer.eos_token_id]).function_input, tokenizer


@pytest.mark.parametrize("template", ["tokenizer", "none"])
def test_a_response_is_matched_to_its_row(tmp_path, template):
    rows = [{"prompt": f"Say {n % 5}.", "completion": f"{n}", "right": n, "when": None} for n in range(10)]
    documents, question, tokenizer = table(tmp_path, rows, template)
    assert len(documents) == 10
    for document in documents:
        found = question(document, tokenizer("yes<|end|>")["input_ids"])
        said = tokenizer.decode(document.ids[len(document.prompt) :], skip_special_tokens=True).strip()
        assert found.row == rows[int(said)] and found.answer == "yes"  # same prompt, told apart by the completion
        assert found.location == f"row {said} of {tmp_path / 'rows.jsonl'}"
        prompt = f"Say {int(said) % 5}."
        assert found.prompt == ([{"role": "user", "content": prompt}] if template == "tokenizer" else f"{prompt}\n")


def test_a_reward_gets_the_text_that_an_environment_gets(tmp_path):
    """With special tokens, such as those around a tool call, and without the token that ended it."""
    documents, question, tokenizer = table(tmp_path, [{"prompt": f"Say {n}.", "completion": "yes"} for n in range(3)])
    for text, expected in (
        ("<|start|>call<|end|>", "<|start|>call"),
        ("<|start|>cut off", "<|start|>cut off"),
        ("one<|end|>two<|end|>", "one<|end|>two"),
        ("<|end|>", ""),
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert question(documents[0], ids).answer == expected == response_text(tokenizer, ids, [tokenizer.eos_token_id])


def talk(n):
    turns = [
        ("user", f"One {n}?"),
        ("assistant", "A."),
        ("user", "Two?"),
        ("assistant", "B."),
        ("user", "Three?"),
        ("assistant", f"C {n}."),
    ]
    return {"messages": [{"role": role, "content": text} for role, text in turns], "right": n}


@pytest.mark.parametrize("train_on", ["all", "each", "last"])
def test_a_reward_function_gets_the_messages_before_a_turn(tmp_path, train_on):
    rows = [talk(n) for n in range(4)]
    documents, question, tokenizer = table(tmp_path, rows, train_on=train_on)
    assert len(documents) == (12 if train_on == "each" else 4)
    for document in documents:
        text = tokenizer.decode(document.prompt)
        n = int(text.partition("One ")[2][0])
        found = question(document, [0])
        assert found.row == rows[n]
        assert found.prompt == rows[n]["messages"][: len(found.prompt)]
        assert len(found.prompt) == 2 * text.count("assistant") - 1


def test_prompts_without_responses_have_rows_too(tmp_path):
    rows = [{"messages": talk(n)["messages"][:5], "right": n} for n in range(4)]
    (tmp_path / "held-out.jsonl").write_text(json.dumps(talk(9)))
    held_out = {"source": str(tmp_path / "held-out.jsonl")}
    documents, question, _ = table(tmp_path, rows, format="prompts", validation=held_out)
    found = [question(document, [0]) for document in documents[:4]]  # the last is held out
    assert sorted(each.row["right"] for each in found) == [0, 1, 2, 3]
    assert all(each.prompt == each.row["messages"] for each in found)


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_equal_prompts_and_completions_keep_their_own_columns(tmp_path, packing):
    same = {"prompt": "Say it.", "completion": "it"}
    rows = [{**same, "right": n} for n in range(4)] + [{"prompt": f"No {n}.", "completion": "x"} for n in range(4)]
    documents, question, _ = table(tmp_path, rows, packing=packing)
    assert len(documents) == 8
    rights = [question(document, [5]).row.get("right", 9) for document in documents]
    assert sorted(rights) == [0, 1, 2, 3, 9, 9, 9, 9]
    for document in documents:
        found = question(document, [5])
        assert (found.row.get("right") is None) == (found.row["prompt"] != "Say it.")
        assert found.location == f"row {document.source_row.row} of {tmp_path / 'rows.jsonl'}"


def test_a_row_is_found_in_its_source_and_after_responses_were_replaced(tmp_path):
    """Of two sources with equal rows, through packing, a rollout, and the batch that is made of its row."""
    for name in "ab":
        rows = [{"prompt": f"Say {n}.", "completion": "it", "right": f"{name}{n}"} for n in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"source": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    documents, question, _ = table(tmp_path, rows, source=None, sources=sources, packing=True)
    by_right = {question(document, [5]).row["right"]: document for document in documents}
    assert len(by_right) > 6 and {name[0] for name in by_right} == {"a", "b"}
    replaced = [document.with_response(document.prompt, [7, 8]) for document in documents]
    padding = RolloutDocument([0, 0], [-100, -100], 0)
    again = documents_of(COLLATE_ROWS([as_row([*replaced, padding]), as_row(replaced[:1])]))
    assert [question(document, [5]).row["right"] for document in again] == [*by_right, next(iter(by_right))]


def test_rows_that_a_reward_needs_are_in_the_data(tmp_path):
    with pytest.raises(ValueError, match="rows: expected row, the source, row and message of each document"):
        COLLATE_ROWS([{"input_ids": [1, 2], "labels": [-100, 2], "position_ids": [0, 1]}])
