"""The `student.from_teacher:` section of a recipe: the parts of the teacher that the student keeps."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from distill.core.errors import Section, expected_got
from distill.recipe.fields import Count

ColumnAxis = Literal["intermediate", "moe_intermediate", "shared_expert_intermediate"]
COLUMN_AXES: tuple[ColumnAxis, ...] = get_args(ColumnAxis)
WIDTHS = ("hidden", "heads", "kv_heads", *COLUMN_AXES, "experts")


class Importance(Section):
    """Choice of the parts of the teacher that a student keeps, by their activations on rows of the training data.

    The rows are the first of the first epoch. Minitron (Muralidharan et al., 2024, arXiv 2407.14679) has the metrics.

    Attributes:
        rows: number of training rows that hidden channels, heads, MLP columns and experts are scored on.
        layer_rows: number of these rows that layers are scored on: by the loss without each layer, measured again after
            each removal.
        metric: aggregate of activations over tokens. `l2` is the root mean square, `mean` the mean magnitude, `mean_l2`
            the mean magnitude over a row's tokens and the root mean square over rows.
        experts: score of routed experts. `router_weight` is the mean over all tokens of the weight that the router
            gives an expert, 0 for tokens that are routed to others; `reap` the mean over the tokens that are routed to
            it of that weight times the Euclidean norm of its output (Lasby et al., 2025, arXiv 2510.13999).
    """

    rows: Count = 64
    layer_rows: Count = 8
    metric: Literal["l2", "mean", "mean_l2"] = "l2"
    experts: Literal["router_weight", "reap"] = "router_weight"


class FromTeacher(Section):
    """A student made of parts of the teacher: of its layers, of each layer's width, or of both.

    With a width, or with `importance`, the parts are chosen by the training data: hidden channels, heads and columns of
    the MLPs with the largest activations and experts with the largest scores stay, and layers are removed one after
    another, each time the one without which the divergence from the teacher is smallest. With `layers` alone the first
    and the last layers stay.

    Attributes:
        layers: number of the teacher's layers to keep; null for all, or those of `keep`.
        keep: indices of the layers to keep, counted from 0, ascending.
        hidden: number of hidden channels (`hidden_size`) to keep; null, here and for the other widths, keeps all.
        heads: number of attention heads to keep in each layer. Without `kv_heads` whole groups of heads that share a
            key and value head are kept.
        kv_heads: number of key and value heads to keep in each layer; each keeps `heads / kv_heads` of its heads,
            without `heads` all of them.
        intermediate: number of MLP columns (`intermediate_size`) to keep in each layer; of families without
            `moe_intermediate_size` (Mixtral, gpt-oss) also in each expert.
        moe_intermediate: number of columns (`moe_intermediate_size`) to keep in each routed expert, and in shared
            experts whose width follows from it.
        shared_expert_intermediate: number of columns (`shared_expert_intermediate_size`) to keep in shared experts with
            a width of their own.
        experts: number of routed experts to keep in each layer of a mixture of experts; shared experts and the number
            of experts per token stay.
        importance: selection of the parts to keep by activations on training rows; null for the first and last layers,
            or for the defaults where widths are reduced.
    """

    layers: Count | None = None
    keep: list[Annotated[int, Field(ge=0, le=2**31)]] | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    intermediate: Count | None = None
    moe_intermediate: Count | None = None
    shared_expert_intermediate: Count | None = None
    experts: Count | None = None
    importance: Importance | None = None

    @property
    def cuts_widths(self) -> bool:
        """Return whether layers lose channels, heads, columns or experts."""
        return any(getattr(self, name) is not None for name in WIDTHS)

    @property
    def is_calibrated(self) -> bool:
        """Return whether parts are chosen by rows of the training data."""
        return self.cuts_widths or self.importance is not None

    @property
    def chosen_by(self) -> Importance:
        """Return `importance`, or its defaults."""
        return self.importance or Importance()

    @model_validator(mode="after")
    def _says_what_to_keep(self) -> Self:
        both = self.layers is not None and self.keep is not None
        if both or (self.layers is None and self.keep is None and not self.cuts_widths):
            raise ValueError(
                "give exactly one of layers (how many to keep) and keep (which, counted from 0), or none of them with "
                f"one of {', '.join(WIDTHS)}"
            )
        if self.keep is not None and (not self.keep or sorted(set(self.keep)) != self.keep):
            raise ValueError(expected_got("keep to be an ascending list of layer numbers, none twice", self.keep))
        if self.importance is not None and self.layers is None and not self.cuts_widths:
            raise ValueError("importance: keep names the layers, so that nothing is chosen by it; leave it out")
        return self
