"""A teacher backend of one's own: hidden states from a function of the token ids, and a head.

A package registers it in its pyproject.toml, and a recipe names it:

    [project.entry-points."distill.backends"]
    bigram = "my_package.backend:BigramPlan"

    teacher: {type: plugin, backend: bigram, model: TOKENIZER_AND_CONFIG}

Contexts, other tokenizers, stores, routes and mixtures work with it: they are teachers around a backend.
"""

from __future__ import annotations

import torch

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.targets import Batch
from distill.teachers.base import Teacher, TeacherPlan
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.load_context import LoadContext
from distill.teachers.vocabulary import Vocabulary


class BigramTeacher(Teacher):
    """A teacher whose hidden state of a token [H] is a row of a table; its logits follow from a head [V, H]."""

    def __init__(self, vocabulary: int, hidden: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(vocabulary, hidden, generator=generator)
        weights = HeadWeights(torch.randn(vocabulary, hidden, generator=generator), None, None)
        self.stored_head = StoredHead(weights, "the bigram head")  # by which it is moved and diagnosed, like a model
        self.format = HiddenFormat(self.stored_head, LogitTransform())

    def targets(self, batch: Batch) -> torch.Tensor:
        return self.table[batch["input_ids"]]

    def reference_logits(self, input_ids: torch.Tensor) -> torch.Tensor:  # `distill doctor` compares targets with these
        assert self.stored_head is not None
        return self.table[input_ids].double() @ self.stored_head.weights.weight.double().T

    def fingerprint(self) -> dict[str, object]:
        return {"bigram": len(self.table), "seed": 0}


class BigramPlan(TeacherPlan):
    """The plan of a `BigramTeacher`: the section's model names its tokenizer and its vocabulary."""

    shardable = False

    def footprint(self, context: FootprintContext) -> Footprint:
        return Footprint(token_bytes=4.0 * 16)

    def title(self) -> str:
        return "a bigram table"

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> BigramTeacher:
        return BigramTeacher(self.shapes()[0].vocabulary)
