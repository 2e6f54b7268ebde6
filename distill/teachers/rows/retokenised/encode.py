"""Encoding of rows as pairs of readings: a text by the student's tokenizer and the teacher's, and their shared spans.

Running text is read by both and cut, where both have a token end, into pieces that fit both. A chat is rendered by each
model's own template; the assistant's turns, found in both texts, are compared, and the token that ends each of them. A
span is trained only where both readings have a token of the same document before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.data.assistant_turns import RenderedChat
from distill.data.chat import ChatOptions, ChatTemplate, TrainingChat
from distill.data.formats import RowFormat
from distill.data.row_counts import RowCounts
from distill.data.row_reader import ConversationSample
from distill.data.rows import RowFault
from distill.data.token_cache import tokenizer_hash
from distill.data.tokenise import (
    TOO_LONG,
    RowBatch,
    RowEncoder,
    encodable,
    split_text,
    text_hash,
    tokens_before_text,
    with_parts,
)
from distill.teachers.rows.retokenised.alignment import common_boundaries, matching_ends, token_bytes, token_ends

SMALLEST_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class TokenizedPair(NamedTuple):
    """One document as both models read it.

    Attributes:
        student: int32 [n], token ids; likewise `teacher` [m].
        spans: int32 [k, 4], first token and the one after the last of the student's, then of the teacher's.
        answer: int32 [2], first token of the last answer, of the student's and of the teacher's: where a rollout
            begins; [0] for running text.
        message: Index of the message that the last answer is; -1 where the row is no chat.
    """

    student: np.ndarray
    teacher: np.ndarray
    spans: np.ndarray
    answer: np.ndarray
    origin: int
    row: int = -1
    message: int = -1

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of `PairEncoder.columns`, with a label at each span's first token."""
        labels = np.full(len(self.student), IGNORE_INDEX, dtype=np.int32)
        labels[self.spans[:, 0]] = self.student[self.spans[:, 0]]
        columns = (self.student, labels, self.teacher, self.spans, self.answer)
        return dict(zip(PairEncoder.columns, columns, strict=True))


class AnswerText(NamedTuple):
    """Part of a text that is compared: characters `start` to `stop`, and the special token right after it."""

    start: int
    stop: int
    closing: str | None


class TokenisedReader:
    """One model's reading of text: its tokenizer, the bytes of its tokens, its chat template.

    Args:
        template: Chat template of the model; None without one.
        field: "student.model" or "teacher.model", for errors.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None, field: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.side = field.partition(".")[0]
        self.spelled = token_bytes(tokenizer, field)
        self.end = tokenizer.eos_token_id
        self.beginning = tokens_before_text(tokenizer)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        alternatives = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)"
        self._special = re.compile(alternatives)

    def read(self, text: str, *, partly: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a text, int32 [n], and where each ends in it, in bytes, int64 [n].

        Args:
            partly: True to return the tokens before the first one that does not spell the text, not to raise.

        Raises:
            RowFault: the tokens do not spell the text.
        """
        ids = [np.zeros(0, dtype=np.int32)]
        ends = [np.zeros(0, dtype=np.int64)]
        before = 0
        for block in split_text(text):
            here = self.tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"]
            raw = block.encode()
            found = token_ends(here, self.spelled, raw)
            if found is None and not partly:
                raise RowFault(
                    "tokens do not spell the text", f"the {self.side}'s tokenizer changes it: {block[:80]!r}"
                )
            here_ends = matching_ends([self.spelled[number] for number in here], raw) if found is None else found
            ids.append(np.array(here[: len(here_ends)], dtype=np.int32))
            ends.append(here_ends + before)
            if found is None:
                break
            before += len(raw)
        return np.concatenate(ids), np.concatenate(ends)

    def chat(self, sample: ConversationSample, options: ChatOptions, max_length: int) -> TrainingChat:
        """Return a chat as this model's template renders it, with prompts of fewer than `max_length` tokens."""
        assert self.template is not None and sample.messages is not None

        def fits(prompt: str) -> bool:
            return len(self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]) < max_length

        made = self.template.for_training(
            sample.messages,
            sample.tools,
            options,
            first_trained=sample.first_trained,
            fits=fits,
            kwargs=sample.template_kwargs,
        )
        if not made.examples:
            raise RowFault(f"{TOO_LONG}, the teacher's or the student's", f"{len(sample.messages)} messages")
        return made

    def parts(self, example: RenderedChat) -> list[AnswerText]:
        """Return the assistant's turns in an example."""
        return [self._part(example.text, *span) for span in example.spans]

    def _part(self, text: str, start: int, stop: int) -> AnswerText:
        """Return a turn without the spaces around it and the tokens that close it."""
        # from the right: special tokens with nothing but spaces after them close the turn, those before are its text
        for match in reversed(list(self._special.finditer(text, start, stop))):
            if text[match.end() : stop].strip():
                break
            stop = match.start()
        answer = text[start:stop]
        stop = start + len(answer.rstrip())
        start = min(start + len(answer) - len(answer.lstrip()), stop)
        closing = self._special.match(text, stop)
        return AnswerText(start, stop, closing[0] if closing else None)

    def closes(self, part: AnswerText, ids: np.ndarray, at: int) -> bool:
        """Return whether token `at` is the special one that closes `part`."""
        if part.closing is None or at >= len(ids):
            return False
        return ids[at] == self.tokenizer.convert_tokens_to_ids(part.closing)

    def closing(self) -> int | None:
        """The token that ends an assistant's turn, by the template; None where no special token does."""
        if self.template is None:
            return None
        (example,) = self.template.for_training(SMALLEST_CHAT).examples
        closing = self.parts(example)[-1].closing
        return None if closing is None else self.tokenizer.convert_tokens_to_ids(closing)

    def space_before_answers(self) -> str:
        """The white space that the template writes between its generation prompt and an answer."""
        if self.template is None:
            return ""
        (example,) = self.template.for_training(SMALLEST_CHAT).examples
        return example.text[example.spans[-1][0] : self.parts(example)[-1].start]


def end_pairs(student: TokenisedReader, teacher: TokenisedReader) -> tuple[tuple[int, int], ...]:
    """Return the pairs of tokens that mean the same whatever their texts: the ends of a turn, and of a text."""
    pairs: list[tuple[int, int]] = []
    for one, other in ((student.closing(), teacher.closing()), (student.end, teacher.end)):
        if one is not None and other is not None and all(one != a and other != b for a, b in pairs):
            pairs.append((one, other))
    return tuple(pairs)


class PairEncoder(RowEncoder):
    """Encoder of both models' readings; a row of data holds both and `spans`, four numbers each (`TokenizedPair`)."""

    columns: Mapping[str, tuple[str, ...]] = {
        "input_ids": (),
        "labels": (),
        "teacher_input_ids": (),
        "spans": ("input_ids",) * 2 + ("teacher_input_ids",) * 2,
        "answer_starts": ("input_ids", "teacher_input_ids"),
    }

    def __init__(
        self,
        student: TokenisedReader,
        teacher: TokenisedReader,
        format: RowFormat,
        *,
        max_length: int,
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> None:
        self.sides = (student, teacher)
        self.format = format
        self.max_length = max_length
        self.options = options
        self.ends = [[student.end], [teacher.end]] if None not in (student.end, teacher.end) else [[], []]
        templates = [side.template for side in self.sides if side.template is not None]
        # whether both templates have the same variables: by others, the teacher's turn may begin with a thought, empty
        # or not, that the student's lacks
        self.rendered_alike = len(templates) < 2 or templates[0].kwargs == templates[1].kwargs

    def settings(self) -> list[object]:
        templates = [side.template and side.template.settings() for side in self.sides]
        tokenizers = [tokenizer_hash(side.tokenizer) for side in self.sides]
        return [
            "pairs with the starts of answers",
            tokenizers,
            templates,
            asdict(self.format),
            self.max_length,
            *self.options,
        ]

    def documents(self, batch: RowBatch, tally: RowCounts) -> Iterator[TokenizedPair]:
        for number, row in batch:
            with tally.row(number):
                sample = self.sample(row, tally)
                if sample.sampled is not None:  # both models read the text
                    sample.sampled.require_text()
                    sample = with_parts(sample)
                tally.without_end += sample.truncated
                if self.format.kind == "prompts":
                    pairs = [self._prompt(sample, tally)]
                elif sample.messages is not None:
                    pairs = self._chat(sample, tally)
                elif sample.prompt is not None:
                    prompt = encodable(sample.prompt)
                    completion = encodable(sample.text or "")
                    pairs = [self._completion(prompt, completion, tally, ended=not sample.truncated)]
                else:
                    pairs = self._pieces(encodable(sample.text or ""))
                if not pairs:
                    raise RowFault("too short", "no span with something before it")
                for pair in pairs:
                    yield pair._replace(row=number)

    def _pieces(self, text: str) -> list[TokenizedPair]:
        """Return the pairs of running text, cut where both readings have a token end."""
        readings, boundaries, before = self._common(text)
        by_side = np.ascontiguousarray(boundaries.T)  # searchsorted copies what has strides
        pairs = []
        starts = [0, 0]
        first = 0
        last = len(boundaries) - 1
        origin = text_hash(text)
        while first < last:
            # the last boundary up to which both readings have room, from the present one on
            room = [starts[side] + self.max_length - len(before[side]) for side in (0, 1)]
            stop = min(int(np.searchsorted(by_side[side], room[side], "right")) for side in (0, 1)) - 1
            if stop <= first:
                raise RowFault("no common token end within data.max_length", repr(text[:80]))
            if stop == last - 1 > first + 1:
                stop -= 1  # the last span, the end of the text, would stand alone, with nothing before it to learn from
            cuts = boundaries[first : stop + 1]
            ids = [_joined(before[side], readings[side][starts[side] : cuts[-1, side]]) for side in (0, 1)]
            pair = self._cut(ids, [cuts - starts + [len(own) for own in before]], origin)
            if pair:
                pairs.append(pair)
            first = stop
            starts = cuts[-1].tolist()
            before = [side.beginning for side in self.sides]
        return pairs

    def _common(self, text: str) -> tuple[list[np.ndarray], np.ndarray, list[list[int]]]:
        """Return both readings of a text with the token that ends it, the tokens up to each common boundary, [k, 2],
        and the tokens to put before each reading.
        """
        (ids_s, ends_s), (ids_t, ends_t) = (side.read(text) for side in self.sides)
        _, *cuts = common_boundaries(ends_s, ends_t)
        boundaries = np.stack(cuts, 1)
        before, after = self._around(ids_s, ids_t)
        # the ends of the text are a pair of tokens without bytes: one boundary more
        if after[0]:
            boundaries = np.concatenate([boundaries, boundaries[-1:] + 1])
        return [_joined(ids_s, after[0]), _joined(ids_t, after[1])], boundaries, before

    def _around(self, *readings: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens that begin both readings, each unless the text has it itself (`<s>[INST] ... </s>`), and
        those that end them, unless the text has one of them: then they could not be compared.
        """
        both = list(zip(self.sides, readings, strict=True))
        before = [[] if ids[:1].tolist() == side.beginning else side.beginning for side, ids in both]
        ended = any(ids[-1:].tolist() == [side.end] for side, ids in both)
        return before, [[], []] if ended else self.ends

    def _cut(
        self,
        ids: list[np.ndarray],
        runs: list[np.ndarray],
        origin: int,
        starts: Sequence[tuple[int, int]] = (),
        messages: Sequence[int] = (),
    ) -> TokenizedPair | None:
        """Return the pair within `max_length`; None where it has no span.

        Args:
            ids: Token ids of student and teacher, int32 [n] each.
            runs: Boundaries of the spans in both token sequences, int64 [k, 2] each.
            starts: First token, in both sequences, of each run's response; empty for plain text.
            messages: Index of each response's message; empty where the row is no chat.
        """
        parts = [np.stack([run[:-1, 0], run[1:, 0], run[:-1, 1], run[1:, 1]], 1) for run in runs]
        spans = np.concatenate(parts) if parts else np.zeros((0, 4), dtype=np.int64)
        # a span is learned where both readings have something before it, end it within the maximum, and have tokens in
        # it
        learned = (spans[:, 0] > 0) & (spans[:, 2] > 0) & (spans[:, [1, 3]] <= self.max_length).all(1)
        learned &= (spans[:, 1] > spans[:, 0]) & (spans[:, 3] > spans[:, 2])
        if not learned.any():
            return None
        student, teacher = (own[: self.max_length] for own in ids)
        # responses that begin before the last learned span: the last of them is the one that a rollout replaces
        begun = [start for start in starts if start[0] <= spans[learned][-1, 0]]
        answer = np.array(begun[-1:], dtype=np.int32).reshape(-1)
        message = messages[len(begun) - 1] if messages and begun else -1
        return TokenizedPair(student, teacher, spans[learned].astype(np.int32), answer, origin, message=message)

    def _completion(self, prompt: str, completion: str, tally: RowCounts, *, ended: bool) -> TokenizedPair:
        """Return the pair of a prompt, masked from the loss, and its completion."""
        text = prompt + completion
        (ids_s, ends_s), (ids_t, ends_t) = (side.read(text) for side in self.sides)
        start = len(prompt.encode())
        stop = len(text.encode())
        # only the completion is compared; its boundaries count the tokens of the prompt too
        run = boundaries_of(ends_s, ends_t, start, start, stop - start)
        before, after = self._around(ids_s, ids_t)
        after = after if ended else [[], []]
        if after[0]:
            run = np.concatenate([run, run[-1:] + 1])
        ids = [_joined(before[0], ids_s, after[0]), _joined(before[1], ids_t, after[1])]
        first, other = _answer_start(ends_s, ends_t, start, start)
        starts = [(first + len(before[0]), other + len(before[1]))]
        return self._partly(ids, [run + [len(own) for own in before]], text, tally, starts)

    def _chat(self, sample: ConversationSample, tally: RowCounts) -> list[TokenizedPair]:
        """Return the pairs of a chat by both templates; one example per turn where one of them needs that."""
        options = self.options
        if not self.rendered_alike and options.train_on != "last":
            options = options._replace(train_on="each")
        made = [side.chat(sample, options, self.max_length) for side in self.sides]
        if any(chat.rewritten for chat in made):
            # A template that renders earlier turns differently makes one example for each turn. The other side has to
            # do so too: the n-th examples of both are compared.
            each = self.options._replace(train_on="each")
            made = [
                chat if chat.rewritten else side.chat(sample, each, self.max_length)
                for side, chat in zip(self.sides, made, strict=True)
            ]
        student, teacher = made
        tally.see_chat(
            student._replace(
                rewritten=student.rewritten or teacher.rewritten, named=tuple({*student.named, *teacher.named})
            )
        )
        pairs = list[TokenizedPair]()
        faults = list[RowFault]()
        origin = text_hash(encodable(student.examples[-1].text))
        last = len(sample.messages or ()) - 1
        for own, other in zip(student.examples, teacher.examples, strict=False):  # of each as many as have room
            ended = not (sample.truncated and own.turns[-1] == last)
            try:
                other = other if self.rendered_alike else self._after_prompt(own, other)
                pairs.append(self._example(own, other, tally, ended=ended)._replace(origin=origin))
            except RowFault as fault:
                faults.append(fault)
        if faults and not pairs:
            raise faults[0]
        tally.left_out += len(student.examples) - len(pairs)
        return pairs

    def _after_prompt(self, example: RenderedChat, other: RenderedChat) -> RenderedChat:
        """Return the teacher's example with the student's answer right after the teacher's prompt.

        Args:
            example: The student's example of a turn.
            other: The teacher's, whose turn may have a thought before the answer, which the student's lacks.
        """
        parts = self.sides[0].parts(example)
        other_parts = self.sides[1].parts(other)
        if len(parts) != 1 or len(other_parts) != 1:
            return other
        answer = example.text[parts[0].start : parts[0].stop]
        ((start, stop),) = other.spans
        begin, end, _ = other_parts[0]
        if not other.text[begin:end].endswith(answer):
            return other  # another text, for which the row is dropped
        text = other.text[:begin] + answer + other.text[end:]
        return RenderedChat(text, [(start, stop - (end - begin - len(answer)))], other.turns)

    def _example(
        self, example: RenderedChat, other_example: RenderedChat, tally: RowCounts, *, ended: bool
    ) -> TokenizedPair:
        """Return the pair of a chat as both templates render it; not `ended`, its last turn was cut off."""
        text = encodable(example.text)
        other_text = encodable(other_example.text)
        parts = self.sides[0].parts(example)
        other_parts = self.sides[1].parts(other_example)
        if len(parts) != len(other_parts):
            raise RowFault("the two chat templates mark different turns", f"{len(parts)} and {len(other_parts)}")
        ids_s, ends_s = self.sides[0].read(text)
        ids_t, ends_t = self.sides[1].read(other_text)
        runs = []
        begins = []
        turns = zip(example.spans, other_example.spans, strict=True)
        for own, other, ((start, _), (other_start, _)) in zip(parts, other_parts, turns, strict=True):
            bytes_before = len(text[:start].encode()), len(other_text[:other_start].encode())
            begins.append(_answer_start(ends_s, ends_t, *bytes_before))
            answer = text[own.start : own.stop]
            if answer != other_text[other.start : other.stop]:
                raise RowFault("the two chat templates render the assistant's text differently", repr(answer[:80]))
            starts = len(text[: own.start].encode()), len(other_text[: other.start].encode())
            run = boundaries_of(ends_s, ends_t, *starts, len(answer.encode()))
            whole = ended or own is not parts[-1]
            # The tokens that close the turn are a span of their own, whatever their texts: where the answer is aligned
            # to its last byte, and in both readings the closing token comes next.
            to_its_end = whole and len(run) and ends_s[run[-1, 0] - 1] == starts[0] + len(answer.encode())
            if to_its_end and all(
                side.closes(part, ids, at)
                for side, part, ids, at in zip(self.sides, (own, other), (ids_s, ids_t), run[-1].tolist(), strict=True)
            ):
                run = np.concatenate([run, run[-1:] + 1])
            runs.append(run)
        return self._partly([ids_s, ids_t], runs, text, tally, begins, example.turns)

    def _prompt(self, sample: ConversationSample, tally: RowCounts) -> TokenizedPair:
        """Return the pair of a prompt and, in place of the answer, the token that ends a text."""
        made = []
        for side in self.sides:
            if sample.messages is not None:
                assert side.template is not None
                text = side.template.prompt(sample.messages, sample.tools, sample.template_kwargs)
                before = list[int]()
            else:
                text = sample.prompt or ""
                before = side.beginning
            ids, _ = side.read(encodable(text))
            made.append(_joined([] if ids[:1].tolist() == before else before, ids))
        starts = np.array([[len(ids) for ids in made]])
        both = [_joined(ids, ends) for ids, ends in zip(made, self.ends, strict=True)]
        if not self.ends[0]:
            raise ValueError("data.format: prompts need two tokenizers with an end-of-text token, got one without")
        run = np.concatenate([starts, starts + 1])
        text = sample.prompt or str(sample.messages)
        messages = [] if sample.messages is None else [len(sample.messages)]
        return self._partly(both, [run], text, tally, [tuple(starts[0].tolist())], messages)

    def _partly(
        self,
        ids: list[np.ndarray],
        runs: list[np.ndarray],
        text: str,
        tally: RowCounts,
        starts: Sequence[tuple[int, int]],
        messages: Sequence[int] = (),
    ) -> TokenizedPair:
        pair = self._cut(ids, runs, text_hash(text), starts, messages)
        if pair is None:
            raise RowFault("nothing to compare", "no aligned span of the answer lies within data.max_length")
        tally.truncated += any(len(own) > self.max_length for own in ids)
        return pair


def tokens_before(ends: np.ndarray, start: int) -> int:
    """Return how many tokens end at byte `start` of a text or before it; `ends` int64 [n], in bytes, ascending."""
    return int(np.searchsorted(ends, start, side="right"))


def _answer_start(ends_s: np.ndarray, ends_t: np.ndarray, start_s: int, start_t: int) -> tuple[int, int]:
    """Return the index of an answer's first token in both readings, from where the tokens end and the answer starts.

    A token may reach over the start. The student's then belongs to its prompt, as in data of one tokenizer; the
    teacher's to the answer, which it reads anew.
    """
    first = tokens_before(ends_s, start_s)
    reaches_over = first < len(ends_s) and start_s > (ends_s[first - 1] if first else 0)
    return first + int(reaches_over), tokens_before(ends_t, start_t)


def _joined(*parts: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def boundaries_of(ends_s: np.ndarray, ends_t: np.ndarray, start_s: int, start_t: int, length: int) -> np.ndarray:
    """Return token counts up to each common boundary of a part of two texts, [k, 2], from `start_s`, `start_t` on."""
    places = ((ends_s, start_s), (ends_t, start_t))
    own, others = (ends[(ends >= start) & (ends <= start + length)] - start for ends, start in places)
    common = np.intersect1d(own, others)
    if start_s == start_t == 0:
        common = np.union1d(common, [0])
    return np.stack([np.searchsorted(ends, common + start, side="right") for ends, start in places], 1).astype(np.int64)
