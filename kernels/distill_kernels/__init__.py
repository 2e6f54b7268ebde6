"""GPU kernels for distillation: fused losses, transformer layers, attention, matrix products and AdamW.

Needs torch; triton only where a CUDA tensor is used. Knows nothing of models, recipes or trainers. A name's module is
imported when the name is first used; what no training needs is in `extras`.
"""

from typing import TYPE_CHECKING

from distill_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from distill_kernels.attention.flash import flash_attention
    from distill_kernels.attention.ranges import cu_seqlens_from_position_ids
    from distill_kernels.decoding.cached_attention import decode_attention
    from distill_kernels.extras.kv_cache import KVCache
    from distill_kernels.extras.probability_kl import kl_probabilities
    from distill_kernels.extras.row_softmax import softmax
    from distill_kernels.extras.split_k import SplitKLinear, split_k_linear
    from distill_kernels.extras.tiled_linear import triton_linear
    from distill_kernels.layers.bias_gelu import BiasGELU, bias_gelu
    from distill_kernels.layers.glu import geglu, glu, swiglu
    from distill_kernels.layers.layer_norm import LayerNorm, layer_norm
    from distill_kernels.layers.rms_norm import RMSNorm, add_rms_norm, rms_norm
    from distill_kernels.layers.rope import rope
    from distill_kernels.losses.chunked import ChunkedLoss
    from distill_kernels.losses.functional import (
        fused_cross_entropy_loss,
        fused_distillation_loss,
        fused_jsd_loss,
        fused_kl_loss,
        fused_log_probs,
        fused_policy_gradient_loss,
        fused_skew_kl_loss,
        fused_student_top_k_kl_loss,
        fused_top_k_kl_loss,
        fused_tvd_loss,
    )
    from distill_kernels.losses.head import call_inside, head_loss
    from distill_kernels.losses.logits import cross_entropy, distillation_loss, jsd, kl_div, skew_kl, tvd
    from distill_kernels.losses.mixture import TeacherHead
    from distill_kernels.losses.modules import (
        FusedCrossEntropyLoss,
        FusedDistillationLoss,
        FusedJSDLoss,
        FusedKLLoss,
        FusedSkewKLLoss,
        FusedTVDLoss,
    )
    from distill_kernels.losses.policy import FusedPolicyGradientLoss
    from distill_kernels.losses.terms import Clip, LossTerm, Temperatures, TokenStats
    from distill_kernels.losses.topk import FusedStudentTopKKLLoss, FusedTopKKLLoss
    from distill_kernels.matmul.fp8 import Fp8Linear, fp8_linear, quantize_rows, swap_linears_for_fp8
    from distill_kernels.matmul.lora import lora_linear
    from distill_kernels.optim.adamw import FusedAdamW
    from distill_kernels.sampling import sample_tokens

__all__ = [
    "BiasGELU",
    "ChunkedLoss",
    "Clip",
    "Fp8Linear",
    "FusedAdamW",
    "FusedCrossEntropyLoss",
    "FusedDistillationLoss",
    "FusedJSDLoss",
    "FusedKLLoss",
    "FusedPolicyGradientLoss",
    "FusedSkewKLLoss",
    "FusedStudentTopKKLLoss",
    "FusedTVDLoss",
    "FusedTopKKLLoss",
    "KVCache",
    "LayerNorm",
    "LossTerm",
    "RMSNorm",
    "SplitKLinear",
    "TeacherHead",
    "Temperatures",
    "TokenStats",
    "add_rms_norm",
    "bias_gelu",
    "call_inside",
    "cross_entropy",
    "cu_seqlens_from_position_ids",
    "decode_attention",
    "distillation_loss",
    "flash_attention",
    "fp8_linear",
    "fused_cross_entropy_loss",
    "fused_distillation_loss",
    "fused_jsd_loss",
    "fused_kl_loss",
    "fused_log_probs",
    "fused_policy_gradient_loss",
    "fused_skew_kl_loss",
    "fused_student_top_k_kl_loss",
    "fused_top_k_kl_loss",
    "fused_tvd_loss",
    "geglu",
    "glu",
    "head_loss",
    "jsd",
    "kl_div",
    "kl_probabilities",
    "layer_norm",
    "lora_linear",
    "quantize_rows",
    "rms_norm",
    "rope",
    "sample_tokens",
    "skew_kl",
    "softmax",
    "split_k_linear",
    "swap_linears_for_fp8",
    "swiglu",
    "triton_linear",
    "tvd",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "distill_kernels.attention.flash": "flash_attention",
        "distill_kernels.attention.ranges": "cu_seqlens_from_position_ids",
        "distill_kernels.layers.bias_gelu": "BiasGELU bias_gelu",
        "distill_kernels.layers.glu": "geglu glu swiglu",
        "distill_kernels.layers.layer_norm": "LayerNorm layer_norm",
        "distill_kernels.layers.rms_norm": "RMSNorm add_rms_norm rms_norm",
        "distill_kernels.layers.rope": "rope",
        "distill_kernels.losses.chunked": "ChunkedLoss",
        "distill_kernels.losses.functional": "fused_cross_entropy_loss fused_distillation_loss fused_jsd_loss "
        "fused_kl_loss fused_log_probs fused_policy_gradient_loss fused_skew_kl_loss "
        "fused_student_top_k_kl_loss fused_top_k_kl_loss fused_tvd_loss",
        "distill_kernels.losses.head": "call_inside head_loss",
        "distill_kernels.losses.logits": "cross_entropy distillation_loss jsd kl_div skew_kl tvd",
        "distill_kernels.losses.mixture": "TeacherHead",
        "distill_kernels.losses.modules": "FusedCrossEntropyLoss FusedDistillationLoss FusedJSDLoss FusedKLLoss "
        "FusedSkewKLLoss FusedTVDLoss",
        "distill_kernels.losses.policy": "FusedPolicyGradientLoss",
        "distill_kernels.losses.terms": "Clip LossTerm Temperatures TokenStats",
        "distill_kernels.losses.topk": "FusedStudentTopKKLLoss FusedTopKKLLoss",
        "distill_kernels.matmul.fp8": "Fp8Linear fp8_linear quantize_rows swap_linears_for_fp8",
        "distill_kernels.matmul.lora": "lora_linear",
        "distill_kernels.optim.adamw": "FusedAdamW",
        "distill_kernels.decoding.cached_attention": "decode_attention",
        "distill_kernels.extras.kv_cache": "KVCache",
        "distill_kernels.extras.probability_kl": "kl_probabilities",
        "distill_kernels.extras.row_softmax": "softmax",
        "distill_kernels.extras.split_k": "SplitKLinear split_k_linear",
        "distill_kernels.extras.tiled_linear": "triton_linear",
        "distill_kernels.sampling": "sample_tokens",
    },
)
