"""A teacher backend of one's own: hidden states from a function of the token ids, and a head.

A package registers it in its pyproject.toml, and a recipe names it:

    [project.entry-points."distill.backends"]
    bigram = "my_package.backend:BigramSource"

    teacher: {type: plugin, backend: bigram, model: TOKENIZER_AND_CONFIG}

Contexts, other tokenizers, stores, routes and mixtures work with it: they are layers around a backend.
"""

from __future__ import annotations

import torch

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.targets import Batch
from distill.recipe import ModelSection, Recipe
from distill.recipe import Teacher as TeacherSection
from distill.teachers.capabilities import HasReferenceLogits, HoldsHead
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.interface import LoadContext, Teacher, TeacherSource
from distill.teachers.source_capabilities import NamesFiles, shapes_of
from distill.teachers.vocabulary import Vocabulary


class BigramTeacher(Teacher, HoldsHead, HasReferenceLogits):
    """A teacher whose hidden state of a token [H] is a row of a table; its logits follow from a head [V, H]."""

    def __init__(self, vocabulary: int, hidden: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(vocabulary, hidden, generator=generator)
        weights = HeadWeights(torch.randn(vocabulary, hidden, generator=generator), None, None)
        self.stored_head = StoredHead(weights, "the bigram head")  # by which it is moved and diagnosed, like a model
        self.format, self.models = HiddenFormat(self.stored_head, LogitTransform()), {}

    def targets(self, batch: Batch) -> torch.Tensor:
        return self.table[batch["input_ids"]]

    def reference_logits(self, input_ids: torch.Tensor) -> torch.Tensor:  # `distill doctor` compares targets with these
        return self.table[input_ids].double() @ self.stored_head.weights.weight.double().T

    def fingerprint(self) -> dict[str, object]:
        return {"bigram": len(self.table), "seed": 0}


class BigramSource(TeacherSource, NamesFiles):
    """The source of a `BigramTeacher`: the section's model names its tokenizer and its vocabulary."""

    shardable = False

    def __init__(self, recipe: Recipe, section: TeacherSection, field: str) -> None:
        self.recipe, self.section, self.sections = recipe, section, {}

    def config_section(self) -> ModelSection:
        return self.section.loaded()

    tokenizer_section = config_section

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.recipe, self.config_section())

    def footprint(self, context: FootprintContext) -> Footprint:
        return Footprint(token_bytes=4.0 * 16)

    def title(self) -> str:
        return "a bigram table"

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> BigramTeacher:
        return BigramTeacher(shapes_of(self)[0].vocabulary)
