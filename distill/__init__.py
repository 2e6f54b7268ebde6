"""Distil a large language model into a small one.

    from distill import DistillationTrainer, FusedKLLoss

These, the other names of `distill_kernels`, `AutoFusedModelForCausalLM`, `patch`, `unpatch` and `Recipe` are imported
when they are first used, since most bring in torch.
"""

from typing import TYPE_CHECKING

import distill_kernels
from distill_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from distill_kernels import *  # noqa: F403

    from distill.models.patch.adoption import AutoFusedModelForCausalLM, patch
    from distill.models.patch.patching import unpatch
    from distill.recipe import Recipe
    from distill.training.trainer import DistillationTrainer

__version__ = "0.1.0"

__all__ = ["AutoFusedModelForCausalLM", "DistillationTrainer", "Recipe", "__version__", "patch", "unpatch"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "distill.models.patch.adoption": "AutoFusedModelForCausalLM patch",
        "distill.models.patch.patching": "unpatch",
        "distill.recipe": "Recipe",
        "distill.training.trainer": "DistillationTrainer",
        "distill_kernels": " ".join(distill_kernels.__all__),
    },
)
