"""Alignment of two tokenizers' readings of one text, by the bytes that their tokens cover.

A token is the bytes it stands for: byte-level BPE spells them in its own alphabet, SentencePiece writes a space as
U+2581 and a byte as `<0xE2>`, an added token is its text. Two readings meet wherever a token of each ends at the same
byte; between two such boundaries lies a span, some tokens of the student's and some of the teacher's that cover the
same bytes. A boundary may lie within a character: what counts is that both models have read the same bytes.

    student  |The| teach|er| ex|plains|       bytes  0 3 9 11 14 20
    teacher  |The| teacher| explain|s|        bytes  0 3 11 19 20
    spans     The | teacher | explains        boundaries 0 3 11 20
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Shared(NamedTuple):
    """Tokens that stand for the same bytes in both vocabularies: entry i of one is entry i of the other.

    Attributes:
        student: int64 [C], ids in the student's vocabulary, ascending.
        teacher: int64 [C], in the teacher's.
    """

    student: np.ndarray
    teacher: np.ndarray


def token_bytes(tokenizer: Any, field: str = "tokenizer") -> list[bytes | None]:
    """Return the bytes of every token, in order of id; None where there is no such token.

    Args:
        tokenizer: a transformers tokenizer, byte-level BPE or of SentencePiece's kind.
        field: whose it is, for the error.

    Raises:
        ValueError: its tokens do not determine bytes (WordPiece, for one).
    """
    pieces = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {number: str(getattr(token, "content", token)) for number, token in tokenizer.added_tokens_decoder.items()}
    kinds = _decoders(tokenizer)
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def spell(piece: str) -> bytes:
            return b"".join(
                alphabet[letter].to_bytes(1, "big") if letter in alphabet else letter.encode() for letter in piece
            )
    elif kinds & {"ByteFallback", "Metaspace"} or (
        not kinds and any(piece.startswith(SPACE) for piece in pieces.values())
    ):

        def spell(piece: str) -> bytes:
            byte = _BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode("utf-8", "surrogatepass")
    else:
        raise ValueError(
            f"{field}: student.vocabulary: cross needs tokenizers whose tokens stand for bytes (byte-level BPE or "
            f"SentencePiece); got {type(tokenizer).__name__} with the decoder {', '.join(sorted(kinds)) or 'none'}"
        )
    last = max((*pieces, *added), default=-1)
    spelled: list[bytes | None] = [None] * (last + 1)
    for number, piece in pieces.items():
        spelled[number] = spell(piece)
    for number, text in added.items():
        spelled[number] = text.encode("utf-8", "surrogatepass")
    return spelled


def _decoders(tokenizer: Any) -> set[str]:
    """Return the types of a fast tokenizer's decoder, those inside a sequence too; empty for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set()
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return {part["type"] for part in [decoder, *decoder.get("decoders", [])] if "type" in part}


def _byte_alphabet() -> dict[str, int]:
    """Return the letters that byte-level BPE writes bytes with (Radford et al., 2019): printable Latin-1 bytes are
    themselves, the others are the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def token_ends(ids: Iterable[int], spelled: list[bytes | None], text: bytes) -> np.ndarray | None:
    """Return where each token ends in `text`, int64 [n], in bytes; None where the tokens do not spell the text.

    A space that a tokenizer adds before a word (SentencePiece at the beginning of a text) is not part of the text and
    has no width.
    """
    tokens = [spelled[number] for number in ids]
    whole = [token for token in tokens if token is not None]
    if len(whole) == len(tokens) and b"".join(whole) == text:
        return np.cumsum([len(token) for token in whole], dtype=np.int64)
    ends = matching_ends(tokens, text)
    return ends if len(ends) == len(tokens) and (ends[-1] if len(ends) else 0) == len(text) else None


def matching_ends(tokens: Iterable[bytes | None], text: bytes) -> np.ndarray:
    """Return where each of the first tokens ends in `text`, int64 [k], in bytes, up to one that does not continue it.

    Spaces as in `token_ends`.
    """
    ends = list[int]()
    position = 0
    for token in tokens:
        if token is None:
            break
        if not text.startswith(token, position):
            if not token.startswith(b" ") or not text.startswith(token[1:], position):
                break
            position -= 1
        position += len(token)
        ends.append(position)
    return np.array(ends, dtype=np.int64)


def common_boundaries(student_ends: np.ndarray, teacher_ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where both readings of one text have a token end, its beginning included.

    Args:
        student_ends: int64 [n], where each token ends, ascending; likewise `teacher_ends` [m], from the same byte.

    Returns:
        The boundaries in bytes, int64 [k], and the tokens of the student and of the teacher up to each: span i holds
        the student's tokens `cut[i]` to `cut[i + 1]`. The spans are the shortest there are.
    """
    common = np.intersect1d(student_ends, teacher_ends)
    common = np.concatenate([[0], common[common > 0]]).astype(np.int64)
    of_student = np.searchsorted(student_ends, common, side="right")
    of_teacher = np.searchsorted(teacher_ends, common, side="right")
    return common, of_student, of_teacher


def shared_tokens(
    student: list[bytes | None], teacher: list[bytes | None], pairs: tuple[tuple[int, int], ...] = ()
) -> Shared:
    """Return the ids of both vocabularies that stand for the same bytes.

    Several ids of one vocabulary may have the same bytes (`<0x41>` and `A`); then the last ones of both, those used for
    text, are a pair, the ones before them another, and so on.

    Args:
        student: bytes of each id, from `token_bytes`; likewise `teacher`.
        pairs: ids that mean the same though their texts differ, such as tokens that end a turn; they are paired first.
    """
    of_student, of_teacher = (
        _by_bytes(spelled, {pair[side] for pair in pairs}) for side, spelled in enumerate((student, teacher))
    )
    found = list(pairs)
    for token, numbers in of_student.items():
        found += zip(reversed(numbers), reversed(of_teacher.get(token, [])), strict=False)
    ids = np.array(sorted(found), dtype=np.int64).reshape(-1, 2)
    return Shared(ids[:, 0], ids[:, 1])


def _by_bytes(spelled: list[bytes | None], taken: set[int]) -> dict[bytes, list[int]]:
    """Return the ids by their bytes, without those in `taken`."""
    found: dict[bytes, list[int]] = {}
    for number, token in enumerate(spelled):
        if token and number not in taken:
            found.setdefault(token, []).append(number)
    return found
