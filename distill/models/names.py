"""Names of transformers' families that we go by: fields of configurations, and modules of layers.

A part is recognised by running it (`patch/recognition.py`, `patch/experts.py`), never by its name alone; these tables
say where to look first. A family whose parts are known ones under other names is one more entry here. Beside each
table stands who reads it.
"""

from __future__ import annotations

# ---- fields of configurations, of which a family has one each

LAYERS = ("num_hidden_layers", "n_layer")  # meta_models
HIDDEN = ("hidden_size", "n_embd")  # meta_models
INTERMEDIATE = ("intermediate_size", "n_inner")  # shape, prune/widths
MOE_INTERMEDIATE = ("moe_intermediate_size",)  # prune/widths
SHARED_INTERMEDIATE = (  # prune/widths
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")  # routing
EXPERTS_PER_TOKEN = (  # routing
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
EXPERT_GROUPS = ("n_group", "num_expert_group")  # routing
EXPERT_GROUPS_PER_TOKEN = ("topk_group",)  # routing
SOFT_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")  # head
# multiply the logits; `logits_scaling` divides in Granite and multiplies elsewhere, and is told apart by running (head)
LOGIT_SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scale")

# fields that limit what a token attends to, or how (Llama 4 sharpens attention by steps), in tokens (patch/packed)
ATTENTION_LIMITS = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "sliding_window_size",
    "local_attention",
    "keep_window_size",
    "attention_chunk_size",
    "index_topk",
    "floor_scale",
    "log_scaling_n_floor",
)
# widths of convolutions over tokens (patch/packed)
CONVOLUTION_WIDTHS = (
    "conv_kernel",
    "conv_kernel_size",
    "conv_L_cache",
    "conv1d_width",
    "mamba_d_conv",
    "linear_conv_kernel_dim",
    "short_conv_kernel_size",
    "ple_conv_kernel_size",
)
ORIGINAL_LENGTH = "original_max_position_embeddings"  # beyond it LongRoPE takes other frequencies (patch/packed)

# fields that a model with fewer layers has to change (prune/pruning)
# lists with one entry a layer, beside those whose names have "layer" in them
PER_LAYER_LISTS = ("intermediate_size", "activation_sparsity_pattern", "indexer_types")
# lists of layers' numbers
LAYER_NUMBERS = ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "mlp_only_layers", "moe_layers")
# numbers of layers before the first that has experts
DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

# ---- modules

# gate, up and down of a gated MLP; None where gate and up are one matrix (patch/recognition, precision/fp8_student,
# shape)
GatedNames = tuple[str, str | None, str]
SEPARATE_GATED: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
GATED_MLPS: tuple[GatedNames, ...] = (
    SEPARATE_GATED,
    ("w1", "w3", "w2"),
    ("gate_up_proj", None, "down_proj"),
)
# the two linear layers of an MLP without a gate (patch/recognition)
PLAIN_MLPS = (
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
# Layers that read the same input (q, k and v; gate and up) stand in distill_kernels.matmul.siblings, which swaps linear
# layers for fp8 without this package (patch/shared_input, precision/, generation/fused_decoder).
# parameters of a module that holds all experts of a layer (patch/experts)
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
# children of a decoder layer, by where its norms stand (patch/residual_norms, generation/fused_decoder)
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
PRE_NORM_LAYER = frozenset({"self_attn", "mlp", *LAYER_NORMS})
SANDWICH_NORM_LAYER = PRE_NORM_LAYER | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ROTARY_FUNCTION = "apply_rotary_pos_emb"  # the function of a modelling file that attention calls (patch/recognition)
