"""Chats as token ids: one beginning, a frozen date that is reported, tool turns; what each row learns."""

import json

import pytest
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from distill.core.labels import IGNORE_INDEX
from distill.data.load import load_data
from distill.data.rendering import FROZEN_DAY
from distill.evaluation.targets import find_target, held_out_rows
from distill.generation.prompts import encode_prompt
from distill.recipe import Data, parse
from distill.run import run
from distill.teachers.registry import source_of

TURNS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source, tokenizer, **more):
    return load_data(Data(source=source, max_length=128, packing=False, **more), tokenizer, seed=0)


def learned(row, tokenizer):
    return tokenizer.decode([label for label in row["labels"] if label != IGNORE_INDEX])


def all_rows(splits):
    return [*splits.train, *splits.validation]


def test_a_template_that_writes_the_beginning_itself_gives_one_and_not_two(tmp_path):
    """Llama's template holds bos_token, and its tokenizer puts one before every text."""
    tokenizer = tiny_tokenizer(chat_template="{{ bos_token }}" + CHAT_TEMPLATE.replace("<|start|>", "["))
    tokenizer.bos_token = "<|start|>"
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|start|> $A", None, [("<|start|>", number)])
    assert tokenizer("a")["input_ids"][0] == number
    chats = load(write(tmp_path / "a.jsonl", [{"messages": TURNS}] * 4), tokenizer)
    pairs = load(
        write(tmp_path / "b.jsonl", [{"prompt": f"Q{n}", "completion": "A"} for n in range(4)]),
        tokenizer,
        chat_template="none",
    )
    for row in [*all_rows(chats), *all_rows(pairs)]:
        assert row["input_ids"][0] == number and row["input_ids"].count(number) == 1
        assert row["labels"][0] == IGNORE_INDEX and learned(row, tokenizer) == "A<|end|>"


@pytest.mark.parametrize(
    "row, max_length",
    [
        ({"text": "<|start|>Q{n}A<|end|>"}, 64),
        ({"text": "<|start|>Q{n}A<|end|>"}, 3),
        ({"prompt": "<|start|>Q{n}", "completion": " A<|end|>"}, 64),
    ],
    ids=["text", "pieces", "pair"],
)
def test_texts_that_hold_their_beginning_and_end_get_no_second_ones(row, max_length, tmp_path):
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.bos_token = "<|start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|start|> $A", None, [("<|start|>", 1)])
    said = [{name: text.format(n=n) for name, text in row.items()} for n in range(4)]
    bare = [{name: text[9:] if name != "completion" else text for name, text in one.items()} for one in said]
    bare = [{name: text.removesuffix("<|end|>") for name, text in one.items()} for one in bare]
    found = [
        load_data(
            Data(
                source=write(tmp_path / f"{number}.jsonl", rows),
                max_length=max_length,
                packing=False,
                validation={"fraction": 0.25},
            ),
            tokenizer,
            seed=0,
        )
        for number, rows in enumerate((said, bare))
    ]
    one, other = (sorted((row["input_ids"], row["labels"]) for row in all_rows(splits)) for splits in found)
    assert one == other and all(ids.count(1) == 1 and ids[0] == 1 and ids.count(0) <= 1 for ids, _ in one)


@pytest.mark.parametrize("strip", [{}, {"rstrip": True}, {"lstrip": True}], ids=["plain", "rstrip", "lstrip"])
def test_the_end_of_a_turn_is_learned_though_its_token_takes_white_space_along(strip, tmp_path):
    """Phi-3's special tokens swallow the line end behind them, and its chats end with one token more."""
    template = CHAT_TEMPLATE.replace("{% endif %}", "{% else %}<|pad|>{% endif %}")
    tokenizer = tiny_tokenizer(256 + 2, chat_template=template, specials=("<|pad|>", "<|start|>"))
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False, **strip)], special_tokens=True)
    rows = [{"messages": [*TURNS, {"role": "user", "content": f"And {n}?"}, TURNS[1]]} for n in range(4)]
    path = write(tmp_path / "a.jsonl", rows)
    assert {learned(row, tokenizer) for row in all_rows(load(path, tokenizer))} == {"A<|end|>A<|end|>"}


def test_a_template_that_stamps_the_date_is_frozen_and_the_day_reported(tmp_path):
    tokenizer = tiny_tokenizer(chat_template="{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    splits = load(write(tmp_path / "a.jsonl", [{"messages": TURNS}] * 4), tokenizer)
    assert splits.report.frozen_date == FROZEN_DAY.isoformat()
    assert f"the chat template's date is frozen at {FROZEN_DAY.isoformat()}" in str(splits.report)
    assert all(tokenizer.decode(r["input_ids"]).startswith(FROZEN_DAY.strftime("%d %b %Y")) for r in all_rows(splits))


def test_tool_calls_are_learned_token_by_token_and_their_results_are_not(tmp_path):
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    tokenizer = tiny_tokenizer(chat_template=template)
    path = write(tmp_path / "a.jsonl", [{"messages": turns}] * 4)
    assert learned(load(path, tokenizer).train[0], tokenizer) == '[add {"a": 1}]<|end|>Two.<|end|>'
    assert learned(load(path, tokenizer, train_on="last").train[0], tokenizer) == "Two.<|end|>"


@pytest.mark.full
def test_a_template_of_the_recipe_goes_with_the_student_and_is_what_it_is_judged_by(tmp_path, monkeypatch):
    """Neither model has a template, and the columns have names of their own; `eval --data` knows both."""
    monkeypatch.chdir(tmp_path)
    plain = tiny_tokenizer(chat_template=None)
    save_tiny(tmp_path / "teacher", tiny_model(plain, seed=1), plain)
    own = CHAT_TEMPLATE.replace("<|start|>", "<|start|>I am ")
    (tmp_path / "own.jinja").write_text(own)
    for name in ("one", "other"):
        turns = [[*TURNS, {"role": "user", "content": f"And {n}?"}, TURNS[1]] for n in range(8)]
        write(tmp_path / f"{name}.jsonl", [{"turns": chat, "text": name} for chat in turns])
    write(tmp_path / "plain.jsonl", [{"text": f"Nothing but words, {n}."} for n in range(4)])
    recipe = parse(
        "{teacher: {model: teacher}, student: {from_teacher: {layers: 1}}, train: {steps: 1, batch_size: 2}, data: {"
        "source: one.jsonl, chat_template: own.jinja, fields: {messages: turns}, max_length: 96, train_on: last}}",
        ["train.device=cpu"],
        name="own",
    )
    tokenizer = source_of(recipe).vocabulary().tokenizer
    asked = tokenizer.decode(encode_prompt(tokenizer, "Q"))
    assert asked == "<|start|>I am user\nQ<|end|>\n<|start|>I am assistant\n"
    target = find_target(str(run(recipe).folder))
    assert AutoTokenizer.from_pretrained(target.student.model).chat_template == own
    rows = held_out_rows(target, "other.jsonl", plain, 3, 96)
    assert [learned(row, plain) for row in rows] == ["A<|end|>"] * 3
    assert all(plain.decode(row["input_ids"]).count("I am assistant") == 2 for row in rows)
    assert len(held_out_rows(target, "plain.jsonl", plain, 3, 96)) > 0
