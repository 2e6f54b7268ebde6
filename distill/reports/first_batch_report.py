"""Checks before training: the teacher's agreement with the data, room for rollouts, the error of fp8 students."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch

from distill.core.labels import IGNORE_INDEX, mask_document_starts, shift_labels

if TYPE_CHECKING:
    from distill.data.collator import Collator
    from distill.objectives.targets import Batch
    from distill.recipe import Data, Recipe
    from distill.teachers.objective import DistillationObjective
    from distill.training.trainer import DistillationTrainer

# tokens checked per route, rows of the training data
TOKENS = 256
ROWS = 256
FEW = 0.1  # lower agreement of the teacher with the data's responses hints at a wrong chat template


def first_batch_report(
    trainer: DistillationTrainer, batch: Batch, rows: Sequence[Mapping[str, Sequence[int]]], recipe: Recipe
) -> list[str]:
    """Return report lines on the first held-out batch and on the training rows."""
    fits = room_for_rollouts_line(rows, trainer.data_collator, recipe.data)  # type: ignore[arg-type]
    cost = []
    if recipe.student.compute == "fp8":
        from distill.teachers.fp8_student_cost import compute_and_measure

        checkpointed = recipe.train.gradient_checkpointing
        sharded = trainer.is_fsdp_enabled
        autocast = trainer.accelerator.autocast
        cost = [compute_and_measure(trainer.objective, batch, autocast, checkpointed=checkpointed, sharded=sharded)]
    return cost + teacher_agreement_line(trainer.objective, batch) + fits


@torch.no_grad()
def teacher_agreement_line(objective: DistillationObjective, batch: Batch) -> list[str]:
    """Return a line on how often the teacher's top-1 token is the data's; none for teachers without live outputs.

    Args:
        batch: Batch collated by it, on the device; equal on all processes.
    """
    teacher = objective.teacher
    answers = teacher.models and teacher.rows.supports_new_rows and not teacher.prefetch_depth
    if not (answers and objective.needs_targets):
        return []
    labels = shift_labels(mask_document_starts(batch["labels"], batch.get("position_ids"))).flatten()
    rows = (labels != IGNORE_INDEX).nonzero()[:, 0]
    shares = {}
    for route, (own, tokens) in teacher.format.likeliest(objective.targets(batch), rows, TOKENS).items():
        if len(own):
            shares[route] = (tokens == labels[own]).float().mean().item(), len(own)
    if not shares:
        return []
    each = (f"{share:.1%} of {count:,}{route and f' by {route}'}" for route, (share, count) in shares.items())
    figures = ", ".join(each)
    low = min(share for share, _ in shares.values()) < FEW
    advice = "; this is low: check that the chat template and language of the data suit the teacher" if low else ""
    return [f"{'answers':<12}the teacher's top-1 token is the data's: {figures} held-out tokens{advice}"]


def room_for_rollouts_line(rows: Sequence[Mapping[str, Sequence[int]]], collate: Collator, data: Data) -> list[str]:
    """Return a line on how many prompts leave room for the longest rollout; none without on-policy data."""
    section = data.active_on_policy
    if section is None:
        return []
    from distill.generation.documents import documents_of

    documents = documents_of(collate(list(islice(rows, ROWS))))
    fitting = sum(document.prompt_length + section.max_new_tokens <= data.max_length for document in documents)
    line = (
        f"{fitting / max(len(documents), 1):.1%} of {len(documents):,} leave room for "
        f"data.on_policy.max_new_tokens {section.max_new_tokens} within data.max_length {data.max_length}"
    )
    return [f"{'prompts':<12}{line}"]
