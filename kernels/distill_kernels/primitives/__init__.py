"""Kernels that training does not need: softmax, KL of probabilities, products of few rows, attention over a cache.

They are names of `distill_kernels` as well. A module is imported when one of its names is first used.
"""

from typing import TYPE_CHECKING

from distill_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from distill_kernels.primitives.decode import decode_attention
    from distill_kernels.primitives.kv_cache import KVCache
    from distill_kernels.primitives.probability_kl import kl_probabilities
    from distill_kernels.primitives.row_softmax import softmax
    from distill_kernels.primitives.split_k import SplitKLinear, split_k_linear
    from distill_kernels.primitives.tiled import triton_linear

__all__ = [
    "KVCache",
    "SplitKLinear",
    "decode_attention",
    "kl_probabilities",
    "softmax",
    "split_k_linear",
    "triton_linear",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "distill_kernels.primitives.decode": "decode_attention",
        "distill_kernels.primitives.kv_cache": "KVCache",
        "distill_kernels.primitives.probability_kl": "kl_probabilities",
        "distill_kernels.primitives.row_softmax": "softmax",
        "distill_kernels.primitives.split_k": "SplitKLinear split_k_linear",
        "distill_kernels.primitives.tiled": "triton_linear",
    },
)
