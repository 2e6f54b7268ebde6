"""Two readings of one text in tests: tokenizers of different kinds."""

import json
from collections import Counter

from tiny import TRAINING_TEXT, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.data.chat import ChatTemplate
from distill.teachers.rows.retokenised.alignment import token_bytes
from distill.teachers.rows.retokenised.encode import TokenisedReader

WORDS = TRAINING_TEXT + "Größe naïve café 日本語の文章 Привет мир 🤖👩‍💻 e\u0301 ﬁne ½ " * 4


def pieces_tokenizer(vocab_size=330, *, prefix=True):
    """Return a SentencePiece-like tokenizer: U+2581 for spaces, byte fallback, a leading space."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if prefix else []) + [normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    # the 30 commonest characters, ties by the character: the trainer's own `limit_alphabet` breaks them by chance
    counts = Counter(TRAINING_TEXT.replace("\n", " "))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:30]
    backend.train_from_iterator(["".join(c for c in TRAINING_TEXT.replace("\n", " ") if c in alphabet)], trainer)
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


def readers(student="bytes", teacher="merged", templates=(None, None)):
    made = []
    for name, template, field in zip((student, teacher), templates, ("student.model", "teacher.model"), strict=True):
        chat = None if template is None else ChatTemplate(template, TOKENIZERS[name])
        made.append(TokenisedReader(TOKENIZERS[name], chat, field))
    return made
