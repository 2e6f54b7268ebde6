"""Terms of `loss.terms` that compare layers of student and teacher, beside the divergence of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distill.core.errors import Section
from distill.recipe.fields import NotNegative

Pair = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
Layers = Literal["auto"] | Annotated[list[Pair], Field(min_length=1)]
Relation = Literal["query", "key", "value"]
RELATIONS: tuple[Relation, ...] = ("query", "key", "value")
LAYERED = ("hidden_state", "attention_relation", "router")  # their types
LAYERED_NAMES = "hidden_state, attention_relation and router"


class LayerTerm(Section):
    """Part that both terms share: which layers of the student are compared with which of the teacher.

    Attributes:
        weight: weight of this term in the sum.
        layers: pairs [student, teacher] of layer numbers from 0, or `auto`.
    """

    weight: NotNegative = 1.0
    layers: Layers = "auto"

    @model_validator(mode="after")
    def _compares_each_pair_once(self) -> Self:
        if self.layers != "auto" and len({tuple(pair) for pair in self.layers}) < len(self.layers):
            raise ValueError(f"layers: expected each pair once, got {self.layers}")
        return self

    def with_layers(self, layers: Sequence[Sequence[int]] | Literal["auto"]) -> Self:
        pairs: Layers = "auto" if layers == "auto" else [list(map(int, pair)) for pair in layers]
        return self.model_copy(update={"layers": pairs})


class HiddenStateTerm(LayerTerm):
    """Distance between hidden states of both models, the outputs of decoder layers (TinyBERT, arXiv 1909.10351).

    A token's loss is the mean over the pairs of layers. Outputs are those of the layers themselves, before the
    decoder's final norm.

    Attributes:
        type: `hidden_state`.
        weight: weight of this term in the sum.
        layers: with `hidden_state` and `attention_relation`, pairs `[student, teacher]` of layer numbers from 0. `auto`
            pairs every layer of the student: of one cut from its teacher (`student.from_teacher`) with the layer it
            was, else layer i of n with layer (i + 1) N // n - 1 of the teacher's N; `attention_relation` takes the last
            of these pairs.
        metric: with `hidden_state`, `mse`, the squared distance divided by the width; `cosine`, 1 minus the cosine of
            their angle, which does not depend on their lengths.
        projection: with `hidden_state`, `learned` multiplies the student's states by a matrix `[teacher's width,
            student's width]` that is trained with the student, kept in checkpoints and left out of the saved student;
            `none` needs equal widths.
    """

    type: Literal["hidden_state"]
    metric: Literal["mse", "cosine"] = "mse"
    projection: Literal["learned", "none"] = "none"


class AttentionRelationTerm(LayerTerm):
    """KL divergence between attention relations of both models (MiniLMv2, arXiv 2012.15828).

    With A the queries, keys or values of all heads of a layer, split anew into `heads` relation heads of width d, the
    relations of token i are softmax over j of A_i . A_j / sqrt(d), over the tokens of its document up to i. A token's
    loss is KL(teacher's || student's), the mean over relation heads and pairs of layers and the sum over `relations`.

    Attributes:
        type: `attention_relation`.
        weight: weight of this term in the sum.
        layers: pairs `[student, teacher]` of layer numbers from 0; `auto` for the last pair of `hidden_state`'s.
        relations: with `attention_relation`, states that are compared, as inputs of attention (queries and keys after
            rotary embedding).
        heads: with `attention_relation`, number of relation heads, which divides the widths in both models; null for
            the greatest common divisor of both models' numbers of key-value heads.
    """

    type: Literal["attention_relation"]
    relations: Annotated[list[Relation], Field(min_length=1)] = Field(default_factory=lambda: list(RELATIONS))
    heads: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _names_each_relation_once(self) -> Self:
        if len(set(self.relations)) < len(self.relations):
            raise ValueError(f"relations: expected each once, got {self.relations}")
        return self


class RouterTerm(LayerTerm):
    """KL divergence between the routing of both models, mixtures of as many experts.

    A token's loss is KL(teacher's || student's) of softmax over the router's logits, also of routers whose scores are
    sigmoids, the mean over the pairs of layers with routers.

    Attributes:
        type: `router`.
        weight: weight of this term in the sum.
        layers: with `router`, pairs `[student, teacher]` of layer numbers from 0, both with a router; `auto` for those
            of `hidden_state`'s where both layers have one.
    """

    type: Literal["router"]


def pairs_of(layers: Layers, student: int, teacher: int, kept: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return the pairs of layers [student, teacher] that a term compares.

    Args:
        layers: Layers of the term.
        student: Number of the student's layers.
        teacher: Number of the teacher's layers.
        kept: Layers of the teacher that a student cut from it has; None for any other student.

    Raises:
        ValueError: A layer that a model does not have, or `auto` with a student of more layers than the teacher.
    """
    if layers == "auto":
        if kept is not None and len(kept) == student:
            return list(enumerate(kept))
        if student > teacher:
            raise ValueError(
                f"loss.terms: layers: auto expects a student of at most the teacher's {teacher} layers, got {student}; "
                "give pairs [student, teacher]"
            )
        # evenly spread over the teacher; the last layers of both are a pair
        return [(number, (number + 1) * teacher // student - 1) for number in range(student)]
    for pair in layers:
        for number, model, total in zip(pair, ("student", "teacher"), (student, teacher), strict=True):
            if number >= total:
                raise ValueError(
                    f"loss.terms: layers: expected layers of the {model} from 0 to {total - 1}, got {number}"
                )
    return [(pair[0], pair[1]) for pair in layers]
