"""The page on data formats: each sample it shows is the file, and is read, masked and split as the page says."""

import json
import re
from pathlib import Path

import pytest
from tiny import tiny_tokenizer

from distill.core.labels import IGNORE_INDEX
from distill.data.load import load_data
from distill.planning.inspect_batches import plain_text, tokens_of
from distill.recipe import Data

DOCS = Path(__file__).parents[2] / "docs"
SAMPLES = DOCS / "samples"
PAGE = (DOCS / "guides" / "data-formats.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- (?P<kind>sample|read): (?P<name>\S+) -->\n+```\w*\n(?P<text>.*?)\n```", re.DOTALL)
BLOCKS = {(match["kind"], match["name"]): match["text"] for match in BLOCK.finditer(PAGE)}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"

# the settings a page's sample is read with, beside its source, and what an independent reader finds to learn in it
LEARNED = {
    "chat.jsonl": [
        f"Choose Forgot password on the sign-in page.{END}Call us, and we send the link to your phone.{END}",
        f"Under Account, Billing.{END}",
    ],
    "sharegpt.jsonl": [f"Under Account, Billing.{END}", f"Yes, by any card.{END}"],
    "alpaca.jsonl": [f"Red.{END}", f"Bonjour{END}"],
    "pairs.jsonl": [f"Paris.{END}", f"Four.{END}"],
    "pairs.csv": [f"Paris.{END}", f"Blue, please.{END}"],
    "prompt-messages.jsonl": [f"Under Account, Billing.{END}", f"Yes, by any card.{END}"],
    "text.jsonl": [  # the first token of a document has nothing to be predicted from
        f"he teacher explains and the student listens.{END}",
        f" small model learns to say what a large model says.{END}",
    ],
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(specials=(END, "<|im_start|>", "<|pad|>"), chat_template=CHATML)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))


def rows_of(name, tokenizer, **settings):
    """Return the training and held-out documents of a sample, and the report."""
    data = Data.model_validate({"source": str(SAMPLES / name), "max_length": 512, "packing": False} | settings)
    return load_data(data, tokenizer, seed=0)


def learned(row, tokenizer):
    return tokenizer.decode([label for label in row["labels"] if label != IGNORE_INDEX])


def documents(name, tokenizer, **settings):
    splits = rows_of(name, tokenizer, **settings)
    assert not splits.report.dropped
    return [*splits.train, *splits.validation]


def test_every_text_sample_is_on_the_page_as_it_lies_in_its_file():
    shown = {name: text for (kind, name), text in BLOCKS.items() if kind == "sample"}
    files = {path.relative_to(SAMPLES).as_posix() for path in SAMPLES.rglob("*") if path.is_file()}
    files = {name for name in files if not name.startswith("kinds/")}  # shown as read on the page on chat templates
    assert set(shown) == {name for name in files if not name.endswith(".parquet")}
    for name, text in shown.items():
        assert text + "\n" == (SAMPLES / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("name", LEARNED)
def test_labels_of_a_sample_are_those_on_the_page(name, tokenizer):
    rows = documents(name, tokenizer)
    assert sorted(learned(row, tokenizer) for row in rows) == sorted(LEARNED[name])
    if ("read", name) in BLOCKS:
        shown = [plain_text(tokens_of(row, tokenizer)).partition("\n")[2].strip() for row in rows]
        assert BLOCKS["read", name] in shown, shown


def test_every_reading_on_the_page_is_compared():
    assert {name for kind, name in BLOCKS if kind == "read"} <= set(LEARNED)


def test_the_last_turn_alone(tokenizer):
    rows = documents("chat.jsonl", tokenizer, train_on="last")
    last = [f"Call us, and we send the link to your phone.{END}", f"Under Account, Billing.{END}"]
    assert sorted(learned(row, tokenizer) for row in rows) == sorted(last)


def test_parquet_holds_the_chats_of_the_jsonl(tokenizer):
    def read(name):
        return sorted((row["input_ids"], row["labels"]) for row in documents(name, tokenizer))

    assert read("chat.parquet") == read("chat.jsonl")


def test_a_folder_has_splits(tokenizer):
    splits = rows_of("folder", tokenizer, validation={"source": f"{SAMPLES / 'folder'}:validation"})

    def texts(rows):
        return {tokenizer.decode(row["input_ids"]).removesuffix(END) for row in rows}

    def lines(name):
        return {json.loads(line)["text"] for line in (SAMPLES / "folder" / name).read_text().splitlines()}

    assert texts(splits.train) == lines("train.jsonl")
    assert texts(splits.validation) == lines("validation.jsonl")


def test_a_text_file_is_one_text_in_pieces(tokenizer):
    splits = rows_of("notes.txt", tokenizer, max_length=32)
    assert splits.report.rows_read == 1
    pieces = {tokenizer.decode(row["input_ids"]) for row in [*splits.train, *splits.validation]}
    text = (SAMPLES / "notes.txt").read_text(encoding="utf-8") + END
    assert len(pieces) == -(-len(tokenizer(text)["input_ids"]) // 32) and all(piece in text for piece in pieces)


def test_columns_of_other_names_need_the_lines_that_the_page_gives(tmp_path, tokenizer):
    rows = [{"id": number, "ask": f"Question {number}?", "say": f"Answer {number}."} for number in range(2)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(tmp_path / "mine.jsonl")
    with pytest.raises(ValueError, match=r"the columns of .* are 'id', 'ask', 'say'"):
        rows_of(source, tokenizer)
    found = documents(source, tokenizer, fields={"prompt": "ask", "completion": "say"})
    assert sorted(learned(row, tokenizer) for row in found) == [f"Answer 0.{END}", f"Answer 1.{END}"]
