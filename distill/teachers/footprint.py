"""Memory and FLOPs of a teacher, by arithmetic, and ways of holding it that need less memory."""

from __future__ import annotations

from typing import NamedTuple

from distill.models.flops import NO_FLOPS, FlopCounts
from distill.models.precision.dtypes import Precision
from distill.recipe import Recipe


class Footprint(NamedTuple):
    """Memory and FLOPs of a teacher in a training step.

    Attributes:
        weights: bytes held on each device.
        gathered: bytes of weights that are gathered at a time where they are sharded, else 0.
        host: bytes in host memory, of each process.
        moved: bytes over the bus to each device in a micro-batch.
        loading: peak bytes on a device while it is loaded, student included; 0 where that is no more than afterwards.
        token_bytes: bytes held for each token of a micro-batch: the targets.
        logits: whether the teacher's logits are computed beside the student's.
        work: FLOPs a token; None where they are not known.
        workspace: bytes of the loss's workspace where it is not that of the fused losses; None there.
        wide_head_gradient: whether the gradient of the student's head is accumulated in float32.
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

    def held(self, world: int, *, sharded: bool) -> float:
        """Return bytes of the weights on each of `world` devices: all, or a shard and what is gathered at a time."""
        return min(self.weights, self.weights / world + self.gathered) if sharded else self.weights


class FootprintContext(NamedTuple):
    """Inputs of a footprint beside the recipe.

    Attributes:
        precision: from `resolve_precision`.
        memory_bytes: of one device.
        world: devices.
        sharded: whether the teacher is sharded over them.
    """

    precision: Precision
    memory_bytes: float
    world: int = 1
    sharded: bool = False


class SmallerTeacher(NamedTuple):
    """A way of holding the teacher that takes less of a GPU's memory.

    Attributes:
        override: of the recipe, as on the command line.
        recipe: with that override.
        words: advice in a run's report that it does not fit.
        note: what it costs.
        same_targets: whether the targets stay the same, so that a run may be resumed with it.
    """

    override: str
    recipe: Recipe
    words: str
    note: str = ""
    same_targets: bool = False
