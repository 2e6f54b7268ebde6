"""Two readings of one text in tests: tokenizers of different kinds, and the loss across them from its definition."""

import json

import torch
from tiny import TRAINING_TEXT, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.data.chat import ChatTemplate
from distill.teachers.cross.alignment import token_bytes
from distill.teachers.cross.encode import Reader

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


def readers(student="bytes", teacher="merged", templates=(None, None)):
    made = []
    for name, template, field in zip((student, teacher), templates, ("student.model", "teacher.model"), strict=True):
        chat = None if template is None else ChatTemplate(template, TOKENIZERS[name])
        made.append(Reader(TOKENIZERS[name], chat, field))
    return made
