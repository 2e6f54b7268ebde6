"""Texts by two tokenizers: where both end a token, what is compared, what is left out."""

import pytest
from tiny import CHAT_TEMPLATE
from two_tokenizers import WORDS, readers

from distill.data.chat import ChatOptions
from distill.data.formats import RowFormat
from distill.teachers.rows.retokenised.encode import PairEncoder, end_pairs

CLOSED = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}<eos>{% else %}<bos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


CHAT = [
    {"role": "user", "content": "How many tokens?"},
    {"role": "assistant", "content": "Nobody has counted the tokens. Größe 🤖"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "The teacher counted 259."},
]


def encode(rows, *, max_length=64, train_on="all", **more):
    made = readers(**more)
    columns = {name: name for name in rows[0] if name in ("text", "prompt", "completion", "messages")}
    kind = "chat" if "messages" in columns else "prompt_completion" if "prompt" in columns else "text"
    encoder = PairEncoder(*made, RowFormat(kind, columns), max_length=max_length, options=ChatOptions(train_on))
    return *encoder(list(enumerate(rows))), made


def covered(pair, made, number):
    """The bytes of a span in both readings."""
    a, b, c, d = pair.spans[number]
    return [
        b"".join(reader.spelled[token] for token in ids[start:stop])
        for reader, ids, start, stop in ((made[0], pair.student, a, b), (made[1], pair.teacher, c, d))
    ]


@pytest.mark.parametrize("student, teacher", [("bytes", "merged"), ("pieces", "bytes"), ("plain pieces", "pieces")])
def test_running_text_is_cut_where_both_end_a_token(student, teacher):
    text = WORDS[:700]
    pairs, tally, made = encode([{"text": text}], student=student, teacher=teacher)
    assert tally.rows_read == 1 and not tally.dropped and len(pairs) > 3
    assert all(max(len(pair.student), len(pair.teacher)) <= 64 for pair in pairs)
    before = [len(reader.beginning) for reader in made]
    for side, reader in enumerate(made):
        said = b"".join(reader.spelled[token] for pair in pairs for token in pair[side][before[side] :])
        assert said.removeprefix(b" ") == text.encode() + reader.spelled[reader.end]
    for pair in pairs:
        for number in range(len(pair.spans)):
            one, other = covered(pair, made, number)
            last = pair is pairs[-1] and number == len(pair.spans) - 1
            assert (
                one == other
                or one.lstrip(b" ") == other.lstrip(b" ")
                or (last and (one, other) == tuple(reader.spelled[reader.end] for reader in made))
            )
        # spans follow each other, and something stands before the first
        assert (pair.spans[1:, 0] == pair.spans[:-1, 1]).all() and (pair.spans[1:, 2] == pair.spans[:-1, 3]).all()
        assert pair.spans[0, 0] > 0 and pair.spans[0, 2] > 0


def test_the_end_of_a_text_is_learned_wherever_it_is_cut():
    """The cut is made one span earlier if the last one would leave the end token alone."""
    texts = [{"text": WORDS[:size]} for size in range(500, 660)]
    pairs, tally, made = encode(texts, student="plain pieces", teacher="pieces")
    ends = [pair for pair in pairs if pair.student[-1] == made[0].end]
    assert len(ends) == len(texts) == tally.rows_read and not tally.dropped
    assert all(pair.spans[-1].tolist()[1::2] == [len(pair.student), len(pair.teacher)] for pair in ends)


@pytest.mark.parametrize("student, teacher", [("pieces", "pieces"), ("pieces", "merged"), ("merged", "pieces")])
def test_beginning_and_end_tokens_in_a_text_are_not_doubled(student, teacher):
    """Begin and end tokens in a text are read once, also where `<s>` is plain text to the other tokenizer."""
    made = readers(student, teacher)
    for reader, name in zip(made, (student, teacher), strict=True):
        reader.beginning = [reader.tokenizer.convert_tokens_to_ids("<s>" if name == "pieces" else "<bos>")]
    text = "<s>The teacher explains and the student listens.</s>"
    for row in ({"text": text}, {"prompt": text[:20], "completion": text[20:]}):
        kind = "text" if "text" in row else "prompt_completion"
        encoder = PairEncoder(*made, RowFormat(kind, {name: name for name in row}), max_length=64)
        ((pair,), _) = encoder([(0, row)])
        for reader, ids in zip(made, (pair.student, pair.teacher), strict=True):
            assert ids[0] == reader.beginning[0] and ids.tolist().count(ids[0]) == 1
            assert ids.tolist().count(reader.end) == (reader.tokenizer.eos_token == "</s>")
        found = [covered(pair, made, number) for number in range(len(pair.spans))]
        assert all(one.strip() == other.strip() for one, other in found)
        said = b"".join(one for one, _ in found).strip()
        assert said.endswith(b" listens.</s>") and b"<s>" not in said
        if "text" in row:
            assert said == text[3:].encode()
    long = "<s>" + "The teacher explains. " * 20
    encoder = PairEncoder(*made, RowFormat("text", {"text": "text"}), max_length=64)
    pairs, _ = encoder([(0, {"text": long})])
    assert len(pairs) > 1
    for reader, side in zip(made, zip(*(pair[:2] for pair in pairs), strict=True), strict=True):
        assert all(ids[0] == reader.beginning[0] and len(ids) <= 64 for ids in side)


def test_a_prompt_is_not_compared():
    prompt, completion = "Question: how many tokens? Answer:", " nobody has counted"
    (pair,), _, made = encode([{"prompt": prompt, "completion": completion}])
    said = [b"".join(part) for part in zip(*(covered(pair, made, n) for n in range(len(pair.spans) - 1)), strict=True)]
    assert said[0] == said[1] and completion.encode().endswith(said[0]) and len(said[0]) > 10
    assert covered(pair, made, len(pair.spans) - 1) == [reader.spelled[reader.end] for reader in made]


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_chats_go_through_both_templates(train_on):
    """Other words around the turns, other tokens at their ends: what the assistant says is compared, and its end."""
    (pair,), tally, made = encode(
        [{"messages": CHAT}], max_length=400, train_on=train_on, templates=(CHAT_TEMPLATE, CLOSED)
    )
    assert not tally.dropped
    found = [covered(pair, made, number) for number in range(len(pair.spans))]
    closings = [made[0].spelled[made[0].closing()], b"<eos>"]
    said = [turn["content"].encode() for turn in CHAT if turn["role"] == "assistant"][-1 if train_on == "last" else 0 :]
    assert found.count(closings) == len(said)
    assert all(one == other for one, other in found if [one, other] != closings)
    parts = b"".join(b"\0" if both == closings else both[0] for both in found).split(b"\0")
    assert parts.pop() == b"" and len(parts) == len(said)
    # one template puts a space before the answer, which may be part of its first token: then that is not compared
    assert all(whole.endswith(part) and len(part) >= len(whole) - 8 for part, whole in zip(parts, said, strict=True))
    assert (made[0].closing(), made[1].closing()) in end_pairs(*made)


def test_rows_that_cannot_be_compared_are_counted():
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [*CHAT[:1], {"role": "assistant", "content": "the same words"}]},
    ]
    starred = CLOSED.replace("m['content'] | trim", "('* ' ~ m['content']) | trim")
    pairs, tally, _ = encode(rows, templates=(CHAT_TEMPLATE, starred))
    assert not pairs and tally.dropped["no assistant turn"] == 1
    assert tally.dropped["the two chat templates render the assistant's text differently"] == 1
    pairs, tally, _ = encode([{"text": "a\u2581b and more"}, {"text": ""}], student="pieces")
    assert not pairs and tally.dropped["tokens do not spell the text"] == 1 and tally.dropped["empty"] == 1
