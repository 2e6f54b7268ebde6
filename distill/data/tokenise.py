"""Tokenisation of rows into ids and labels, which tokens are trained on included.

All tokens of running text are trained on; it is split into pieces of `max_length` tokens. A chat, or a prompt with its
completion, is one document: the prompt is masked from the loss, and the end is truncated at `max_length`; one whose
prompt alone fills `max_length` is dropped and counted.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.data.assistant_turns import RenderedChat
from distill.data.chat import ChatOptions, ChatTemplate, TrainingChat
from distill.data.rendering import TextSpan
from distill.data.row_counts import RowCounts
from distill.data.rows import RawRow, RowFault
from distill.data.sampled_rows import TRUNCATED, sampled_ids, vocabulary_hash
from distill.data.token_cache import tokenizer_hash

if TYPE_CHECKING:
    from distill.data.formats import RowFormat
    from distill.data.row_reader import ConversationSample

BLOCK = 1 << 16  # characters per text for the tokenizer: some take quadratic time over one long word
CALL = 1 << 19  # characters per call of the tokenizer, whose result takes some 200 bytes per token
TOO_LONG = "prompt longer than data.max_length"
FEW = 4  # average characters per token
TAIL = 64  # characters by which the end of a content is told from what a template writes after it
HELD = 1 << 23  # largest number of characters of chats that wait for the tokenizer
_SURROGATE = re.compile("[\ud800-\udfff]")

_warn_once = functools.cache(logging.getLogger(__name__).warning)

RowBatch = list[tuple[int, RawRow | RowFault]]


class TokenisedDocument(Protocol):
    """Tokenised document: `columns()` by name, int32, and where it comes from."""

    @property
    def origin(self) -> int:
        """Return the hash of the text that it comes from."""
        ...

    @property
    def row(self) -> int: ...

    @property
    def message(self) -> int:
        """Return the index of the message that its last trained tokens are of; -1 where the row is no chat."""
        ...

    def columns(self) -> Mapping[str, np.ndarray]: ...


class DocumentSlice(NamedTuple):
    """Document of a row: int32 ids and labels of one length, and where it comes from (`TokenisedDocument`)."""

    ids: np.ndarray
    labels: np.ndarray
    origin: int
    row: int
    message: int = -1

    def columns(self) -> dict[str, np.ndarray]:
        return {"input_ids": self.ids, "labels": self.labels}


class MaskedText(NamedTuple):
    """Text of which some ranges are trained on.

    Attributes:
        spans: Character ranges to train on.
        templated: Whether a chat template has written it, including begin and end tokens.
        origin: Hash of the text, or of the conversation that it is a part of.
        ended: Whether the token that ends a text follows, unless it is `templated`.
        messages: Index of each span's message; empty where the row is no chat.
    """

    number: int
    text: str
    spans: list[TextSpan]
    templated: bool
    origin: int
    ended: bool = True
    messages: Sequence[int] = ()

    def cut(self) -> tuple[str, str]:
        """Return the text before the first span, and the rest."""
        start = min(start for start, _ in self.spans)
        return self.text[:start], self.text[start:]


class EncodedText(NamedTuple):
    """Tokens of a `MaskedText`: int32 ids, labels, and the index of the span that each is of, -1 for none."""

    part: MaskedText
    ids: np.ndarray
    labels: np.ndarray
    span_of: np.ndarray

    def last_message(self, length: int) -> int:
        """Return the message of the last trained token among the first `length`; -1 where the row is no chat."""
        trained = np.flatnonzero(self.labels[:length] != IGNORE_INDEX)
        return self.part.messages[self.span_of[trained[-1]]] if self.part.messages else -1


class RowEncoder:
    """Encoder of batches of rows to documents; it holds all settings and can be sent to another process.

    Attributes:
        columns: Columns of a document; for columns of indices, the columns that successive entries index, else ().
    """

    format: RowFormat
    columns: Mapping[str, tuple[str, ...]]

    def __call__(self, batch: RowBatch) -> tuple[list[TokenisedDocument], RowCounts]:
        tally = RowCounts()
        return list(self.documents(batch, tally)), tally

    def documents(self, batch: RowBatch, tally: RowCounts) -> Iterator[TokenisedDocument]:
        """Yield the documents of numbered rows; rows that cannot be used are counted, never raised.

        Raises:
            TemplateError: The chat template cannot be used for training.
        """
        raise NotImplementedError

    def settings(self) -> list[object]:
        """Return everything that affects the result, as plain JSON."""
        raise NotImplementedError

    def sample(self, row: RawRow | RowFault, tally: RowCounts) -> ConversationSample:
        """Read one row; raises RowFault if it cannot be used."""
        tally.rows_read += 1
        if isinstance(row, RowFault):
            raise row
        sample = self.format.sample(row)
        tally.see_unread(sample.unread)
        if self.format.kind in ("text", "prompts"):
            return sample
        sampled = sampled_ids(row)
        truncated = row.get(TRUNCATED) is True or (sampled is not None and not sampled.ended)
        return sample._replace(sampled=sampled, truncated=truncated)


class Encoder(RowEncoder):
    """Encoder with one tokenizer."""

    columns: Mapping[str, tuple[str, ...]] = {"input_ids": (), "labels": ()}

    def __init__(
        self,
        tokenizer: Any,
        format: RowFormat,
        template: ChatTemplate | None,
        *,
        max_length: int,
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> None:
        self.tokenizer = tokenizer
        self.format = format
        self.template = template
        self.max_length = max_length
        self.options = options
        self.end = tokenizer.eos_token_id
        self.special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.beginning = tokens_before_text(tokenizer)

    @property
    def end_text(self) -> str:
        """What stands in for the response to a prompt alone, until the student's takes its place."""
        if not self.tokenizer.eos_token:
            raise ValueError("data.format: prompts need a tokenizer with an end-of-text token, got one without")
        return self.tokenizer.eos_token

    def settings(self) -> list[object]:
        template = self.template.settings() if self.template else None
        return [tokenizer_hash(self.tokenizer), template, asdict(self.format), self.max_length, *self.options]

    def documents(self, batch: RowBatch, tally: RowCounts) -> Iterator[TokenisedDocument]:
        # Documents come in another order than their rows, whose numbers they have: sampled ids at once, chats when
        # `HELD` characters of them wait, so that a call of the tokenizer gets many, the rest at the end.
        texts: list[tuple[int, str]] = []
        waiting = list[MaskedText]()
        held = 0
        for number, row in batch:
            with tally.row(number):
                sample = self.sample(row, tally)
                if self.takes_ids(sample):
                    piece = self.sampled_piece(number, sample, tally)
                    tally.truncated += len(piece.ids) > self.max_length
                    yield piece._replace(ids=piece.ids[: self.max_length], labels=piece.labels[: self.max_length])
                    continue
                if sample.messages is None and sample.prompt is None:
                    texts.append((number, encodable(sample.text or "")))
                    continue
                sample = self.as_text(sample)
                made = self.chat(sample)
                tally.without_end += sample.truncated
                waiting += self.partly(number, sample, made)
                tally.see_chat(made)
                tally.see_roles(sample.messages or ())
                held += sum(len(part.text) for part in waiting[len(waiting) - len(made.examples) :])
            if held > HELD:
                yield from self._pieces(waiting, tally)
                waiting = []
                held = 0
        for (number, text), blocks in groupby(self._blocks_of(texts), key=lambda block: block[0]):
            yield from self._cut(number, text, (ids for _, ids in blocks), tally)
        yield from self._pieces(waiting, tally)

    def takes_ids(self, sample: ConversationSample) -> bool:
        """Return whether a row is trained on by its sampled token ids: they are of this tokenizer's vocabulary.

        Reasoning that `data.reasoning` drops has to be found in the text.
        """
        sampled = sample.sampled
        return sampled is not None and sampled.vocabulary == self._vocabulary and self.options.reasoning != "drop"

    @functools.cached_property
    def _vocabulary(self) -> str:
        return vocabulary_hash(self.tokenizer)

    def as_text(self, sample: ConversationSample) -> ConversationSample:
        """Return a row that is trained on by its text, with its answer in parts where it has any.

        Raises:
            RowFault: The text of an answer does not lead back to the ids that were sampled.
        """
        sampled = sample.sampled
        if sampled is None:
            return sample
        if sampled.vocabulary != self._vocabulary:
            sampled.require_text()
        return with_parts(sample)

    def sampled_piece(self, number: int, sample: ConversationSample, tally: RowCounts) -> DocumentSlice:
        """Return the sampled ids of row `number` as a document, of any length: the answer alone is trained on.

        Raises:
            RowFault: An id that the tokenizer lacks, an empty answer, or a prompt that leaves no room for it.
        """
        assert sample.sampled is not None
        prompt = sample.sampled.prompt
        completion = sample.sampled.completion
        largest = max(*prompt, *completion)
        if largest >= len(self.tokenizer):
            raise RowFault("wrong type", f"token id {largest:,}, and the tokenizer has {len(self.tokenizer):,}")
        text = self.tokenizer.decode(completion, skip_special_tokens=True)
        if self.options.empty_answers == "drop" and not text.strip():
            raise RowFault("empty", "a sampled answer without content; data.empty_answers: keep trains on it")
        if len(prompt) >= self.max_length:
            raise RowFault(TOO_LONG, f"{len(prompt) + len(completion)} tokens")
        tally.by_ids += 1
        tally.without_end += sample.truncated
        tally.see_roles(sample.messages or ())
        ids = np.array([*prompt, *completion], dtype=np.int32)
        labels = _labels(ids, np.arange(len(ids)) >= len(prompt))
        message = -1 if sample.messages is None else len(sample.messages) - 1
        return DocumentSlice(ids, labels, text_hash(",".join(map(str, ids.tolist()))), number, message)

    def _pieces(self, parts: Sequence[MaskedText], tally: RowCounts) -> Iterator[DocumentSlice]:
        """Yield chats and pairs as documents, without examples that are too long, which are counted."""
        kept = set[int]()
        faults = dict[int, list[RowFault]]()
        for encoded in self.encode_partly(parts, tally):
            number = encoded.part.number
            ids = encoded.ids[: self.max_length]
            labels = encoded.labels[: self.max_length]
            # the prompt alone fills `max_length`: no trained token is left
            if labels.max() == IGNORE_INDEX:
                faults.setdefault(number, []).append(RowFault(TOO_LONG, f"{len(encoded.ids)} tokens"))
                continue
            tally.truncated += len(encoded.ids) > self.max_length
            kept.add(number)
            yield DocumentSlice(ids, labels, encoded.part.origin, number, encoded.last_message(len(ids)))
        self.count_faults(kept, faults, tally)

    @staticmethod
    def count_faults(kept: set[int], faults: Mapping[int, Sequence[RowFault]], tally: RowCounts) -> None:
        for number, found in faults.items():
            if number in kept:
                tally.left_out += len(found)
            else:
                tally.drop(number, found[0])

    def chat(self, sample: ConversationSample, options: ChatOptions | None = None) -> TrainingChat:
        """Return the training examples of a chat; none for a pair without a template.

        Args:
            options: Options that replace the encoder's.

        Raises:
            RowFault: The template refuses it, or omits content.
        """
        if sample.messages is None:
            return TrainingChat([])
        assert self.template is not None, "a chat without a template"
        if self.format.kind == "prompts":
            prompt = self.template.prompt(sample.messages, sample.tools, sample.template_kwargs)
            end = self.end_text
            example = RenderedChat(prompt + end, [(len(prompt), len(prompt) + len(end))], [len(sample.messages)])
            return TrainingChat([example])
        made = self.template.for_training(
            sample.messages,
            sample.tools,
            options or self.options,
            first_trained=sample.first_trained,
            fits=self._fits,
            kwargs=sample.template_kwargs,
        )
        if not made.examples:
            raise RowFault(TOO_LONG, f"{len(sample.messages)} messages")
        return made

    def _fits(self, prompt: str) -> bool:
        """Return whether a prompt leaves room for a response; True for short texts, whose tokens are counted later."""
        return (
            len(prompt) < FEW * self.max_length
            or len(self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]) < self.max_length
        )

    def partly(self, number: int, sample: ConversationSample, made: TrainingChat) -> list[MaskedText]:
        if sample.messages is None:
            prompt = sample.prompt or ""
            text = sample.text or ""
            if self.format.kind == "prompts":
                text = self.end_text
                templated = "rendered" in self.format.columns
                whole = encodable(prompt + text)
                span = (len(prompt), len(prompt) + len(text))
                return [MaskedText(number, whole, [span], templated, text_hash(whole))]
            whole = encodable(prompt + text)
            span = (len(prompt), len(prompt) + len(text))
            return [MaskedText(number, whole, [span], False, text_hash(whole), not sample.truncated)]
        # the last example has the longest history; all examples of a chat share its hash, and are held out together
        origin = text_hash(encodable(made.examples[-1].text))
        examples = made.examples
        if sample.truncated and examples[-1].turns[-1] == len(sample.messages) - 1:
            assert self.template is not None
            last = without_end(examples[-1], str(sample.messages[-1].get("content") or ""), self.template.special)
            examples = [*examples[:-1], last]
        return [
            MaskedText(number, encodable(each.text), each.spans, True, origin, messages=each.turns) for each in examples
        ]

    def _blocks_of(self, texts: Sequence[tuple[int, str]]) -> Iterator[tuple[tuple[int, str], np.ndarray]]:
        """Yield the texts block by block, each with its text and int32 ids, several blocks per tokenizer call."""
        waiting: list[tuple[tuple[int, str], str]] = []
        characters = 0

        def encode() -> Iterator[tuple[tuple[int, str], np.ndarray]]:
            parts = [block for _, block in waiting]
            for (item, _), ids in zip(waiting, self.ids_of(parts), strict=True):
                yield item, np.array(ids, dtype=np.int32)

        for item in texts:
            for block in split_text(item[1]):
                waiting.append((item, block))
                characters += len(block)
                if characters >= CALL:
                    yield from encode()
                    waiting = []
                    characters = 0
        if waiting:
            yield from encode()

    def ids_of(self, parts: list[str]) -> list[list[int]]:
        """Tokenise without special tokens and offsets."""
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        own = getattr(TokenizersBackend, "_encode_plus", None)
        if own is None:
            _warn_once("transformers has no TokenizersBackend._encode_plus: texts are tokenised by the slower call")
        if own is None or getattr(type(self.tokenizer), "_encode_plus", None) is not own:
            return self.tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"]
        self.tokenizer("", add_special_tokens=False, verbose=False)  # resets padding set by earlier calls
        made = self.tokenizer.backend_tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return [encoding.ids for encoding in made]

    def _cut(self, number: int, text: str, parts: Iterable[np.ndarray], tally: RowCounts) -> Iterator[DocumentSlice]:
        origin = text_hash(text)
        room = self.max_length - len(self.beginning)
        beginning = np.array(self.beginning, dtype=np.int32)
        ids = np.zeros(0, dtype=np.int32)
        begun = False
        cut = 0
        last = [] if self.end is None else [self.end]

        def pieces(count: int) -> Iterator[DocumentSlice]:
            for start in range(0, count, room):
                piece = np.concatenate([beginning, ids[start : start + room]])
                if len(piece) >= 2:  # a single token is predicted by none
                    yield DocumentSlice(piece, _labels(piece, np.ones(len(piece), dtype=bool)), origin, number)

        for part in parts:
            if len(part) == 0:
                continue
            before, last = self.around(part)
            # a text that brings its own begin token loses it here: every piece gets one
            ids = np.concatenate([ids, part if begun else part[len(beginning) - len(before) :]])
            begun = True
            # pieces go on across blocks: what does not fill one waits for the next block
            whole = len(ids) // room * room
            yield from pieces(whole)
            cut = cut + whole
            ids = ids[whole:]
        # `last` is of the text's last block: no second end token after its own
        ids = np.concatenate([ids, np.array(last, dtype=np.int32)])
        if cut + len(ids) + len(beginning) < 2:
            tally.drop(number, RowFault("too short", "fewer than two tokens"))
        yield from pieces(len(ids))

    def encode_partly(self, parts: Sequence[MaskedText], tally: RowCounts) -> Iterator[EncodedText]:
        """Yield the whole tokens of each text; texts without trained tokens are counted and left out."""
        if not parts:
            return
        for part, (ids, span_of, merged) in zip(parts, self._tokens(parts), strict=True):
            if not part.templated:  # a template writes begin and end tokens itself
                before, last = self.around(ids)
                last = last if part.ended else []
                ids = np.concatenate([before, ids, last]).astype(np.int32)
                # the token that ends a text is trained on with its last span
                of_last = np.full(len(last), len(part.spans) - 1)
                span_of = np.concatenate([np.full(len(before), -1), span_of, of_last])
            labels = _labels(ids, span_of >= 0)
            if not (labels != IGNORE_INDEX).any():
                tally.drop(part.number, RowFault("no trained tokens after masking", f"{len(ids)} tokens"))
                continue
            tally.merged += merged
            yield EncodedText(part, ids, labels, span_of)

    def around(self, ids: Sequence[int] | np.ndarray) -> tuple[list[int], list[int]]:
        """Return the tokens that begin and end a text, unless the text has them already (`<s>[INST] ... </s>`)."""
        present = len(ids) > 0 and list(ids[:1]) == self.beginning, len(ids) > 0 and ids[-1] == self.end
        return [] if present[0] else self.beginning, [] if present[1] or self.end is None else [self.end]

    def _tokens(self, parts: Sequence[MaskedText]) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """Yield each text's ids, the span of each id (-1: none), and whether a token crosses the start of a span."""
        fast = self.tokenizer.is_fast
        encoded = self.tokenizer(
            [part.text for part in parts], add_special_tokens=False, return_offsets_mapping=fast, verbose=False
        )
        for number, (_, text, spans, *_) in enumerate(parts):
            ids = np.array(encoded["input_ids"][number], dtype=np.int32)
            span_of = np.full(len(ids), -1)
            merged = False
            if fast:
                offsets = np.array(encoded["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
                starts = offsets[:, 0]
                ends = offsets[:, 1]
                assert (np.diff(starts) >= 0).all(), "tokens in the order of the text"
                # thousands of spans in a long chat: only tokens that begin in one are visited
                for span, (start, end) in enumerate(spans):
                    first, last = np.searchsorted(starts, [start, end])
                    here = slice(int(first), int(last))
                    span_of[here] = np.where((ends[here] <= end) & (ends[here] > starts[here]), span, -1)
                    # a closing token that includes the white space after it (rstrip, as all of Phi-3's do)
                    for at in first + np.flatnonzero(ends[here] > end):
                        closes = int(ids[at]) in self.special and not text[end : ends[at]].strip()
                        span_of[at] = span if closes else -1
                    # a token that begins before the span and ends in it is left to the prompt, and is not trained on
                    merged = merged or bool((ends[max(0, first - 1) : first] > start).any())
            else:
                for span, (start, end) in enumerate(spans):
                    first, straddles = self._tokens_before(text, start, ids)
                    last, _ = self._tokens_before(text, end, ids)
                    span_of[first + straddles : last] = span
                    merged = merged or straddles
            yield ids, span_of, merged

    def _tokens_before(self, text: str, position: int, ids: np.ndarray) -> tuple[int, bool]:
        """Return how many tokens of `ids` are fixed by the text up to `position`, for tokenizers without offsets."""
        alone = self.tokenizer(text[:position], add_special_tokens=False, verbose=False)["input_ids"]
        same = 0
        while same < min(len(alone), len(ids)) and alone[same] == ids[same]:
            same += 1
        return same, same < len(alone)


def with_parts(sample: ConversationSample) -> ConversationSample:
    """Return a row with its sampled answer in parts, such as reasoning and tool calls, where its text lacks them."""
    sampled = sample.sampled
    if sampled is None or sampled.message is None or sample.messages is None:
        return sample
    return sample._replace(messages=[*sample.messages[:-1], sampled.message])


def without_end(example: RenderedChat, content: str, special: re.Pattern[str]) -> RenderedChat:
    """Return an example whose last turn was cut off, up to where its content ends.

    Args:
        example: Rendered chat, whose last span ends with what the template closes a turn with.
        content: Content of the last turn.
        special: Pattern of the tokenizer's special tokens; those that the content ends with stay.
    """
    start, stop = example.spans[-1]
    text = example.text[:stop]
    tail = content.rstrip()[-TAIL:]
    # closing tokens are taken off one by one, from the last, until the text ends as the content does
    for match in reversed(list(special.finditer(text, start))):
        if (tail and text.rstrip().endswith(tail)) or text[match.end() :].strip():
            break
        text = text[: match.start()]
    # white space at the end was sampled as far as the content has it
    written = text.rstrip()
    sampled = content[len(content.rstrip()) :]
    end = len(written) + (len(sampled) if text.startswith(sampled, len(written)) else 0)
    text = text[: max(start, end)]
    return example._replace(text=text, spans=[*example.spans[:-1], (start, len(text))])


def tokens_before_text(tokenizer: Any) -> list[int]:
    """Return the token that a tokenizer puts before a text, as a list; empty if none."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id] if begins else []


def encodable(text: str) -> str:
    """Return the text, if it can be encoded.

    Raises:
        RowFault: It contains half a surrogate pair.
    """
    if _SURROGATE.search(text):
        raise RowFault("invalid Unicode", "half a surrogate pair, or a byte that is not UTF-8")
    return text


def _labels(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    labels = np.where(learned, ids, IGNORE_INDEX).astype(np.int32)
    # no token predicts the first one
    labels[:1] = IGNORE_INDEX
    return labels


def text_hash(text: str) -> int:
    """Return a 64-bit hash of a text, which identifies the origin of a document."""
    # block by block: the bytes of a whole text would take its memory a second time
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(text), BLOCK):
        digest.update(text[start : start + BLOCK].encode())
    return int.from_bytes(digest.digest(), "little")


def split_text(text: str, size: int = BLOCK) -> Iterator[str]:
    """Yield a text in parts of at most `size` characters, split after a newline, else before a space, else anywhere."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind("\n", start, start + size) + 1
        if cut <= start:
            # before a space: tokenizers join it with the word that follows
            cut = text.rfind(" ", start + 1, start + size)
        if cut <= start:
            cut = start + size
        yield text[start:cut]
        start = cut
    yield text[start:]
