"""Distil a large language model into a small one.

    from distill import DistillationTrainer, FusedKLLoss

These, the other names of `distill_kernels`, `AutoFusedModelForCausalLM`, `patch`, `unpatch` and `Recipe` are imported
when they are first used, since most bring in torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"

__all__ = ["AutoFusedModelForCausalLM", "DistillationTrainer", "Recipe", "__version__", "patch", "unpatch"]

_HERE = {
    "AutoFusedModelForCausalLM": "distill.models.adoption",
    "DistillationTrainer": "distill.training.trainer",
    "Recipe": "distill.recipe",
    "patch": "distill.models.adoption",
    "unpatch": "distill.models.patching",
}


def __getattr__(name: str) -> Any:
    if name in _HERE:
        return getattr(import_module(_HERE[name]), name)
    # `from distill.core import console` asks for the attribute before it imports the module: leave torch out of that
    if not name.startswith("_") and find_spec(f"distill.{name}") is None:
        kernels = import_module("distill_kernels")
        if name in kernels.__all__:
            return getattr(kernels, name)
    raise AttributeError(f"module 'distill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HERE, *import_module("distill_kernels").__all__})
