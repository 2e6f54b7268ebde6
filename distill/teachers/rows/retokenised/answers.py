"""Rollouts of a student whose teacher has another tokenizer: the teacher's tokens of a drawn answer, and their spans.

An answer is drawn as tokens of the student. The teacher reads the same bytes after its own prompt, by its own
tokenizer; what both have read up to a common byte is compared, as in data (encode.py):

    student   <prompt> |The| teach|er| ex|plains|<|im_end|>|
    teacher   <prompt> |The| teacher| explain|s|</s>|
    spans               The | teacher | explains | end of turn
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from distill.generation.documents import RetokenizedResponse
from distill.teachers.rows.retokenised.encode import TokenisedReader, boundaries_of, end_pairs, tokens_before


class TeacherReader:
    """Reader of drawn answers by the teacher's tokenizer.

    Args:
        student: reader of the student's tokens.
        teacher: likewise of the teacher's.
    """

    def __init__(self, student: TokenisedReader, teacher: TokenisedReader) -> None:
        self.student = student
        self.teacher = teacher
        self.ends = dict(end_pairs(student, teacher))
        self.spaces = tuple(reader.space_before_answers().encode() for reader in (student, teacher))
        self._special = {number for number, token in teacher.tokenizer.added_tokens_decoder.items() if token.special}

    def retokenize(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        teacher_prompt: Sequence[int],
        *,
        reference: Sequence[int] = (),
        teacher_reference: Sequence[int] = (),
        max_teacher_tokens: int,
    ) -> RetokenizedResponse:
        """Return the teacher's reading of an answer, as `ResponseRetokenizer.retokenize` describes it.

        Templates may differ in what they write between the prompt and an answer, such as a space or a line break: the
        data's answer in both readings tells, or the templates where the data are prompts alone, and the same is done to
        the drawn one. Tokens that are not compared: those after bytes that are no text (a character that was cut off),
        after a character that the teacher's tokenizer changes, and those that the teacher has no room for.
        """
        text = list(response)
        end = self.ends.get(text[-1]) if text else None
        if end is not None:
            del text[-1]
        ends = self._ends(text)
        raw = self._bytes(self.student, text[: len(ends)])
        before, others_before = self._between(reference, teacher_reference)
        skipped = len(before) if raw.startswith(before) else 0
        if before.strip() and not skipped:  # words of the data's answer are in the teacher's prompt
            return RetokenizedResponse(list(teacher_prompt), [])
        said = _text_of(raw[skipped:])
        ids, others = self._after(list(teacher_prompt), others_before, said)
        shift = len(others_before)
        run = boundaries_of(np.array([0, *ends]), np.array([0, *others]), skipped, shift, len(said.encode())) - 1
        complete = len(run) > 0 and run[-1].tolist() == [len(text), len(ids)]
        if end is not None and complete:
            ids = [*ids, end]
            run = np.concatenate([run, run[-1:] + 1])
        own = len(prompt)
        other = len(teacher_prompt)
        spans = [
            (own + a, own + b, other + c, other + d)
            for (a, c), (b, d) in zip(run[:-1].tolist(), run[1:].tolist(), strict=True)
            if b > a and d > c and own + a > 0 and other + c > 0 and other + d <= max_teacher_tokens
        ]
        teacher = [*teacher_prompt, *ids]
        return RetokenizedResponse(teacher[: spans[-1][3]] if spans else list(teacher_prompt), spans)

    def _ends(self, ids: Sequence[int]) -> list[int]:
        """Return where each token ends, in bytes, up to the first one that stands for none."""
        ends = list[int]()
        place = 0
        for number in ids:
            token = self.student.spelled[number] if number < len(self.student.spelled) else None
            if token is None:
                break
            place += len(token)
            ends.append(place)
        return ends

    @staticmethod
    def _bytes(reader: TokenisedReader, ids: Sequence[int]) -> bytes:
        return b"".join(reader.spelled[number] or b"" for number in ids)

    def _between(self, reference: Sequence[int], teacher_reference: Sequence[int]) -> tuple[bytes, bytes]:
        """Return what each reading has before the text of the data's answer, in bytes."""
        if reference and teacher_reference and self.ends.get(reference[-1]) == teacher_reference[-1]:
            reference = reference[:-1]
            teacher_reference = teacher_reference[:-1]
        own = self._bytes(self.student, reference)
        other = self._bytes(self.teacher, teacher_reference)
        if not own and not other:  # a prompt alone
            own, other = self.spaces
        same = 0
        while same < min(len(own), len(other)) and own[-1 - same] == other[-1 - same]:
            same += 1
        return own[: len(own) - same], other[: len(other) - same]

    def _after(self, prompt: list[int], before: bytes, said: str) -> tuple[list[int], list[int]]:
        """Return the teacher's tokens of `before` and `said` after its prompt.

        The prompt is read again with the answer from its last special token on, since tokenizers differ in what they do
        at the beginning of a text; where that does not give the prompt's own tokens, the answer is read alone.

        Returns:
            The tokens of the answer, and where each of them ends, in bytes from its start.
        """
        text = before.decode() + said
        begin = next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] in self._special), 0)
        special = self._bytes(self.teacher, prompt[begin : begin + 1]) if prompt[begin] in self._special else b""
        if begin == 0 and prompt[:1] == self.teacher.beginning:
            # what `read` leaves out
            begin = 1
            special = b""
        context = self._bytes(self.teacher, prompt[begin:])[len(special) :]
        heads = []
        with contextlib.suppress(UnicodeDecodeError):  # a prompt that was cut within a character
            heads = [special.decode() + rest for rest in (context.decode(), context.decode().removeprefix(" "))]
        for head in heads:
            ids, ends = self.teacher.read(head + text, partly=True)
            count = tokens_before(ends, len(head.encode()))
            if ids[:count].tolist() == prompt[begin:]:
                return ids[count:].tolist(), (ends[count:] - len(head.encode())).tolist()
        ids, ends = self.teacher.read(text, partly=True)
        return ids.tolist(), ends.tolist()


def _text_of(raw: bytes) -> str:
    """Return the longest beginning of some bytes that is text."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()
