"""Memory and FLOPs of a teacher, by arithmetic, and ways of holding it that need less memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distill.models.dtypes import Precision
from distill.models.flops import NO_FLOPS, FlopCounts
from distill.models.load.shared_weights import FrozenWeights
from distill.recipe import Recipe


class Footprint(NamedTuple):
    """Memory and FLOPs of a teacher in a training step.

    Attributes:
        weights: Bytes of weights on each device.
        checkpoints: Bytes among them of checkpoints that another model may hold frozen too, in the same memory.
        gathered: Bytes of sharded weights that are gathered at one time; else 0.
        host: Bytes in host memory per process.
        moved: Bytes copied from host to each device per micro-batch.
        loading: Peak bytes on a device during loading, with the student; 0 if no more than afterwards.
        token_bytes: Bytes of targets per token of a micro-batch.
        logits: True if the teacher's logits are computed next to the student's.
        flops: FLOPs a token; None where they are not known.
        workspace: Bytes of the loss's workspace; None for the workspace of the fused losses.
        wide_head_gradient: True if the gradient of the student's head is accumulated in float32.
    """

    weights: float = 0.0
    gathered: float = 0.0
    host: float = 0.0
    moved: float = 0.0
    loading: float = 0.0
    token_bytes: float = 0.0
    logits: bool = True
    flops: FlopCounts | None = NO_FLOPS
    workspace: float | None = None
    wide_head_gradient: bool = False
    checkpoints: Mapping[FrozenWeights, float] = {}  # read only, as its type says

    def held(self, world: int, *, sharded: bool) -> float:
        """Return bytes of the weights on each of `world` devices: all, or a shard and what is gathered at a time."""
        return min(self.weights, self.weights / world + self.gathered) if sharded else self.weights


class FootprintContext(NamedTuple):
    """Inputs of a footprint beside the recipe.

    Attributes:
        precision: Dtypes from `resolve_precision`.
        memory_bytes: Memory of one device in bytes.
        world: Number of devices.
        sharded: True if the teacher is sharded over the devices.
    """

    precision: Precision
    memory_bytes: float
    world: int = 1
    sharded: bool = False


class SmallerTeacher(NamedTuple):
    """A way of holding the teacher that takes less of a GPU's memory.

    Attributes:
        override: Override of the recipe, written as on the command line.
        recipe: Recipe with that override.
        words: Advice in the report of a run that does not fit.
        note: Disadvantage of the override; empty for none.
        same_targets: True if the targets stay the same, so that a run may be resumed with it.
    """

    override: str
    recipe: Recipe
    words: str
    note: str = ""
    same_targets: bool = False
