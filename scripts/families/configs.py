"""Tiny configurations of the causal language models that transformers has, derived from their configuration classes.

Every family starts from its class's own defaults, so that what makes it particular (kinds of layers, soft caps, gates,
multipliers) is kept. Sizes are replaced by name from `WIDTHS` and `SIZES`, and lists with an entry a layer become short
ones with each kind of layer. `OVERRIDES` holds what no rule derives, `LEFT_OUT` what is no causal model of text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
VOCABULARY = 320  # beyond those of the tokenizer, since the tokenizers of some families add their own
LENGTH = 512
# of a configuration's fields, in whatever family they occur: widths, in columns, and all others
WIDTHS: dict[str, int] = {
    name: value
    for value, names in (
        (8, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim swa_head_dim rotary_dim linear_key_head_dim"),
        (8, "linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim kv_channels dim_head d_rel"),
        (8, "mamba_d_state state_size ssm_state_size laurel_rank hidden_size_per_layer_input router_hidden_size"),
        (16, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"),
        (16, "moe_shared_expert_intermediate_size shared_experts_intermediate_size intermediate_size_mlp"),
        (16, "global_head_dim qk_head_dim kv_lora_rank q_lora_rank o_lora_rank index_head_dim mamba_dt_rank"),
        (16, "time_step_rank hc_lowrank"),
        (32, "hidden_size d_model n_embd embedding_dim word_embed_proj_dim attention_hidden_size lru_width"),
        (64, "intermediate_size ffn_dim ffn_hidden_size dff dense_intermediate_size dim_ff"),
    )
    for name in names.split()
}
SIZES: dict[str, int | None] = {
    name: value
    for value, names in (
        (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks num_layers_per_stack"),
        (4, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
        (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads linear_num_heads"),
        (2, "linear_num_value_heads o_groups num_experts_per_tok num_experts_per_token moe_topk moe_k"),
        (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
        (1, "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group"),
        (1, "first_k_dense_replace num_dense_layers moe_layer_start_index mamba_n_groups n_groups mamba_ngroups"),
        (8, "mamba_n_heads mamba_num_heads"),
        # with few heads many keys score 0, equally, and which of them an indexer takes depends on the row's length
        (16, "index_n_heads mamba_chunk_size chunk_size block_size"),
        (24, "sliding_window window_size attention_window_size sliding_window_size keep_window_size index_topk"),
        (24, "attention_chunk_size local_attention floor_scale rel_extent"),
        (LENGTH, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (None, "bos_token_id forced_eos_token_id"),
        (0, "eos_token_id"),
        (2, "pad_token_id"),
    )
    for name in names.split()
}
# lists with an entry a layer
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "block_types")
GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "cwm": {"bos_token_id": 1},
    # published configurations name rope_theta, without which transformers' class does not open
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {  # of layers with windows
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 8, "num_heads": 8},
    "modernbert-decoder": {"bos_token_id": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 24,
        "indexer_compress_ratio": 4,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "num_query_groups": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
LEFT_OUT = {
    "an encoder, or the decoder of a sequence-to-sequence model": (
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text "
        "electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet reformer rembert roberta "
        "roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod cpmant"
    ),
    "text is a part of what it reads or writes": (
        "aria_text blt emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama moshi "
        "moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp dots3_note"
    ),
    "drafts for another model": "gemma4_assistant gemma4_unified_assistant",
    "the class of another family under a second name": "gpt-sw3",
    "its head is more than a linear layer: it is refused in one line": "modernbert-decoder",
}


def families() -> list[str]:
    """Return the model types that have a causal language model of text in this version of transformers."""
    left = {name for names in LEFT_OUT.values() for name in names.split()}
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in left)


def tiny_config(name: str, scale: int = 1, **more: Any) -> PreTrainedConfig:
    """Return the configuration of a tiny model of the family `name`.

    Args:
        name: A model type of transformers.
        scale: Multiplies widths.
        more: Fields that take precedence.

    Raises:
        ValueError: a family that makes no causal language model.
    """
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"family: expected a model type with a causal language model in transformers, got {name!r}")
    fields = AutoConfig.for_model(name).to_dict()
    sizes: dict[str, Any] = SIZES | {field: scale * value for field, value in WIDTHS.items()}
    sizes = {field: value for field, value in sizes.items() if field in fields}
    for field in PER_LAYER:
        if isinstance(kinds := fields.get(field), list) and kinds:
            sizes[field] = shortened(kinds)
    if "kv_lora_rank" in sizes:  # keys and values are expanded to every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return AutoConfig.for_model(name, **(sizes | OVERRIDES.get(name, {}) | more))


def shortened(kinds: Iterable[str]) -> list[str]:
    """Return `LAYERS` of a list with an entry a layer: its first ones, and at the end the kinds that these lack."""
    kinds = list(kinds)
    for count in range(LAYERS, -1, -1):
        first = (kinds * LAYERS)[:count]
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in first]
        if count + len(missing) <= LAYERS:
            return [*first, *missing]
    return list(dict.fromkeys(kinds))[:LAYERS]
