"""Data pipeline from a source to rows: formats, masks, splitting, held-out documents, the cache, misleading data."""

import itertools
import json

import numpy as np
import pytest
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from distill.core.errors import RunError
from distill.core.labels import IGNORE_INDEX
from distill.core.startup import cache_root
from distill.data import token_cache, tokenise
from distill.data.load import load_data
from distill.data.token_cache import tokenizer_hash
from distill.recipe import Data

END = 0  # tiny_tokenizer's end of text


@pytest.fixture(scope="module")
def plain():
    return tiny_tokenizer(chat_template=None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path, count=20):
    return write(path, [{"text": f"This is text number {number}, and no other."} for number in range(count)])


def load(source, tokenizer, seed=0, vocab_size=None, **more):
    settings = {"source": source, "max_length": 128, "packing": False} | more
    return load_data(Data(**settings), tokenizer, seed=seed, vocab_size=vocab_size)


def learned(row, tokenizer):
    return tokenizer.decode([label for label in row["labels"] if label != IGNORE_INDEX])


def all_rows(splits):
    return [*splits.train, *splits.validation]


def test_text_is_learned_whole_and_ended(tmp_path, tokenizer):
    splits = load(texts(tmp_path / "a.jsonl"), tokenizer)
    assert splits.report.format == "text (text)"
    for row in all_rows(splits):
        assert row["input_ids"][-1] == END and row["labels"][0] == IGNORE_INDEX
        assert row["labels"][1:] == row["input_ids"][1:]
        assert row["position_ids"] == list(range(len(row["input_ids"])))


def test_a_chat_learns_the_assistant_and_its_end_though_padding_is_the_end_token(tmp_path):
    pad_is_end = tiny_tokenizer(258, specials=("<|end|>", "<|start|>"))
    assert pad_is_end.pad_token_id == pad_is_end.eos_token_id
    chats = [
        {"messages": [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": f"A{n}"}]}
        for n in range(4)
    ]
    splits = load(write(tmp_path / "a.jsonl", chats), pad_is_end)
    assert splits.report.format == "chat (messages)"
    assert sorted(learned(row, pad_is_end) for row in all_rows(splits)) == [f"A{n}<|end|>" for n in range(4)]


def test_question_and_answer_become_turns_where_there_is_a_template(tmp_path, tokenizer, plain):
    path = write(tmp_path / "a.jsonl", [{"q": f"Why {n}?", "a": f"So {n}."} for n in range(4)])
    fields = {"prompt": "q", "completion": "a"}
    chat, bare = load(path, tokenizer, fields=fields), load(path, plain, fields=fields)
    for splits, made_by in ((chat, tokenizer), (bare, plain)):
        assert sorted(learned(row, made_by) for row in all_rows(splits)) == [f"So {n}.<|end|>" for n in range(4)]
    whole = {tokenizer.decode(row["input_ids"]) for row in all_rows(chat)}
    assert "<|start|>user\nWhy 1?<|end|>\n<|start|>assistant\nSo 1.<|end|>\n" in whole
    assert "Why 1?\nSo 1.<|end|>" in {plain.decode(row["input_ids"]) for row in all_rows(bare)}
    assert load(path, tokenizer, fields=fields, chat_template="none").report.format != chat.report.format


def test_sharegpt_names_and_prompts_that_are_lists(tmp_path, tokenizer):
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    chats = [turns, turns[::-1] + turns[1:], [turns[0], {"from": "gpt", "value": "B"}]]
    share = load(write(tmp_path / "a.jsonl", [{"conversations": chat} for chat in chats]), tokenizer)
    assert {learned(row, tokenizer) for row in all_rows(share)} == {"A<|end|>", "B<|end|>"}
    assert share.report.dropped == {"the chat begins with the assistant": 1}
    asked = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "not this"},
        {"role": "user", "content": "2"},
    ]
    rows = [{"prompt": asked, "completion": [{"role": "assistant", "content": f"this {n}"}]} for n in range(2)]
    pairs = load(write(tmp_path / "b.jsonl", rows), tokenizer)
    assert sorted(learned(row, tokenizer) for row in all_rows(pairs)) == ["this 0<|end|>", "this 1<|end|>"]


@pytest.mark.parametrize("kind", ["json", "csv", "tsv", "parquet", "jsonl.gz", "folder", "saved", "splits"])
def test_every_kind_of_file_gives_the_same_rows(kind, tmp_path, tokenizer):
    import datasets

    rows = [{"text": f"line one of {n}, with a comma\nline two"} for n in range(6)]
    expected = sorted(r["input_ids"] for r in all_rows(load(write(tmp_path / "x.jsonl", rows), tokenizer)))
    path = tmp_path / f"a.{kind}"
    table = datasets.Dataset.from_list(rows)
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind in ("csv", "tsv"):
        table.to_csv(str(path), sep="\t" if kind == "tsv" else ",")
    elif kind == "parquet":
        table.to_parquet(str(path))
    elif kind == "jsonl.gz":
        import gzip

        path.write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    elif kind == "saved":
        table.save_to_disk(str(path))
    elif kind == "splits":
        datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(path))
    else:
        path.mkdir()
        write(path / "train-0.jsonl", rows[:3])
        write(path / "train-1.jsonl", rows[3:])
        write(path / "test.jsonl", [{"text": "never to be trained on"}])
    assert sorted(row["input_ids"] for row in all_rows(load(str(path), tokenizer))) == expected


def test_a_folder_gives_what_is_not_hidden_in_it_wherever_it_lies(tmp_path, tokenizer, monkeypatch, caplog):
    inside = tmp_path / ".hidden" / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / ".git" / "logs").mkdir(parents=True)
    texts(inside / ".git" / "logs" / "a.jsonl")
    texts(inside.parent / "b.jsonl")
    monkeypatch.chdir(inside)
    assert load("..", tokenizer).report.rows_read == 20 and not caplog.records
    texts(inside.parent / "train.jsonl", count=5)
    assert load(str(inside.parent), tokenizer).report.rows_read == 5
    assert "1 of 2 files are ignored (b.jsonl" in caplog.text


def test_a_text_file_is_cut_into_pieces_that_join_to_the_text(tmp_path, tokenizer):
    text = "".join(f"Line {n} of one long text.\n" for n in range(200))
    (tmp_path / "a.txt").write_text(text)
    splits = load(str(tmp_path / "a.txt"), tokenizer, max_length=50)
    pieces = {tokenizer.decode(row["input_ids"]) for row in all_rows(splits)}
    assert "".join(sorted(pieces, key=lambda piece: text.find(piece.removesuffix("<|end|>")))) == text + "<|end|>"
    assert max(len(row["input_ids"]) for row in all_rows(splits)) == 50


def test_every_piece_begins_as_the_tokenizer_begins_a_text(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|start|>"
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|start|> $A", None, [("<|start|>", number)])
    splits = load(texts(tmp_path / "a.jsonl"), tokenizer, max_length=16)
    assert all(row["input_ids"][0] == number and number not in row["input_ids"][1:] for row in all_rows(splits))


@pytest.mark.full
def test_the_standard_library_is_real_text_and_the_same_each_time(tokenizer, smollm2_tokenizer):
    first = load("python-stdlib", smollm2_tokenizer, max_rows=30, packing=True, max_length=512)
    again = load("python-stdlib", smollm2_tokenizer, max_rows=30, packing=True, max_length=512, cache=False)
    assert first.train[:] == again.train[:] and not again.report.from_cache
    assert first.report.tokens > 20_000 and first.report.packing_efficiency > 0.95
    assert sum("def " in smollm2_tokenizer.decode(row["input_ids"]) for row in first.train) > len(first.train) / 2


@pytest.mark.parametrize("source", ["synthetic", "synthetic:zipf"])
def test_synthetic_rows_need_no_tokenizer(source):
    splits = load_data(Data(source=source, max_length=64, max_rows=100), None, seed=1, vocab_size=500)
    ids = np.array(splits.train["input_ids"])
    assert ids.shape[1] == 64 and ids.min() >= 0 and ids.max() < 500
    assert len(splits.train) + len(splits.validation) == 100
    share = (ids < 50).mean()
    assert (share > 0.4) if source.endswith("zipf") else (0.05 < share < 0.15)
    other = load_data(Data(source=source, max_length=64, max_rows=100), None, seed=2, vocab_size=500)
    assert other.train[0] != splits.train[0]


# held out, packed, cut


def test_no_text_is_both_learned_and_held_out_not_even_a_copy_or_a_piece(tmp_path, tokenizer):
    rows = [{"text": f"text {n % 40} " + "and on and on " * 20} for n in range(120)]  # three copies of each, in pieces
    path = write(tmp_path / "a.jsonl", rows)
    splits = load(path, tokenizer, max_length=40, packing=True, validation={"fraction": 0.2})
    whole = load(path, tokenizer, max_length=4096, validation={"fraction": 0.2})
    train = {tuple(row["input_ids"]) for row in whole.train}
    held = {tuple(row["input_ids"]) for row in whole.validation}
    assert not train & held and len(held) == 8
    assert splits.report.validation_tokens == sum(len(r["input_ids"]) for r in whole.validation)
    again = load(path, tokenizer, max_length=40, packing=True, validation={"fraction": 0.2}, cache=False)
    other = load(path, tokenizer, max_length=40, packing=True, validation={"fraction": 0.2, "seed": 5})
    assert again.validation[:] == splits.validation[:] and again.train[:] == splits.train[:]
    assert other.validation[:] != splits.validation[:]


def test_packing_changes_rows_and_no_document(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"text": "word " * (n % 17 + 1) + str(n)} for n in range(200)])
    loose, packed = (load(path, tokenizer, packing=choice) for choice in (False, True))
    documents = []
    for row in packed.train:
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0] + [len(row["input_ids"])]
        assert len(row["input_ids"]) <= 128
        for start, end in itertools.pairwise(starts):
            documents.append((row["input_ids"][start:end], row["labels"][start:end]))
    assert sorted(documents) == sorted((row["input_ids"], row["labels"]) for row in loose.train)
    assert len(packed.train) < len(loose.train) / 2
    assert packed.report.packing_efficiency > 0.95


def test_a_long_chat_keeps_its_prompt_and_one_whose_prompt_is_too_long_is_dropped(tmp_path, tokenizer):
    def chat(ask, answer):
        return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}

    path = write(tmp_path / "a.jsonl", [chat("q", "a"), chat("q", "b" * 500), chat("p" * 500, "c"), chat("r", "d")])
    splits = load(path, tokenizer)
    assert splits.report.truncated == 1
    assert splits.report.dropped == {"prompt longer than data.max_length": 1}
    cut = max(all_rows(splits), key=lambda row: len(row["input_ids"]))
    assert len(cut["input_ids"]) == 128 and set(learned(cut, tokenizer)) == {"b"}


def test_validation_from_a_source_of_its_own_is_not_trained_on(tmp_path, tokenizer):
    other = texts(tmp_path / "held.jsonl", 5)
    splits = load(texts(tmp_path / "a.jsonl"), tokenizer, validation={"source": other})
    assert len(splits.validation) == 5 and len(splits.train) == 15
    with pytest.raises(ValueError, match=r"data\.validation\.source.*expected other data than the training data"):
        load(other, tokenizer, validation={"source": other})
    long = write(tmp_path / "long.jsonl", [{"text": f"{number} and so on" * 40} for number in range(4)])
    pieces = [load(other, tokenizer, validation={"source": long, "max_rows": n}).validation.num_rows for n in (1, 2, 4)]
    assert pieces[0] > 1 and pieces == [pieces[0] * n for n in (1, 2, 4)], "a text's pieces are held out together"


# the cache


def test_the_cache_is_exact_and_notices_every_change(tmp_path, tokenizer):
    path = texts(tmp_path / "a.jsonl")
    first, second = load(path, tokenizer), load(path, tokenizer)
    assert not first.report.from_cache and second.report.from_cache
    assert first.train[:] == second.train[:] and first.validation[:] == second.validation[:]
    assert first.report.as_dict() | {"from_cache": 0} == second.report.as_dict() | {"from_cache": 0}
    tokenizer("padded", padding="max_length", max_length=20, truncation=True)  # leaves its mark on the backend
    assert load(path, tokenizer).report.from_cache
    assert not load(path, tiny_tokenizer(300)).report.from_cache
    assert not load(path, tokenizer, max_length=64).report.from_cache
    assert not load(path, tiny_tokenizer(chat_template=CHAT_TEMPLATE + " ")).report.from_cache
    assert not load(texts(tmp_path / "a.jsonl", 21), tokenizer).report.from_cache
    assert not load(path, tokenizer, cache=False).report.from_cache


def test_the_tokenizer_hash_sees_the_vocabulary_and_not_leftover_padding(fault):
    tokenizer = tiny_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    tokenizer.backend_tokenizer.enable_truncation(20)
    assert tokenizer_hash(tokenizer) == before
    assert tokenizer_hash(tiny_tokenizer(300)) != before
    fault.setattr(token_cache, "VERSION", token_cache.VERSION + 1)
    assert tokenizer_hash(tokenizer) == before, "caches of teachers hold it, and are not read again for another mask"


def test_a_damaged_cache_is_made_again(tmp_path, tokenizer):
    path = texts(tmp_path / "a.jsonl")
    first = load(path, tokenizer)
    expected = first.train[:]
    for file in cache_root().rglob("*.bin"):
        file.write_bytes(file.read_bytes()[:-4])
    again = load(path, tokenizer)
    assert not again.report.from_cache and again.train[:] == expected


def test_no_half_written_cache_is_left_by_an_error(tmp_path, tokenizer, fault):
    def break_off(rows):  # once rows of the first batch are written
        raise OSError(28, "No space left on device")

    fault.setattr("distill.core.console.advance", break_off)
    with pytest.raises(RunError, match=r"^data\.cache: .*the disk is full"):
        load(texts(tmp_path / "a.jsonl"), tokenizer)
    assert list(cache_root().iterdir()) == []


@pytest.mark.full
def test_worker_processes_give_the_same_rows(tmp_path, tokenizer, limit):
    limit.setattr("distill.data.documents.BATCH_ROWS", 7)
    path = tmp_path / "a.jsonl"
    texts(path)
    with path.open("a") as file:
        file.write("not json\n")
    alone = load(str(path), tokenizer, cache=False)
    together = load(str(path), tokenizer, cache=False, workers=2)
    assert alone.train[:] == together.train[:]
    assert together.report.dropped == alone.report.dropped == {"invalid JSON": 1}


# data that lies


def test_a_gzip_file_that_is_cut_short_is_counted(tmp_path, tokenizer):
    import gzip

    rows = "".join(json.dumps({"text": f"{np.random.default_rng(n).random()} {n}"}) + "\n" for n in range(2000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode())[:-2000])
    report = load(str(tmp_path / "a.jsonl.gz"), tokenizer).report
    assert report.dropped.get("file breaks off") == 1 and report.documents > 500


@pytest.mark.full
def test_a_long_text_is_read_once_and_in_parts(tmp_path, plain, watch):
    (tmp_path / "long.txt").write_text(text := "The teacher explains, and the student listens.\n" * 40_000)
    hashed, calls, original, encode = [], [], tokenise.text_hash, tokenise.Encoder.ids_of
    watch.setattr(tokenise, "text_hash", lambda text: hashed.append(len(text)) or original(text))

    def call(self, parts):
        calls.append(sum(map(len, parts)))
        plain("a", padding="max_length", max_length=9, truncation=True)  # leaves its mark on the backend
        ids = encode(self, parts)
        assert ids == plain(parts, add_special_tokens=False)["input_ids"]
        return ids

    watch.setattr(tokenise.Encoder, "ids_of", call)
    splits = load(str(tmp_path / "long.txt"), plain, cache=False)
    assert splits.report.documents > 1000 and sum(hashed) == len(text)
    assert max(calls) < tokenise.CALL + tokenise.BLOCK < len(text) == sum(calls)
