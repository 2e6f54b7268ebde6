"""Another tokenizer: tokens aligned by bytes, the loss against fp64, the trainer and a whole run."""

import json

import numpy as np
import pytest
import torch
from dense_loss import ALL_TERMS
from distill_kernels import FusedDistillationLoss, LossTerm
from helpers import assert_as_good_as_torch, realistic_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, TRAINING_TEXT, save_tiny, tiny_model, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from distill.contract.doctor import prepare
from distill.data.chat import ChatTemplate
from distill.data.collator import Collator
from distill.data.formats import Format
from distill.judging.evaluate import evaluate
from distill.planning.devices import find_device
from distill.planning.preflight import check
from distill.recipe import Data, RecipeError, parse
from distill.run import run
from distill.teachers import cross_loss
from distill.teachers.alignment import common_boundaries, shared_tokens, token_bytes, token_ends
from distill.teachers.cross import CrossObjective, compare_by_bytes
from distill.teachers.cross_data import NAMES, CrossCollator, load_cross_data
from distill.teachers.cross_encode import PairEncoder, Reader, end_pairs
from distill.teachers.cross_loss import CrossTokenizerLoss, Spans
from distill.training.objective import DistillationObjective

WORDS = TRAINING_TEXT + "Größe naïve café 日本語の文章 Привет мир 🤖👩‍💻 e\u0301 ﬁne ½ " * 4


def pieces_tokenizer(vocab_size=330, *, prefix=True):
    """Of SentencePiece's kind: a space is U+2581, what is unknown falls back to bytes, a text begins with a space."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if prefix else []) + [normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False, limit_alphabet=30,
    )  # fmt: skip
    backend.train_from_iterator([TRAINING_TEXT.replace("\n", " ")], trainer)
    # the trainer made the bytes special; a byte is an ordinary token that only the fallback uses
    tree = json.loads(backend.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tree)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


BYTES = tiny_tokenizer(300)
MERGED = tiny_tokenizer(380, specials=("<eos>", "<bos>"))
PIECES = pieces_tokenizer()
PLAIN_PIECES = pieces_tokenizer(400, prefix=False)
TOKENIZERS = {"bytes": BYTES, "merged": MERGED, "pieces": PIECES, "plain pieces": PLAIN_PIECES}
SPELLED = {name: token_bytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
# SentencePiece cannot tell U+2581 from a space; "<" could begin one of its bytes' names
texts = st.text(
    st.one_of(st.sampled_from(WORDS), st.characters(exclude_categories=["Cs"], exclude_characters="<\u2581")),
    max_size=60,
)


def reading(name, text):
    """Ids and where they end, in bytes."""
    ids = TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]
    return ids, token_ends(ids, SPELLED[name], text.encode())


@settings(max_examples=300, deadline=None)
@given(texts, st.sampled_from(sorted(TOKENIZERS)))
def test_tokens_spell_the_text(text, name):
    """Unicode, characters split over several tokens, byte fallback, the space before the first word."""
    ids, ends = reading(name, text)
    assert ends is not None and len(ends) == len(ids)
    assert (np.diff(ends) >= 0).all() and (len(ends) == 0 or ends[-1] == len(text.encode()))


@settings(max_examples=300, deadline=None)
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
        assert covered[0].removeprefix(b" ") == covered[1].removeprefix(b" ")
        assert text.encode()[start:stop] in covered
        # no boundary of both lies within
        inside = [set(ends[(ends > start) & (ends < stop)].tolist()) for ends in (a_ends, b_ends)]
        assert not inside[0] & inside[1] and stop > start
    if one == other:
        widths = np.diff(np.concatenate([[0], a_ends]))
        assert len(boundaries) - 1 == (widths > 0).sum()


def test_what_tokens_stand_for():
    spelled = SPELLED["bytes"]
    assert spelled[BYTES("é", add_special_tokens=False)["input_ids"][0]] == b"\xc3"
    assert spelled[0] == b"<|end|>" or spelled[0] == BYTES.convert_ids_to_tokens(0).encode()
    ids = PIECES("é x", add_special_tokens=False)["input_ids"]
    assert b"".join(SPELLED["pieces"][number] for number in ids) == " é x".encode()
    assert b"\xc3" in [SPELLED["pieces"][number] for number in ids]  # by byte fallback
    # a text that the tokens do not spell
    assert reading("pieces", "a\u2581b")[1] is None
    assert token_ends(ids, SPELLED["pieces"], b"other") is None
    assert token_ends(ids[:-1], SPELLED["pieces"], "é x".encode()) is None


def test_shared_tokens():
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


# ---------------------------------------------------------------- the loss

VS, VT = 40, 50
TERMS = [LossTerm("forward_kl", 0.6), LossTerm("jsd", 0.4, beta=0.3), LossTerm("cross_entropy", 0.2)]
WIDTHS = [(1, 1), (1, 1), (2, 1), (1, 3), (2, 2), (1, 1), (3, 2), (1, 1)]  # tokens of each span, of both


def dense_f(term, p, q):
    """One divergence's terms from probabilities of the student `p` and the teacher `q`, for parts of distributions."""
    if term.type == "forward_kl":
        return q * (q / p).log() - q + p
    if term.type == "reverse_kl":
        return p * (p / q).log() - p + q
    assert term.type == "jsd"
    m = term.beta * q + (1 - term.beta) * p
    return term.beta * q * (q / m).log() + (1 - term.beta) * p * (p / m).log()


def dense_spans(z_s, z_t, ids_s, ids_t, spans, shared, terms, temperature):
    """Losses of the spans from full logits [S, V], outcome by outcome."""
    log_s, log_t = (z_s / temperature).log_softmax(-1), (z_t / temperature).log_softmax(-1)
    hard = z_s.log_softmax(-1)
    soft = [term for term in terms if term.type != "cross_entropy"]
    ce = sum(term.weight for term in terms if term.type == "cross_entropy")
    losses = []
    for (a, b), (c, d) in zip(spans.student.tolist(), spans.teacher.tolist(), strict=True):
        p, q = log_s[a - 1].exp(), log_t[c - 1].exp()
        p_of, q_of = dict(enumerate(p)), dict(enumerate(q))
        pairs = dict(zip(*(ids.tolist() for ids in shared), strict=True))
        direct = []
        if (b - a, d - c) != (1, 1) or pairs.get(ids_s[a]) != ids_t[c]:
            whole = [
                torch.stack([log_p[at - 1, ids[at]] for at in range(*ends)]).sum().exp()
                for log_p, ids, ends in ((log_s, ids_s, (a, b)), (log_t, ids_t, (c, d)))
            ]
            direct.append(tuple(whole))
            p_of[ids_s[a]], q_of[ids_t[c]] = p_of[ids_s[a]] - whole[0], q_of[ids_t[c]] - whole[1]
            pairs = {one: other for one, other in pairs.items() if one != ids_s[a] and other != ids_t[c]}
        direct += [(p_of.pop(one), q_of.pop(other)) for one, other in pairs.items()]
        rest = [torch.stack(list(left.values())) if left else z_s.new_zeros(1) for left in (p_of, q_of)]
        width = max(map(len, rest))
        rest = [torch.nn.functional.pad(left, (0, width - len(left))).sort(descending=True).values for left in rest]
        total = sum(term.weight for term in soft) * (rest[0] - rest[1]).abs().sum()
        ours, theirs = map(torch.stack, zip(*direct, strict=True))
        total = total + sum(term.weight * dense_f(term, ours, theirs).sum() for term in soft)
        losses.append(temperature**2 * total - ce * sum(hard[at - 1, ids_s[at]] for at in range(a, b)))
    return torch.stack(losses)


def case(dtype=torch.float64, *, shared=30, scale=4.0, device="cpu"):
    """Hidden states and heads of two models, tokens, spans (the first token has no prediction), shared ids."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor(WIDTHS)
    spans = []
    for side in (0, 1):
        stops = 1 + counts[:, side].cumsum(0)
        spans.append(torch.stack([stops - counts[:, side], stops], 1))
    n_s, n_t = (int(part[-1, 1]) for part in spans)
    ids_s, ids_t = (torch.randint(0, v, (n,), generator=generator) for v, n in ((VS, n_s), (VT, n_t)))
    pairs = torch.randperm(VS, generator=generator)[:shared], torch.randperm(VT, generator=generator)[:shared]
    for number in (0, 1):  # the first two spans are one shared token each
        ids_s[1 + number], ids_t[1 + number] = pairs[0][number], pairs[1][number]
    for number, (span, at) in enumerate(((2, 2), (3, 3))):  # others begin with shared tokens: of the student, of both
        ids_s[spans[0][span, 0]] = pairs[0][at]
        if number:
            ids_t[spans[1][span, 0]] = pairs[1][at]
    x, w, y, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in
                  ((n_s, 16), (VS, 16), (n_t, 24), (VT, 24)))  # fmt: skip
    x, w, y, v = (t.to(device, dtype) for t in (x * scale / 4, w, y * scale / 5, v))
    spans = Spans(*(part.to(device) for part in spans))
    return x.requires_grad_(), w.requires_grad_(), y, v, spans, ids_s.to(device), ids_t.to(device), pairs


def cross(x, w, y, v, spans, ids_s, ids_t, pairs, *, terms=TERMS, temperature=1.0, **more):
    loss = CrossTokenizerLoss(terms, pairs, temperature)(
        x[None], w, y[None], v, spans, ids_s[None], ids_t[None], **more
    )
    return loss, *torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, (x, w))


@pytest.mark.parametrize("shared", [0, 7, 30, 40])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_loss_and_gradient_follow_the_definition(shared, temperature, dtype, device):
    inputs = case(dtype, shared=max(shared, 4), device=device)
    if not shared:  # nothing but spans and the rest
        inputs = *inputs[:-1], tuple(ids[:0] for ids in inputs[-1])
    ours = cross(*inputs, temperature=temperature)

    def dense(dtype):
        x, w, y, v = (t.detach().to(dtype).requires_grad_() for t in inputs[:4])
        spans, ids_s, ids_t, pairs = inputs[4:]
        losses = dense_spans(
            x @ w.T, (y @ v.T).detach(), ids_s.tolist(), ids_t.tolist(), spans, pairs, TERMS, temperature
        )
        return losses.mean(), *torch.autograd.grad(losses.mean(), (x, w))

    for name, mine, eager, exact in zip(("loss", "dx", "dW"), ours, dense(dtype), dense(torch.float64), strict=True):
        assert_as_good_as_torch(mine, eager, exact, dtype, name)


@pytest.mark.parametrize("term", ALL_TERMS[:-1], ids=lambda term: term.type)
def test_one_tokenizer_gives_the_divergence_itself(term, device):
    """All tokens shared, every span one token: the loss over given pairs of models is the plain one."""
    x, w, y, v = realistic_heads(9, VS, 16, 24, device=device)
    x, w = x.requires_grad_(), w.requires_grad_()
    ids = torch.arange(9, device=device)
    places = torch.stack([torch.arange(1, 9), torch.arange(2, 10)], 1).to(device)
    spans, pairs = Spans(places, places), (torch.arange(VS), torch.arange(VS))
    terms = [term, LossTerm("cross_entropy", 0.3)]
    (loss, stats), *gradients = cross(
        x, w, y, v, spans, ids, ids, pairs, terms=terms, temperature=2.0, return_stats=True
    )
    labels = torch.cat([ids[1:], ids.new_tensor([-100])])
    plain, plain_stats = FusedDistillationLoss(terms, 2.0)(x, w, y, v, labels, return_stats=True)
    for mine, right in zip((loss, *gradients), (plain, *torch.autograd.grad(plain, (x, w))), strict=True):
        assert_as_good_as_torch(mine, right, right, torch.float32)
    for name, mine, right in zip(stats._fields, stats, plain_stats, strict=True):
        assert_as_good_as_torch(mine, right[:-1], right[:-1], torch.float32, name)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_zero_for_equals(temperature):
    """The same model on both sides: nothing to learn, whatever the spans and however few tokens are known as shared."""
    for shared in (VS, 10):
        x, w, _, _, spans, ids, *_ = case()
        spans = Spans(spans.student, spans.student)
        pairs = (torch.arange(shared), torch.arange(shared))
        loss, *gradients = cross(x, w, x, w, spans, ids, ids, pairs, terms=TERMS[:2], temperature=temperature)
        assert loss < 1e-12 and all(gradient.abs().max() < 1e-12 for gradient in gradients)


def test_scale_cap_bias_and_lora():
    """How a model makes logits on either side, against the definition by autograd."""
    x, w, y, v, spans, ids_s, ids_t, pairs = case()
    bias, teacher_bias = torch.randn(VS).double().requires_grad_(), torch.randn(VT).double()
    a, b = torch.randn(3, 16).double().requires_grad_(), torch.randn(VS, 3).double().requires_grad_()
    leaves = (x, w, bias, a, b)
    loss = CrossTokenizerLoss(
        TERMS, pairs, 2.0, student_logit_scale=0.7, student_softcap=5.0, teacher_logit_scale=1.3, teacher_softcap=9.0
    )(x[None], w, y[None], v, spans, ids_s[None], ids_t[None], bias, teacher_bias, (a, b, 0.5))
    ours = loss, *torch.autograd.grad(loss * 3, leaves)
    z_s = 5 * torch.tanh(0.7 * (x @ (w + 0.5 * b @ a).T + bias) / 5)
    z_t = 9 * torch.tanh(1.3 * (y @ v.T + teacher_bias) / 9)
    dense = dense_spans(z_s, z_t, ids_s.tolist(), ids_t.tolist(), spans, pairs, TERMS, 2.0).mean()
    for mine, right in zip(ours, (dense, *torch.autograd.grad(dense * 3, leaves)), strict=True):
        assert_as_good_as_torch(mine, right, right, torch.float64)


def test_chunks_and_counts(monkeypatch):
    """A span at a time, and the whole step's number of spans: the same sums."""
    inputs = case()
    (loss, stats), *gradients = cross(*inputs, return_stats=True)
    monkeypatch.setattr(cross_loss, "CHUNK_ELEMENTS", 1)
    (tight, tight_stats), *tight_gradients = cross(*inputs, return_stats=True, num_items=torch.tensor(16))
    for mine, right in zip((tight, *tight_gradients), (loss, *gradients), strict=True):
        assert_as_good_as_torch(mine * 2, right, right, torch.float64)
    for mine, right in zip(tight_stats, stats, strict=True):
        assert_as_good_as_torch(mine, right, right, torch.float32)


def test_statistics_are_at_temperature_1():
    inputs = case()
    x, w, y, v, spans, ids_s, ids_t, pairs = inputs
    (_, stats), *_ = cross(*inputs, temperature=2.5, return_stats=True)
    soft = TERMS[:2]
    args = (x @ w.T, y @ v.T, ids_s.tolist(), ids_t.tolist(), spans, pairs)
    divergence = dense_spans(*args, soft, 1.0)
    text = dense_spans(*args, [*soft, LossTerm("cross_entropy", 1.0)], 1.0) - divergence
    for name, right in (("divergence", divergence), ("cross_entropy", text), ("student_label_logprob", -text)):
        assert_as_good_as_torch(getattr(stats, name), right, right, torch.float32, name)
    tops = [z.argmax(-1)[part[:, 0] - 1] for z, part in zip(args[:2], spans, strict=True)]
    known = dict(zip(*(ids.tolist() for ids in pairs), strict=True))
    assert stats.agreement.tolist() == [
        known.get(one) == other for one, other in zip(*map(torch.Tensor.tolist, tops), strict=True)
    ]


def test_a_second_backward_raises():
    x, w, *rest = case()
    loss, *_ = (
        CrossTokenizerLoss(TERMS, rest[-1])(x[None], w, rest[0][None], rest[1], rest[2], rest[3][None], rest[4][None]),
        0,
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()


# ---------------------------------------------------------------- data

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


def readers(student="bytes", teacher="merged", templates=(None, None)):
    made = []
    for name, template, field in zip((student, teacher), templates, ("student.model", "teacher.model"), strict=True):
        chat = None if template is None else ChatTemplate(template, TOKENIZERS[name])
        made.append(Reader(TOKENIZERS[name], chat, field))
    return made


def encode(rows, *, max_length=64, train_on="all", **more):
    made = readers(**more)
    columns = {name: name for name in rows[0] if name in ("text", "prompt", "completion", "messages")}
    kind = "chat" if "messages" in columns else "prompt_completion" if "prompt" in columns else "text"
    encoder = PairEncoder(*made, Format(kind, columns), max_length=max_length, train_on=train_on)
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
    shouting = CLOSED.replace("m['content'] | trim", "m['content'] | trim | upper")
    pairs, tally, _ = encode(rows, templates=(CHAT_TEMPLATE, shouting))
    assert not pairs and tally.dropped["no assistant turn"] == 1
    assert tally.dropped["the two chat templates write what the assistant says differently"] == 1
    pairs, tally, _ = encode([{"text": "a\u2581b and more"}, {"text": ""}], student="pieces")
    assert not pairs and tally.dropped["tokens do not spell the text"] == 1 and tally.dropped["empty"] == 1


def data_section(folder, **more):
    validation = {"fraction": 0.25, **more.pop("validation", {})}
    return Data(source=str(folder / "data.jsonl"), max_length=96, validation=validation, **more)


@pytest.mark.parametrize("packing", [True, False])
def test_rows_hold_both_readings(folders, packing):
    splits = load_cross_data(data_section(folders, packing=packing), PIECES, MERGED, seed=1)
    assert set(splits.train.column_names) == set(NAMES)
    count, several = 0, False
    for row in splits.train:
        for ids, positions in (("input_ids", "position_ids"), ("teacher_input_ids", "teacher_position_ids")):
            assert len(row[ids]) == len(row[positions]) <= 96 and row[positions][0] == 0
        spans = np.array(row["spans"]).reshape(-1, 4)
        learned = np.flatnonzero(np.array(row["labels"]) != -100)
        assert (learned == spans[:, 0]).all() and (
            np.array(row["labels"])[learned] == np.array(row["input_ids"])[learned]
        ).all()
        # no span begins a document, nor lies in two
        for side, name in ((0, "position_ids"), (2, "teacher_position_ids")):
            positions = np.array(row[name])
            assert (positions[spans[:, side]] > 0).all()
            document = (positions == 0).cumsum()
            assert (document[spans[:, side] - 1] == document[spans[:, side + 1] - 1]).all()
        both = [(np.array(row[name]) == 0).cumsum() for name in ("position_ids", "teacher_position_ids")]
        assert (both[0][spans[:, 0]] == both[1][spans[:, 2]]).all()
        several |= both[0][-1] > 1
        count += len(spans)
    assert several == packing and count == splits.report.spans
    assert "one token of each" in str(splits.report)
    again = load_cross_data(data_section(folders, packing=packing), PIECES, MERGED, seed=1)
    assert again.report.from_cache and again.train[0] == splits.train[0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_name_the_spans(folders, side):
    rows = list(load_cross_data(data_section(folders), PIECES, MERGED, seed=1).train)[:3]
    batch = CrossCollator(Collator(0, pad_to_multiple_of=32, padding_side=side), 0)(rows)
    spans = batch["spans"].tolist()
    expected = [
        (row["input_ids"][a:b], row["teacher_input_ids"][c:d])
        for row in rows for a, b, c, d in np.array(row["spans"]).reshape(-1, 4)
    ]  # fmt: skip
    own, others = batch["input_ids"].flatten().tolist(), batch["teacher_input_ids"].flatten().tolist()
    assert [(own[a:b], others[c:d]) for a, b, c, d in spans] == expected
    assert (batch["labels"] != -100).sum() == len(spans)
    assert batch["valid_rows"].tolist() == [a - 1 for a, *_ in spans]


# ---------------------------------------------------------------- the objective, the contract, a whole run

RECIPE = """
teacher: {{model: {teacher}}}
student: {{model: {student}, vocabulary: cross}}
data: {{source: {data}, max_length: 96, validation: {{fraction: 0.25}}}}
loss: {{temperature: 2.0, terms: [{{type: forward_kl, weight: 1.0}}, {{type: cross_entropy, weight: 0.1}}]}}
train: {{steps: 12, batch_size: 2, learning_rate: 0.01, device: cpu, log_every: 4, eval_every: 6}}
generate: {{prompts: [The teacher], max_new_tokens: 4}}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A teacher and a student with tokenizers of different kinds, and text."""
    root = tmp_path_factory.mktemp("cross")
    save_tiny(root / "teacher", tiny_model(MERGED, 2, 64, seed=1), MERGED)
    save_tiny(root / "student", tiny_model(PIECES, 1, 32, seed=3), PIECES)
    rows = [{"text": f"The teacher number {n} explains {n * n} and the student listens. Größe {n}"} for n in range(80)]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def pair_of_models(loss="forward_kl", **settings):
    vocabularies = compare_by_bytes(*readers("pieces", "merged"))
    teacher, student = tiny_model(MERGED, 2, 64, seed=1, kind="gemma2"), tiny_model(PIECES, 1, seed=3)
    loss = {"terms": [{"type": loss}], **settings}
    return CrossObjective(teacher, student, loss, shared=vocabularies.shared), student.requires_grad_(), teacher


def rows_of(folders, count=8, **more):
    return list(load_cross_data(data_section(folders, **more), PIECES, MERGED, seed=1).train)[:count]


def test_objective_follows_the_definition(folders):
    """Both models' own logits, a document at a time: packing and padding mix nothing."""
    objective, student, teacher = pair_of_models(temperature=1.5)
    rows = rows_of(folders, 3)
    collate = objective.collator(Collator(0, pad_to_multiple_of=64))
    output = student(**objective.compare(collate(rows)))
    losses = []
    for row in rows:
        spans = torch.tensor(row["spans"]).view(-1, 4)
        z_s, z_t = (
            torch.cat([
                model(input_ids=torch.tensor([row[ids][start:stop]]), use_cache=False).logits[0].detach().double()
                for start, stop in documents(row[positions])
            ])
            for model, ids, positions in (
                (student, "input_ids", "position_ids"), (teacher, "teacher_input_ids", "teacher_position_ids"),
            )
        )  # fmt: skip
        losses.append(dense_spans(
            z_s, z_t, row["input_ids"], row["teacher_input_ids"], Spans(spans[:, :2], spans[:, 2:]), objective.shared,
            [LossTerm("forward_kl", 1.0)], 1.5,
        ))  # fmt: skip
    exact = torch.cat(losses).mean()
    assert_as_good_as_torch(output["loss"], exact, exact, torch.float32)


def documents(positions):
    starts = [number for number, position in enumerate(positions) if position == 0]
    return zip(starts, [*starts[1:], len(positions)], strict=True)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_padding_and_accumulation_change_nothing(folders, kind):
    objective, student, _ = pair_of_models(kind)
    rows = rows_of(folders)
    items = sum(len(row["spans"]) // 4 for row in rows)

    def gradients(size, plain):
        student.zero_grad()
        collate = objective.collator(plain)
        total = 0.0
        for start in range(0, len(rows), size):
            loss = student(**objective.compare(collate(rows[start : start + size]), num_items=items))["loss"]
            loss.backward()
            total += loss.detach()
        return [total, *(p.grad.clone() for p in student.parameters())]

    whole = gradients(8, Collator(0))
    for other in (gradients(1, Collator(0)), gradients(8, Collator(0, pad_to_multiple_of=128, padding_side="left"))):
        for one, right in zip(other, whole, strict=True):
            assert_as_good_as_torch(one, right, right, torch.float32)


def test_equal_models_have_nothing_to_learn(folders):
    student = tiny_model(PIECES, 1, seed=3)
    same = compare_by_bytes(*readers("pieces", "pieces"))
    objective = CrossObjective(student, student, "forward_kl", shared=same.shared)
    student.requires_grad_()
    rows = list(load_cross_data(data_section(folders), PIECES, PIECES, seed=1).train)[:3]
    batch = objective.collator(Collator(0))(rows)
    output = student(**objective.compare(batch))
    output["loss"].backward()
    assert output["loss"] < 1e-6 and max(p.grad.abs().max() for p in student.parameters()) < 1e-6
    assert objective.describe(batch).startswith("100.0% of the teacher's probability")
    # and it is the plain objective of one tokenizer
    objective.detach()
    teacher = tiny_model(PIECES, 2, seed=5)
    figures = []
    for made in (CrossObjective(teacher, student, "reverse_kl", shared=same.shared), None):
        made = made or DistillationObjective(teacher, student, "reverse_kl")
        student.zero_grad()
        inputs = (
            batch
            if isinstance(made, CrossObjective)
            else {k: batch[k] for k in ("input_ids", "labels", "position_ids")}
        )
        loss = student(**made.compare(inputs))["loss"]
        loss.backward()
        figures.append([loss.detach(), *(p.grad.clone() for p in student.parameters())])
        made.detach()
    for one, other in zip(*figures, strict=True):
        assert_as_good_as_torch(one, other, other, torch.float32)


def test_a_run_learns_across_tokenizers(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = parse(RECIPE.format(**{path.stem: path for path in folders.iterdir()}))
    result = run(recipe)
    assert result.after.forward_kl < 0.9 * result.before.forward_kl
    said = capsys.readouterr().out
    assert "tokens are the same" in said and "of the teacher's probability is on shared tokens" in said
    assert "one token of each" in said and "divergence to teacher" in said and "KL" not in said
    assert "different tokenizers" in (result.folder / "student" / "README.md").read_text()
    # the student keeps its tokenizer
    kept = AutoTokenizer.from_pretrained(result.folder / "student")
    assert kept.get_vocab() == PIECES.get_vocab()
    # the held-out figure, from the saved student by the definition
    splits = load_cross_data(recipe.data, PIECES, MERGED, seed=recipe.train.seed)
    student = AutoModelForCausalLM.from_pretrained(result.folder / "student")
    teacher = AutoModelForCausalLM.from_pretrained(folders / "teacher")
    objective = CrossObjective(teacher, student, shared=compare_by_bytes(*readers("pieces", "merged")).shared)
    again = evaluate(student, teacher, splits.validation, batch_size=3, objective=objective)
    for name in ("forward_kl", "reverse_kl", "student_cross_entropy", "teacher_cross_entropy"):
        one, other = torch.tensor(getattr(again, name)), torch.tensor(getattr(result.after, name))
        assert_as_good_as_torch(one, other, other, torch.float32, name)
    assert again.tokens == result.after.tokens


def test_recipes_that_cannot_cross():
    base = "data: {source: x.jsonl}\ntrain: {steps: 3}\nteacher: {model: t}\n"
    for text, told in (
        ("student: {from_teacher: {layers: 2}, vocabulary: cross}", "vocabulary: cross needs a student.model"),
        ("student: {init: random, config: c, vocabulary: cross}", "vocabulary: cross needs a student.model"),
    ):
        with pytest.raises(RecipeError, match=told):
            parse(text + "\n" + base)
    several = base.replace("teacher: {model: t}", "teachers: [{model: t}]") + "student: {model: s, vocabulary: cross}"
    with pytest.raises(RecipeError, match="cross compares with one teacher"):
        parse(several)


def test_random_tokens_and_smoothing_are_refused(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = RECIPE.format(**{path.stem: path for path in folders.iterdir()})
    with pytest.raises(ValueError, match=r"data\.source: synthetic has no text"):
        run(parse(text, ["data.source=synthetic"]))
    with pytest.raises(ValueError, match=r"loss\.z_loss: expected 0 with student\.vocabulary: cross"):
        run(parse(text, ["loss.z_loss=0.1"]))


def test_check_says_what_is_shared(folders):
    """`distill check` of a recipe across tokenizers: no verdict on ids, the data by both tokenizers."""
    recipe = parse(RECIPE.format(**{path.stem: path for path in folders.iterdir()}))
    report = check(recipe, find_device("cpu"))
    assert report.problems == [] and report.vocabulary_ok and "tokens are the same" in report.vocabulary
    assert "one token of each" in report.data


def test_what_looks_at_ids_refuses(folders):
    recipe = parse(RECIPE.format(**{path.stem: path for path in folders.iterdir()}))
    with pytest.raises(ValueError, match=r"student\.vocabulary: distill doctor examines one teacher over one vocab"):
        prepare(recipe)
