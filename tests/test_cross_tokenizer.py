"""Another tokenizer: tokens aligned by bytes, the loss against fp64, the trainer and a whole run."""

import numpy as np
import pytest
import torch
from dense_loss import ALL_TERMS
from distill_kernels import FusedDistillationLoss, LossTerm
from helpers import assert_as_good_as_torch, realistic_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TRAINING_TEXT, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.teachers import cross_loss
from distill.teachers.alignment import common_boundaries, shared_tokens, token_bytes, token_ends
from distill.teachers.cross_loss import CrossTokenizerLoss, Spans

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
    state = backend.to_str()
    import json

    tree = json.loads(state)
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
