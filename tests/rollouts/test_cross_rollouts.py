"""Rollouts of a student whose teacher has another tokenizer: the teacher's reading of an answer, and runs with it."""

import json
import random
import shutil
from pathlib import Path

import pytest
from test_cache_sharded import said_by
from test_compositions import addressed as addressed
from test_compositions import merged as merged
from test_cross_tokenizer_rows import CHAT, CLOSED, encode
from test_golden_runs import COMMON, PAIRS, Golden, alone, figures_of, hash_of
from test_golden_runs import place as place
from test_golden_runs import url as url
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from two_tokenizers import WORDS, readers

from distill.data.collator import Collator
from distill.data.formats import RowFormat
from distill.generation.documents import RolloutDocument, as_row, documents_of
from distill.recipe import parse
from distill.run import run
from distill.teachers.rows.retokenised.answers import TeacherReader
from distill.teachers.rows.retokenised.data import CrossColumns
from distill.teachers.rows.retokenised.encode import PairEncoder, TokenisedReader
from distill.training.progress import read_metrics

SIDES = [("bytes", "merged"), ("merged", "bytes"), ("pieces", "bytes"), ("bytes", "pieces"), ("plain pieces", "pieces")]
COLLATE = Collator(0, columns=[CrossColumns()])
PIECES_CLOSED = CLOSED.replace("<eos>", "</s>").replace("<bos>", "<s>")
TEMPLATES = {"bytes": CHAT_TEMPLATE, "merged": CLOSED, "pieces": PIECES_CLOSED, "plain pieces": PIECES_CLOSED}


def document_of(pair):
    """Return the document of an encoded pair, as it comes out of a collated batch."""
    columns = {name: ids.reshape(-1).tolist() for name, ids in pair.columns().items()}
    row = columns | {
        "position_ids": list(range(len(pair.student))),
        "teacher_position_ids": list(range(len(pair.teacher))),
    }
    (document,) = documents_of(COLLATE([row]))
    return document


def said(reader, ids):
    return b"".join(reader.spelled[number] for number in ids)


@pytest.mark.parametrize("student, teacher", SIDES)
def test_the_answer_of_the_data_is_read_as_in_the_data(student, teacher):
    draw, count = random.Random(3), 0
    for _ in range(40):
        at = draw.randrange(len(WORDS) - 80)
        middle = WORDS.index(" ", at + draw.randrange(8, 40))
        row = {"prompt": WORDS[at:middle], "completion": WORDS[middle : at + draw.randrange(60, 80)]}
        pairs, _, sides = encode([row], max_length=400, student=student, teacher=teacher)
        if not pairs:
            continue
        own = document_of(pairs[0])
        again = own.with_retokenized_response(TeacherReader(*sides), own.ids[len(own.prompt) :], 400)
        prompts = said(sides[0], own.prompt), said(sides[1], own.teacher_ids[: own.starts[1]])
        if all(prompt.removeprefix(b" ") == row["prompt"].encode().removeprefix(b" ") for prompt in prompts):
            # both readings have a token end between prompt and completion
            assert again.teacher_ids == own.teacher_ids, row
            assert [tuple(span) for span in own.spans if span[0] >= own.starts[0]] == list(again.spans)
            count += 1
        assert again.labels[: len(own.prompt)] == [-100] * len(own.prompt)
    assert count > 5


@pytest.mark.parametrize("student, teacher", SIDES)
def test_the_answer_of_a_chat_is_read_as_in_the_data(student, teacher):
    templates = TEMPLATES[student], TEMPLATES[teacher]
    (pair,), _, sides = encode(
        [{"messages": CHAT}], max_length=400, student=student, teacher=teacher, templates=templates
    )
    own = document_of(pair)
    answer = own.ids[len(own.prompt) :]
    again = own.with_retokenized_response(TeacherReader(*sides), answer, 400)
    assert again.teacher_ids == own.teacher_ids
    assert list(again.spans) == [span for span in own.spans if span[0] >= own.starts[0]]
    first, *_, last = again.spans
    assert said(sides[0], again.ids[first[0] : last[0]]) == said(sides[1], again.teacher_ids[first[2] : last[2]])
    assert (again.ids[-1], again.teacher_ids[-1]) == (sides[0].closing(), sides[1].closing())


@pytest.mark.plain("bytes-merged", "pieces-bytes", "plain pieces-pieces")
@pytest.mark.parametrize("student, teacher", SIDES)
def test_any_sampled_tokens_are_compared_at_common_bytes(student, teacher):
    """Random tokens: their bytes are no text as often as not, and characters are cut off."""
    draw = random.Random(5)
    row = {"prompt": "Question: how many tokens? Answer:", "completion": " nobody has counted"}
    (pair,), _, sides = encode([row], max_length=400, student=student, teacher=teacher)
    own, reader = document_of(pair), TeacherReader(*sides)
    spelled, aligned = sides[0].spelled, 0
    ids = [number for number, token in enumerate(spelled) if token is not None]
    words = [number for number in ids if spelled[number].isascii()]
    for _ in range(300):
        answer = draw.choices(draw.choice([ids, words, words]), k=draw.randrange(1, 12))
        answer += [sides[0].end] * draw.randrange(2)
        again = own.with_retokenized_response(reader, answer, 60, [0.0] * len(answer))
        assert again.ids == [*own.prompt, *answer] and len(again.teacher_ids) <= 60
        place = (len(own.prompt), own.starts[1])
        for a, b, c, d in again.spans:
            assert (a, c) >= place and b > a and d > c
            mine, theirs = said(sides[0], again.ids[a:b]), said(sides[1], again.teacher_ids[c:d])
            ends = (again.ids[a], again.teacher_ids[c]) == (sides[0].end, sides[1].end)
            assert ends or mine == theirs or mine.replace(b" ", b"") == theirs.replace(b" ", b"")
            place, aligned = (b, d), aligned + 1
        row = as_row([own, again, own])
        found = documents_of(COLLATE([row]))
        assert len(found) == 2 + bool(again.spans)
        assert found[-1] == RolloutDocument(**{**vars_of(own), "spans": list(own.spans)})
    assert aligned > 300


def vars_of(document):
    return {name: getattr(document, name) for name in document.__dataclass_fields__}


SPACED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[Q] {{ m['content'] }} [/Q]"
    "{% else %} {{ m['content'] }}<eos>{% endif %}{% endfor %}"
)
CLOSE = CHAT_TEMPLATE  # a line break ends its generation prompt, and the answer follows


@pytest.mark.parametrize("alone", [True, False], ids=["prompt alone", "with an answer"])
@pytest.mark.parametrize(
    ("templates", "drawn", "read"),
    [
        ((CLOSE, SPACED), "Twelve.", b"[/Q] Twelve."),
        (
            (SPACED.replace("<eos>", "<|end|>"), CLOSED.replace("] {{", "]\n{{").replace("t] {", "t]\n{")),
            " Twelve.",
            b"\nTwelve.",
        ),
        ((SPACED.replace("<eos>", "<|end|>"), SPACED), " Twelve.", b"[/Q] Twelve."),
    ],
    ids=["the teacher's has a space", "the student's has a space", "both have one"],
)
def test_each_template_has_its_own_space_before_an_answer(templates, drawn, read, alone):
    messages = CHAT[:1] if alone else CHAT[:2]
    sides = readers(templates=templates)
    encoder = PairEncoder(*sides, RowFormat("prompts" if alone else "chat", {"messages": "messages"}), max_length=400)
    (pair,), _ = encoder([(0, {"messages": messages})])
    own = document_of(pair)
    answer = [*sides[0].tokenizer(drawn, add_special_tokens=False)["input_ids"], sides[0].closing()]
    again = own.with_retokenized_response(TeacherReader(*sides), answer, 400)
    assert said(sides[1], again.teacher_ids).endswith(read + b"<eos>")
    assert (again.spans[-1][1], again.teacher_ids[-1]) == (len(again.ids), sides[1].closing())


def chat_document(templates):
    (pair,), _, sides = encode([{"messages": CHAT}], max_length=400, templates=templates)
    return document_of(pair), sides


def test_positions_beyond_the_teachers_length_are_not_compared():
    own, sides = chat_document((CHAT_TEMPLATE, CLOSED))
    answer = own.ids[len(own.prompt) :]
    reader = TeacherReader(*sides)
    whole = own.with_retokenized_response(reader, answer, 400)
    cut = own.with_retokenized_response(reader, answer, own.starts[1] + 5)
    assert 0 < len(cut.spans) < len(whole.spans) and len(cut.teacher_ids) <= own.starts[1] + 5
    assert list(cut.spans) == list(whole.spans)[: len(cut.spans)] and cut.ids == whole.ids


def test_an_answer_is_compared_up_to_a_character_that_the_teacher_s_tokenizer_changes():
    own, sides = chat_document((CHAT_TEMPLATE, CLOSED))
    changing = with_normalizer(sides[1].tokenizer, normalizers.Replace("q", "k"))
    reader = TeacherReader(sides[0], TokenisedReader(changing, sides[1].template, "teacher.model"))
    end = sides[0].closing()
    whole, cut = (
        own.with_retokenized_response(
            reader, [*sides[0].tokenizer(text, add_special_tokens=False)["input_ids"], end], 400
        )
        for text in ("The teacher is kuite small.", "The teacher is quite small.")
    )
    assert said(sides[0], [whole.ids[a] for a, *_ in whole.spans[-1:]]) == said(sides[0], [end])
    assert said(sides[0], cut.ids[cut.spans[0][0] : cut.spans[-1][1]]) == b"The teacher is "
    assert said(sides[1], cut.teacher_ids[cut.spans[0][2] :]) == b"The teacher is "


def with_normalizer(tokenizer, normalizer):
    """Return the tokenizer with a normalizer."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


ON_POLICY = ", on_policy: {fraction: 1.0, max_new_tokens: 12}"
STUDENT = "student: {model: pieces, vocabulary: cross, lora: {r: 2, head: true}}\n"
REVERSE = "loss: {terms: [{type: reverse_kl}]}\n"
RECIPE = STUDENT + REVERSE + PAIRS % ("", ON_POLICY)
BASE = "teacher: {model: merged}\n" + RECIPE


@pytest.fixture(scope="module")
def figures(place):
    with alone(place):
        return figures_of(Golden(BASE), None)


@pytest.mark.full
@pytest.mark.parametrize("more", [", max_staleness: 1", ", samples: 2"])
def test_a_served_teacher_changes_no_bit(more, place, addressed):
    def recipe(teacher):
        return f"teacher: {{{teacher}}}\n" + STUDENT + REVERSE + PAIRS % ("", ON_POLICY.replace("}", more + "}"))

    with alone(place):
        own = figures_of(Golden(recipe("model: merged")), None)
    with alone(place):
        assert figures_of(Golden(addressed(recipe("type: server, url: '{merged}'"))), None) == own


def test_the_student_learns_from_its_own_answers(figures):
    assert figures["after"]["forward_kl"] < figures["before"]["forward_kl"]


@pytest.mark.full
def test_a_resumed_run_is_bit_identical(place, figures):
    with alone(place) as folder:
        recipe = parse(BASE, ["train.save_every=2"], name="golden")
        run(recipe, name="golden")
        own = folder / "runs" / "golden"
        for name in ("checkpoint-4", "student"):
            shutil.rmtree(own / name, ignore_errors=True)
        (own / "result.json").unlink()
        assert hash_of(run(recipe, name="golden", resume=True).folder / "student") == figures["weights"]


@pytest.mark.full
def test_accumulation_changes_nothing_but_rounding(place):
    """The answers of a step do not depend on its micro-batches, and the mean is over all its spans."""
    found = []
    for batch in (8, 2):
        with alone(place):
            run(parse(BASE, [f"train.batch_size={batch}", "train.steps=2", "train.tokens_per_step=1024"]), name="a")
            rows = [row for row in read_metrics(Path("runs/a/metrics.jsonl")) if "loss" in row]
            found.append([(row["loss"], row["grad_norm"], row["rollouts"]) for row in rows])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=2e-4)


def characters():
    """Return a tokenizer of one token a character, so that any drawn tokens are the reading of their text."""
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]  # a line break and a space first
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


def test_the_same_tokenizer_gives_the_loss_of_one_tokenizer(place):
    """Every span is one token of each: the divergence over spans is the KL over the vocabulary."""
    found = []
    for vocabulary in ("keep", "cross"):
        with alone(place) as folder:
            tokenizer = characters()
            save_tiny(folder / "large", tiny_model(tokenizer, seed=1), tokenizer)
            save_tiny(folder / "small", tiny_model(tokenizer, seed=2), tokenizer)
            student = f"student: {{model: small, vocabulary: {vocabulary}}}\n"
            run(parse("teacher: {model: large}\n" + student + REVERSE + PAIRS % ("", ON_POLICY)), name="a")
            rows = [row for row in read_metrics(Path("runs/a/metrics.jsonl")) if "loss" in row]
            found.append([(row["loss"], row["rollout_length"], row["rollouts"]) for row in rows])
    assert found[0] == [pytest.approx(row, rel=1e-5) for row in found[1]]


@pytest.mark.full
def test_rollouts_are_written_by_span(place):
    from pyarrow import parquet

    with alone(place) as folder:
        text = "teacher: {model: merged}\n" + STUDENT + REVERSE
        text += PAIRS % ("", ", on_policy: {fraction: 1.0, max_new_tokens: 12, store_every: 2}")
        run(parse(text), name="a")
        (rows,) = (parquet.read_table(file).to_pylist() for file in sorted((folder / "runs/a/rollouts").glob("*4*")))
        shown = said_by(["inspect", "a", "--rollouts", "--json", "--rows", "1"])
    assert rows and shown["code"] == 0, shown
    figures = [token["value"] for token in json.loads(shown["out"])["rows"][-1] if token["state"] == "trained"]
    assert figures == pytest.approx(rows[0]["divergence"])
    for row in rows:
        assert [turn["by_student"] for turn in row["turns"]] == [True] and row["turns"][0]["text"] == row["answer"]
        assert 0 < len(row["divergence"]) == len(row["sampled_log_p"]) <= len(row["answer_ids"])
        # of one model at two times, in two ways: its own draw, and the loss's view of the same spans
        assert row["student_log_p"] == pytest.approx(row["sampled_log_p"], abs=1e-3)


@pytest.mark.plain("prompts")
@pytest.mark.parametrize("data", ["prompts", "chats"])
def test_prompts_alone_and_chats_of_several_turns_are_answered(data, place):
    chats = [{"messages": chat(n)} for n in range(24)]
    rows = [{"messages": row["messages"][:1]} for row in chats] if data == "prompts" else chats
    with alone(place) as folder:
        (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
        for name, those in (("rows", rows), ("held-out", chats[:4])):
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, those)))
        format, turns = ("prompts", "last") if data == "prompts" else ("auto", "all")
        text = f"""
teacher: {{model: merged}}
{STUDENT}{REVERSE}
data:
  source: rows.jsonl
  format: {format}
  chat_template: chat.jinja
  max_length: 128
  cache: false
  validation: {{source: held-out.jsonl}}
  on_policy: {{fraction: 1.0, max_new_tokens: 8, turns: {turns}}}
{COMMON.replace("128", "512")}"""
        result = run(parse(text), name="a")
        found = [row for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]
    assert len(found) == 4 and all(row["rollouts"] >= 2 and row["loss"] > 0 for row in found)


def chat(number):
    return [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"A number, {number}."},
        {"role": "user", "content": "And twice that?"},
        {"role": "assistant", "content": f"It is {2 * number}."},
    ]
