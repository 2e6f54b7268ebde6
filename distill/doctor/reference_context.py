"""Reference of a teacher with a privileged context: every response after it, document by document, unpacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn

from distill.doctor.reference import INPUTS, MixtureReference, Reads, Reference, Verdict
from distill.doctor.reference_loss import Mixture
from distill.doctor.reference_top_k import TopKReference
from distill.doctor.remote_outputs import logits_of, reopen_spec, reopen_teacher
from distill.doctor.rows import Row, TwoPromptRows, bounds, first_trained
from distill.objectives.targets import Batch
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.interface import Teacher
from distill.teachers.rows.context.data import ContextCollator
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.teachers.rows.reading import ReadingTeacher

FEW = 4  # tokens; a shorter context may occur in a prompt by chance


class ContextReference(Reference):
    """Reference of hidden states over rows with another prompt."""

    rows = TwoPromptRows

    def teacher_logits(self, rows: Sequence[Row], batch: Batch, keep: torch.Tensor) -> Mixture:
        """Return the teacher's logits [N, V] for trained tokens, from a forward over each document alone."""
        documents = [document for row in rows for document in self.rows.documents(row)]
        inner, read = self.teacher.inner, map(ContextCollator.teacher_row, documents)
        return [(1.0, torch.cat([logits_of(inner, row, keep.device) for row in read]))]

    def reads(self, student: nn.Module, batch: Batch) -> Reads:
        """Return the teacher with its own inputs, and the student with the batch's."""
        names = ("input_ids", "position_ids")
        models = self.teacher.models.values()
        calls: Reads = [(model, {n: batch[f"teacher_{n}"] for n in names}) for model in models]
        return [*calls, (student, {n: batch[n] for n in names})]

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Compare the tokens of responses in both inputs, and find context that leaks into the student's prompt."""
        same, detail = super().same_tokens(batch, columns, student_rows)
        more = 0
        for row in range(len(batch["labels"])):
            own, positions, other, other_positions = (
                batch[f"{who}{name}"][row].tolist()
                for who in ("", "teacher_")
                for name in ("input_ids", "position_ids")
            )
            labels = batch["labels"][row].tolist()
            for (a, b), (c, d) in zip(bounds(positions), bounds(other_positions), strict=False):
                document = {"labels": labels[a:b]}
                if (first := first_trained(document)) is None:
                    continue
                answer, prompt = own[a + first : b], own[a : a + first]
                if other[d - len(answer) : d] != answer:
                    return False, "a response has other tokens in the teacher's input"
                private = _only_in(other[c : d - len(answer)], prompt)
                if not private:
                    return False, "the teacher has no context that the student lacks"
                leaked = SequenceMatcher(None, prompt, private, autojunk=False).find_longest_match().size
                if leaked >= max(FEW, len(private) / 2):
                    return False, f"{leaked} tokens of the teacher's context are in the student's prompt"
                more += len(private)
        return same, f"{detail}; responses have the same tokens in both inputs; {more} tokens before them are context"

    def description(self) -> Mapping[str, Any]:
        """Return plain values that another process needs to rebuild the teacher."""
        return reopen_spec(self.teacher.inner)

    @staticmethod
    def rebuilt(models: list[nn.Module], weights: Sequence[float], description: Mapping[str, Any]) -> Teacher:
        """Return the teacher from its model."""
        return ContextTeacher(models[0] if models else reopen_teacher(description))


class ContextMixtureReference(ContextReference, MixtureReference):
    """Reference of a mixture in which some teachers read another prompt."""

    def teacher_logits(self, rows: Sequence[Row], batch: Batch, keep: torch.Tensor) -> Mixture:
        """Return each teacher's weight and logits [N, V] for trained tokens, document by document."""
        documents = [document for row in rows for document in self.rows.documents(row)]
        return [
            (share, torch.cat([member_logits(member, document, keep.device) for document in documents]))
            for share, (_, member, _) in zip(self.weights, self.teacher.batches(batch), strict=True)
        ]

    def reads(self, student: nn.Module, batch: Batch) -> Reads:
        """Return each teacher with its own inputs, and the student with the batch's."""
        calls: Reads = []
        for _, member, _ in self.teacher.batches(batch):
            own = {name: batch[f"{column_prefix(member)}{name}"] for name in INPUTS}
            calls += [(model, own) for model in member.models.values()]
        return [*calls, (student, {n: batch[n] for n in INPUTS})]

    def description(self) -> Mapping[str, Any]:
        """Return what each teacher reads, and how to open it."""
        return {"members": [(reopen_spec(inner_of(member)), column_prefix(member)) for member in self.teacher.members]}

    @staticmethod
    def rebuilt(models: list[nn.Module], weights: Sequence[float], description: Mapping[str, Any]) -> Teacher:
        """Return the mixture from its models, weights and description."""
        left, members = iter(models), list[Teacher]()
        for number, (place, prefix) in enumerate(description["members"]):
            own = reopen_teacher(place) if place else LoadedTeacher(next(left), field=f"teachers.{number}")
            members.append(ContextTeacher(own) if prefix else own)
        return MixtureTeacher(members, weights)


class ContextTopKReference(TopKReference, ContextReference):
    """Reference of K stored tokens over rows with another prompt."""

    def stored(self, rows: Sequence[Row], batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the stored tokens at the positions of the teacher's input."""
        own = self.teacher.inner_batch(batch)
        return super().stored_by(self.teacher.inner, [ContextCollator.teacher_row(row) for row in rows], own)


def column_prefix(member: Teacher) -> str:
    """Return the prefix of the columns that one teacher reads of a batch."""
    return member.prefix if isinstance(member, ReadingTeacher) else ""


def inner_of(member: Any) -> Any:
    """Return the teacher that computes the outputs of one that reads other tokens; any other one as it is."""
    return member.inner if isinstance(member, ReadingTeacher) else member


def member_logits(member: Any, document: Row, device: torch.device) -> torch.Tensor:
    """Return one teacher's logits [N, V] for the trained tokens of a document."""
    row = ContextCollator.teacher_row(document) if isinstance(member, ContextTeacher) else document
    return logits_of(inner_of(member), row, device)


def _only_in(longer: list[int], shorter: list[int]) -> list[int]:
    """Return a prompt without the beginning and the end that it shares with another."""
    start = next((at for at, pair in enumerate(zip(longer, shorter, strict=False)) if pair[0] != pair[1]), len(shorter))
    most = len(shorter) - start
    backwards = zip(longer[::-1], shorter[::-1], strict=False)
    end = next((at for at, pair in enumerate(backwards) if pair[0] != pair[1]), len(shorter))
    return longer[start : len(longer) - min(end, most)]
