"""A student with its own tokenizer, examined: both readings, the spans that they share, and the loss over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from distill_kernels import LossTerm

from distill.data.collator import Collator
from distill.doctor.reference_spans import dense_spans
from distill.doctor.subject import Row, Subject, Verdict, bounds, cut_at, worst_of
from distill.models.head import find_head, read_head
from distill.teachers.cross.alignment import Shared
from distill.teachers.cross.data import CrossCollator
from distill.teachers.cross.encode import Reader, end_pairs
from distill.teachers.cross.loss import CrossTokenizerLoss, Spans
from distill.teachers.cross.objective import CrossObjective
from distill.teachers.objective import IGNORE, last_hidden, loss_terms

OWN = ("input_ids", "labels", "position_ids")
OTHERS = ("teacher_input_ids", "teacher_position_ids")


@dataclass
class AcrossTokenizers(Subject):
    """A `Subject` whose rows hold two readings and their `spans`, as `distill.teachers.cross.data` makes them.

    Attributes:
        shared: ids of the same tokens.
        readers: how student and teacher read; None in a process that only trains.
    """

    shared: Shared | None = None
    readers: tuple[Reader, Reader] | None = None

    @property
    def objective_type(self) -> Any:
        """Over aligned spans."""
        assert self.shared is not None
        return functools.partial(CrossObjective, shared=self.shared)

    def collator(self, pad_token_id: int = 0, **settings: Any) -> Callable[[Any], dict[str, Any]]:
        """Batches with both readings, padded alike."""
        made = CrossCollator(Collator(pad_token_id, **settings), pad_token_id)
        made.teacher = replace(
            made.teacher, pad_to_multiple_of=settings.get("pad_to_multiple_of"), omit_plain_positions=False
        )
        return made

    # ------------------------------------------------------------------ rows

    @staticmethod
    def documents(row: Row) -> list[dict[str, list[int]]]:
        """Cut where the positions of both readings start again, with the spans that lie in each."""
        spans = np.asarray(row["spans"], dtype=np.int64).reshape(-1, 4)
        found = []
        for (a, b), (c, d) in zip(bounds(row["position_ids"]), bounds(row["teacher_position_ids"]), strict=True):
            inside = spans[(spans[:, 0] >= a) & (spans[:, 1] <= b)] - np.array([a, a, c, c])
            document = {name: list(row[name][a:b]) for name in OWN} | {name: list(row[name][c:d]) for name in OTHERS}
            found.append(document | {"spans": inside.ravel().tolist()})
        return found

    @staticmethod
    def joined(parts: Sequence[Row]) -> dict[str, list[int]]:
        """Documents behind each other; their spans move along."""
        made: dict[str, list[int]] = {name: [] for name in (*OWN, *OTHERS, "spans")}
        for part in parts:
            at, teacher_at = len(made["input_ids"]), len(made["teacher_input_ids"])
            moved = np.asarray(part["spans"], dtype=np.int64).reshape(-1, 4) + np.array(
                [at, at, teacher_at, teacher_at]
            )
            made["spans"] += moved.ravel().tolist()
            for name in (*OWN, *OTHERS):
                made[name] += list(part[name])
        return made

    @staticmethod
    def shortened(document: Row, tokens: int) -> dict[str, list[int]] | None:
        """Cut behind the last span that ends within what is kept."""
        spans = np.asarray(document["spans"], dtype=np.int64).reshape(-1, 4)
        if len(spans) == 0:
            return None
        kept = spans[spans[:, 1] <= max(cut_at(int(spans[0, 0]), tokens), int(spans[0, 1]))]
        own = {name: list(document[name][: kept[-1, 1]]) for name in OWN}
        others = {name: list(document[name][: kept[-1, 3]]) for name in OTHERS}
        return own | others | {"spans": kept.ravel().tolist()}

    @staticmethod
    def with_masked_end(row: Row, token: int) -> dict[str, list[int]] | None:
        """One more token in both readings, in no span."""
        return {
            "input_ids": [*row["input_ids"], token],
            "labels": [*row["labels"], IGNORE],
            "position_ids": [*row["position_ids"], row["position_ids"][-1] + 1],
            "teacher_input_ids": [*row["teacher_input_ids"], token],
            "teacher_position_ids": [*row["teacher_position_ids"], row["teacher_position_ids"][-1] + 1],
            "spans": list(row["spans"]),
        }

    # -------------------------------------------------------------- measures

    def reference(self) -> torch.Tensor:
        """Row by row without padding, from both models' full logits and the spans of the rows themselves."""
        terms, losses = loss_terms(self.loss), []
        for row in self.rows:
            (_, z_t), (_, z_s) = (
                (model, model(**{name: ids[None] for name, ids in read.items()}, use_cache=False).logits[0].double())
                for model, read in self.reads({name: torch.tensor(row[name], device=self.device) for name in row})
            )
            losses.append(dense_spans(
                z_s, z_t.detach(), row["input_ids"], row["teacher_input_ids"], _spans(row["spans"]), self.shared,
                terms, self.loss.temperature, scaled=self.loss.scale_by_temperature_squared,
            ))  # fmt: skip
        return torch.cat(losses).mean()

    def one_by_one(self, loss_of: Callable[..., Any], objective: Any, given: Sequence[Any]) -> torch.Tensor:
        """Each span's figures, end to end: its divergence, and the log-probabilities of its text."""
        hidden, head, comparison, *rest = given
        comparison.statistics = True
        _, figures = loss_of(hidden, head, comparison, *rest)
        comparison.statistics = False
        return torch.stack([figures.divergence, figures.student_label_logprob, figures.teacher_label_logprob], 1)

    def least(self) -> float:
        """The least divergence of any span."""
        return torch.stack([figures[:, 0].min() for figures in self.token_losses(terms=self.divergences)]).min().item()

    def single(self, objective: Any, term: LossTerm) -> Any:
        """The term over spans."""
        return objective._across([term])

    def from_itself(self) -> tuple[str, float]:
        """The teacher against itself over its own reading's spans, with all and with a part of its tokens shared."""
        batch, objective = self.batch(), self.objective()
        reading = {name.removeprefix("teacher_"): batch[name] for name in OTHERS}
        hidden, head = last_hidden(self.teacher, reading), read_head(find_head(self.teacher))
        objective.detach()
        spans, shape = Spans(batch["spans"][:, 2:], batch["spans"][:, 2:]), objective.reading.teacher
        found = []
        for share in (1.0, 0.5):
            ids = torch.arange(int(share * len(head.weight)), device=self.device)
            for term in self.divergences:
                same = CrossTokenizerLoss(
                    [term], (ids, ids), student_logit_scale=shape.scale, student_softcap=shape.softcap,
                    teacher_logit_scale=shape.scale, teacher_softcap=shape.softcap,
                )  # fmt: skip
                both, tokens = (hidden, head.weight), reading["input_ids"]
                found.append(same(*both, *both, spans, tokens, tokens, student_bias=head.bias, teacher_bias=head.bias))
        return "the teacher over its own spans", worst_of(found)

    # -------------------------------------------------------- the same tokens

    def reads(self, batch: Mapping[str, Any]) -> list[tuple[Any, dict[str, torch.Tensor]]]:
        """Each model its own reading."""
        others = {name.removeprefix("teacher_"): batch[name] for name in OTHERS}
        return [(self.teacher, others), (self.student, {name: batch[name] for name in others})]

    def same_tokens(self, columns: int, batch: Mapping[str, Any]) -> Verdict:
        """Whether each span is the same bytes in both readings, labels stand where spans begin, and shared tokens are
        the same bytes."""
        assert self.readers is not None and self.shared is not None
        student, teacher = self.readers
        ends = set(end_pairs(student, teacher))
        for one, other in zip(*(ids.tolist() for ids in self.shared), strict=True):
            if student.spelled[one] != teacher.spelled[other] and (one, other) not in ends:
                return (
                    False,
                    f"shared ids {one} and {other} are {student.spelled[one]!r} and {teacher.spelled[other]!r}",
                )
        spans = batch["spans"].tolist()
        begins = [a - 1 for a, *_ in spans]
        if batch["valid_rows"].tolist() != begins:
            return False, "what is learned are not the first tokens of the spans"
        own, others = (batch[name].flatten().tolist() for name in ("input_ids", "teacher_input_ids"))
        count = 0
        for a, b, c, d in spans:
            tokens = own[a:b], others[c:d]
            texts = [
                b"".join(reader.spelled[token] or b"" for token in ids)
                for reader, ids in zip(self.readers, tokens, strict=True)
            ]
            firsts = (tokens[0][0], tokens[1][0])
            if not (same_bytes(texts[0], texts[1], *map(puts_a_space, self.readers)) or firsts in ends):
                return False, f"a span is {texts[0]!r} to the student and {texts[1]!r} to the teacher"
            count += len(texts[0])
        if any(a < stop or c < other_stop for (_, stop, _, other_stop), (a, _, c, _) in pairwise(spans)):
            return False, "spans overlap, or are not in order"
        return True, f"own ids and positions each; {len(spans)} spans cover the same {count} bytes in both readings"

    # -------------------------------------------------------------- elsewhere

    def told(self) -> dict[str, Any]:
        """The shared ids."""
        assert self.shared is not None
        return {"shared": [ids.tolist() for ids in self.shared]}

    @classmethod
    def retold(cls, told: Mapping[str, Any], teachers: list[Any]) -> tuple[Any, dict[str, Any]]:
        """The shared ids again."""
        return teachers[0], {"shared": Shared(*map(np.array, told["shared"]))}


def same_bytes(student: bytes, teacher: bytes, student_puts: bool, teacher_puts: bool) -> bool:
    """Whether two readings of a span say the same; a space that a tokenizer puts before a text is no part of it."""
    if student == teacher:
        return True
    return (student_puts and student == b" " + teacher) or (teacher_puts and teacher == b" " + student)


@functools.lru_cache(maxsize=8)
def puts_a_space(reader: Reader) -> bool:
    """Whether a tokenizer begins a text with a space of its own."""
    ids = reader.tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and (reader.spelled[ids[0]] or b"").startswith(b" ")


def _spans(flat: Sequence[int]) -> Spans:
    whole = torch.tensor(flat).view(-1, 4)
    return Spans(whole[:, :2], whole[:, 2:])
