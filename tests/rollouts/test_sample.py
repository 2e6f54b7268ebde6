"""`distill sample`: answers in order, a file that a run takes, resumed where it broke off, mistakes in one line."""

import json
import subprocess
import sys

import pytest
from tiny import tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.data.chat import load_template
from distill.data.load import load_data
from distill.evaluation.sample import AnswerSettings, sample
from distill.generation.prompts import read_prompts
from distill.generation.sampling import Sampling
from distill.recipe import parse
from distill.recipe.data import Fields

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: answers.jsonl, max_length: 64, cache: false, validation: {fraction: 0.3}}
train: {steps: 1, device: cpu}
"""
QUESTIONS = [f"What is {n} plus {n}?" for n in range(7)]


pytestmark = pytest.mark.place(
    files={"recipe.yaml": RECIPE, "questions.txt": "\n".join(QUESTIONS) + "\n\n"},
    teacher={"layers": 3, "seed": 1},
    student={"seed": 2},
)


def run(workplace, **more):
    who = more.pop("who", "teacher")
    prompts, out = more.pop("prompts", "questions.txt"), workplace / more.pop("out", "answers.jsonl")
    settings = AnswerSettings(**({"max_new_tokens": 6, "batch_size": 3, "sampling": Sampling(0.0)} | more))
    return sample(parse(RECIPE), str(prompts), out, who, settings)


def lines(workplace, name="answers.jsonl"):
    return [json.loads(line) for line in (workplace / name).read_text().splitlines()]


def test_answers_are_those_of_generate(workplace):
    model, tokenizer = tiny_model(tiny_tokenizer(), layers=3, seed=1), tiny_tokenizer()
    result = run(workplace)
    found = lines(workplace)
    assert [row["prompt"] for row in found] == QUESTIONS and result.made == 7
    for row in found:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=[0], pad_token_id=2, use_cache=True)
        answer = out[0, ids.shape[1] :]
        assert row["completion"] == tokenizer.decode(answer, skip_special_tokens=True)
        assert row["truncated"] == (0 not in answer.tolist())
    run(workplace, who="student", out="own.jsonl")
    assert [row["completion"] for row in lines(workplace, "own.jsonl")] != [row["completion"] for row in found]


def test_the_output_is_a_data_source(workplace):
    run(workplace, sampling=Sampling(1.0))
    splits = load_data(parse(RECIPE).data, tiny_tokenizer(), seed=0)
    assert splits.report.format.startswith("prompt_completion") and splits.report.rows_read == 7
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "?"}]} for q in QUESTIONS]
    (workplace / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    run(workplace, prompts="chats.jsonl", out="again.jsonl", sampling=Sampling(1.0))
    recipe = parse(RECIPE, ["data.source=again.jsonl"])
    assert load_data(recipe.data, tiny_tokenizer(), seed=0).report.format.startswith("chat")
    assert [row["messages"][1]["content"] for row in lines(workplace, "again.jsonl")] == [
        row["completion"] for row in lines(workplace)
    ]


@pytest.mark.plain("7-0")
@pytest.mark.parametrize("kept, cut", [(0, 0), (3, 0), (4, 0), (4, 25), (7, 0)])
def test_sampling_continues_where_it_stopped(workplace, kept, cut):
    settings = {"sampling": Sampling(1.0), "seed": 5}
    run(workplace, **settings)
    whole = (workplace / "answers.jsonl").read_bytes()
    broken = b"".join(whole.splitlines(keepends=True)[:kept])
    broken += whole[len(broken) : len(broken) + cut]
    (workplace / "answers.jsonl").write_bytes(broken)
    result = run(workplace, **settings)
    assert result.found == kept and result.made == 7 - kept
    assert (workplace / "answers.jsonl").read_bytes() == whole


def test_seeds_draw_and_repeat(workplace):
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(workplace, out=f"{name}.jsonl", sampling=Sampling(1.0), seed=seed, batch_size=7 if name == "b" else 3)
        texts.append([row["completion"] for row in lines(workplace, f"{name}.jsonl")])
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1


def test_files_that_are_not_its_own_are_left_alone(workplace):
    run(workplace)
    before = (workplace / "answers.jsonl").read_bytes()
    for change, message in (
        ({"who": "student"}, "made with"),
        ({"sampling": Sampling(0.5)}, "made with"),
        ({"seed": 1}, "made with"),
        ({"out": "answers.json"}, "jsonl"),
        ({"out": "nowhere/answers.jsonl"}, "does not exist"),
    ):
        with pytest.raises(ValueError, match=f"--out.*{message}"):
            run(workplace, **change)
    (workplace / "other.txt").write_text("Another question?\n" * 9)
    with pytest.raises(ValueError, match="is not a response to prompt 1"):
        run(workplace, prompts="other.txt")
    (workplace / "few.txt").write_text(QUESTIONS[0])
    with pytest.raises(ValueError, match="more than there are prompts"):
        run(workplace, prompts="few.txt")
    assert (workplace / "answers.jsonl").read_bytes() == before


def prompts_of(workplace, rows, tokenizer=None, fields=None, max_length=500):
    path = workplace / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = tokenizer or tiny_tokenizer()
    return read_prompts(
        str(path), tokenizer, load_template("tokenizer", tokenizer), fields or Fields(), max_length=max_length
    )


def test_what_counts_as_a_prompt(workplace):
    plain, template = tiny_tokenizer(chat_template=None), tiny_tokenizer()
    decode = template.decode
    (asked,) = prompts_of(workplace, [{"question": "Why?", "answer": "Because."}]).prompts
    assert decode(asked.ids) == "<|start|>user\nWhy?<|end|>\n<|start|>assistant\n"
    assert asked.with_response("So.") == {"prompt": "Why?", "completion": "So."}
    (asked,) = prompts_of(workplace, [{"prompt": "Why?"}], plain).prompts
    assert decode(asked.ids) == "Why?\n" and asked.row == {"prompt": "Why?\n"}
    (asked,) = prompts_of(workplace, [{"instruction": "Add.", "input": "1 and 2"}]).prompts
    assert asked.row == {"prompt": "Add.\n\n1 and 2"}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    more = [*talk, {"role": "user", "content": "And?"}]
    for messages, expected in ((talk, talk[:1]), (more, more)):
        (asked,) = prompts_of(workplace, [{"messages": messages}]).prompts
        assert asked.row == {"messages": expected}
        assert asked.with_response("X")["messages"] == [*expected, {"role": "assistant", "content": "X"}]
        (asked,) = prompts_of(workplace, [{"prompt": expected, "completion": talk[1:]}]).prompts
        assert asked.row == {"messages": expected}
    (asked,) = prompts_of(workplace, [{"q": "Why?", "text": "x"}], fields=Fields(prompt="q")).prompts
    assert asked.row == {"prompt": "Why?"}
    (workplace / "lines.txt").write_bytes("One \u2028 line?\r\nAnother\x0cone?\n".encode())
    both = read_prompts(str(workplace / "lines.txt"), template, None, Fields(), max_length=99).prompts
    assert [prompt.row["prompt"] for prompt in both] == ["One \u2028 line?\n", "Another\x0cone?\n"]


def test_unusable_prompts_are_counted(workplace):
    rows = [
        {"prompt": "Why?"},
        {"prompt": ""},
        {"prompt": 3},
        {"other": 1},
        {"prompt": "long " * 40},
        {"prompt": "How?"},
    ]
    found = prompts_of(workplace, rows, max_length=60)
    assert [prompt.row["prompt"] for prompt in found.prompts] == ["Why?", "How?"]
    assert sum(found.dropped.values()) == 4 and found.dropped["too long"] == 1
    with pytest.raises(ValueError, match=r"prompt or messages.*'text'"):
        prompts_of(workplace, [{"text": "no question"}])
    with pytest.raises(ValueError, match="no usable prompt"):
        prompts_of(workplace, [{"prompt": ""}])
    with pytest.raises(ValueError, match="chat template"):
        prompts_of(workplace, [{"messages": [{"role": "user", "content": "Hi"}]}], tiny_tokenizer(chat_template=None))


def test_engines_agree_and_unknown_ones_are_refused(workplace):
    run(workplace)
    run(workplace, engine="transformers", out="theirs.jsonl")
    assert lines(workplace) == lines(workplace, "theirs.jsonl")
    with pytest.raises(ValueError, match="--engine: vllm is not installed"):
        run(workplace, engine="vllm", out="v.jsonl")
    with pytest.raises(ValueError, match="--engine: expected one of"):
        run(workplace, engine="magic", out="v.jsonl")


def test_sample_writes_responses_and_reports_them(workplace, capsys):
    arguments = [
        "sample",
        "recipe.yaml",
        "--prompts",
        "questions.txt",
        "--out",
        "answers.jsonl",
        "--from",
        "student",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    assert "7 responses" in out and "data.source=answers.jsonl" in out
    assert run_command([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"] == 7
    assert run_command([*arguments, "--temperature", "1"]) == 2
    assert "give another file" in capsys.readouterr().err
    assert run_command(["sample", "recipe.yaml", "--prompts", "none.txt", "--out", "a.jsonl", "--from", "student"]) == 2
    assert "none.txt" in capsys.readouterr().err


@pytest.mark.full
def test_help_loads_nothing_heavy():
    code = (
        "import sys; from distill.cli import run_command; run_command(['sample', '--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
