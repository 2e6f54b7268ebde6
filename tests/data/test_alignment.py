"""Tokens as bytes, and two readings of one text aligned by them: with unicode, split characters, byte fallback."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from two_tokenizers import BYTES, PIECES, PLAIN_PIECES, SPELLED, TOKENIZERS, WORDS, readers

from distill.data.chat import ChatOptions
from distill.data.row_reader import ConversationSample
from distill.teachers.rows.retokenised.alignment import common_boundaries, shared_tokens, token_bytes, token_ends

# SentencePiece cannot tell U+2581 from a space; "<" could begin one of its bytes' names
texts = st.text(
    st.one_of(st.sampled_from(WORDS), st.characters(exclude_categories=["Cs"], exclude_characters="<\u2581")),
    max_size=60,
)


def reading(name, text):
    """Ids and where they end, in bytes."""
    ids = TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]
    return ids, token_ends(ids, SPELLED[name], text.encode())


@settings(max_examples=400, deadline=None)
@given(texts, st.sampled_from(sorted(TOKENIZERS)))
def test_tokens_spell_the_text(text, name):
    """Unicode, characters split over several tokens, byte fallback, the space before the first word."""
    ids, ends = reading(name, text)
    assert ends is not None and len(ends) == len(ids)
    assert (np.diff(ends) >= 0).all() and (len(ends) == 0 or ends[-1] == len(text.encode()))


@settings(max_examples=400, deadline=None)
@given(texts, st.sampled_from(sorted(TOKENIZERS)), st.sampled_from(sorted(TOKENIZERS)))
def test_spans_cover_the_same_bytes_and_are_the_shortest(text, one, other):
    (a, a_ends), (b, b_ends) = reading(one, text), reading(other, text)
    boundaries, cut_a, cut_b = common_boundaries(a_ends, b_ends)
    assert cut_a[-1] == len(a) and cut_b[-1] == len(b) and boundaries[-1] == len(text.encode())
    for start, stop, *cuts in zip(boundaries, boundaries[1:], cut_a, cut_a[1:], cut_b, cut_b[1:], strict=False):
        covered = [
            b"".join(SPELLED[name][number] for number in ids[cuts[2 * side] : cuts[2 * side + 1]])
            for side, (name, ids) in enumerate(((one, a), (other, b)))
        ]
        exact = text.encode()[start:stop]
        # SentencePiece begins a text with a space of its own
        assert all(part in (exact, b" " + exact) for part in covered)
        # no boundary of both lies within
        inside = [set(ends[(ends > start) & (ends < stop)].tolist()) for ends in (a_ends, b_ends)]
        assert not inside[0] & inside[1] and stop > start
    if one == other:
        widths = np.diff(np.concatenate([[0], a_ends]))
        assert len(boundaries) - 1 == (widths > 0).sum()


def test_spelled_tokens_join_to_the_text():
    spelled = SPELLED["bytes"]
    assert spelled[BYTES("é", add_special_tokens=False)["input_ids"][0]] == b"\xc3"
    assert spelled[0] == b"<|end|>"
    ids = PIECES("é x", add_special_tokens=False)["input_ids"]
    assert b"".join(SPELLED["pieces"][number] for number in ids) == " é x".encode()
    assert b"\xc3" in [SPELLED["pieces"][number] for number in ids]  # by byte fallback
    # a text that the tokens do not spell
    assert reading("pieces", "a\u2581b")[1] is None
    assert token_ends(ids, SPELLED["pieces"], b"other") is None
    assert token_ends(ids[:-1], SPELLED["pieces"], "é x".encode()) is None


def test_shared_tokens_have_the_same_text_in_both_tokenizers():
    student, teacher = SPELLED["pieces"], SPELLED["bytes"]
    shared = shared_tokens(student, teacher)
    assert all(student[a] == teacher[b] for a, b in zip(shared.student, shared.teacher, strict=True))
    assert len(set(shared.student.tolist())) == len(shared.student) == len(set(shared.teacher.tolist()))
    assert {student[a] for a in shared.student} == {token for token in student if token and token in set(teacher)}
    # of <0x41> and A the one that is used for text
    (used,) = PLAIN_PIECES("e", add_special_tokens=False)["input_ids"]
    assert used in shared_tokens(SPELLED["plain pieces"], teacher).student
    # a vocabulary and itself: every token is its own partner
    same = shared_tokens(student, student)
    assert (same.student == same.teacher).all() and len(same.student) == sum(bool(token) for token in student)
    # the tokens that end a turn are one whatever their text
    ends = shared_tokens(student, teacher, ((PIECES.eos_token_id, BYTES.eos_token_id),))
    assert dict(zip(*ends, strict=True))[PIECES.eos_token_id] == BYTES.eos_token_id


def test_tokens_without_bytes_are_refused():
    backend = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(
        ValueError, match=r"student\.model: student\.vocabulary: cross needs tokenizers whose tokens stand"
    ):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend), "student.model")


def test_a_turn_ends_before_what_closes_it_however_long_its_gaps():
    (reader, _), gap = readers("bytes", "bytes", (CHAT_TEMPLATE, None)), " " * 40_000
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f" a{gap}<|end|>b <|end|> "}]
    start = time.process_time()
    (example,) = reader.chat(ConversationSample(messages=chat), ChatOptions(), 100_000).examples
    text, (part,) = example.text, reader.parts(example)
    assert text[part.start : part.stop] == f"a{gap}<|end|>b" and part.closing is None
    assert time.process_time() - start < 5, "time grows with the square of the gap"
