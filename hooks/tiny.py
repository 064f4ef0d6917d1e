"""Tiny random models of every causal-LM family that transformers has, from their configurations: to see what can be captured."""

import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LIMIT = 20_000_000
"""Parameters beyond which a model is not tiny."""

# What makes a model small, under the names that configurations use; a family takes those that it has.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "rotary_dim": 4,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    "mamba_d_state": 8,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    "mamba_d_head": 16,
    "mamba_head_dim": 8,
    "mamba_expand": 2,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
}

_LINEAR = ["linear_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SLIDING = ["sliding_attention", "full_attention"] * 2

# What a family needs beside that; None leaves a size at the configuration's own value.
PARTICULAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _LINEAR, "mlp_layer_types": ["dense"] * 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": _SLIDING, "rope_parameters": dict.fromkeys(_SLIDING, _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"layer_types": ["full_attention"] * 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "per_layer_config": {},
        "head_dim": 16,  # what qk_nope_head_dim and qk_rope_head_dim add up to
    },
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": _SLIDING, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"layer_types": _SLIDING, "num_kv_shared_layers": 2, "per_layer_config": {}},
    "gemma4_unified_text": {"layer_types": _SLIDING, "num_kv_shared_layers": 0, "per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR, "mlp_layer_types": ["dense"] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "mllama": {"cross_attention_layers": [2]},
    "nemotron_h": {"num_hidden_layers": None, "n_groups": 1},
    "olmo_hybrid": {"layer_types": _LINEAR},
    "prophetnet": {"num_hidden_layers": None},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"] * 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"v_head_dim": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
# A family made of several models takes what its text model takes.
PARTICULAR |= {
    outer: PARTICULAR[inner]
    for outer, inner in {
        "dots3_note": "dots3_note_text",
        "gemma3n": "gemma3n_text",
        "gemma4": "gemma4_text",
        "gemma4_unified": "gemma4_unified_text",
        "qwen4_exp": "qwen4_exp_text",
    }.items()
}


def families() -> list[str]:
    """The model types that `AutoModelForCausalLM` knows in the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **settings: Any) -> PreTrainedConfig:
    """A configuration of `family` with four layers of four heads; `settings` have the last word."""
    config_class = CONFIG_MAPPING[family]
    default = config_class()
    if family in ("musicgen", "musicgen_melody"):
        raise NotImplementedError(f"{family} is made of several models")
    text = default.get_text_config() if hasattr(default, "get_text_config") else default
    sizes: dict[str, Any] = {}
    for name, size in SIZES.items():
        known = _has(text, name)
        value = getattr(text if known else type(text), name, None)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if numeric or (known and name in ("num_key_value_heads", "head_dim")):
            sizes[name] = size
    if "kv_lora_rank" in sizes:  # latent attention expands to a key and a value for every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {**PARTICULAR.get(family, {}), **settings}
    return type(text)(**{name: size for name, size in sizes.items() if size is not None})


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        getattr(config, name)
    except Exception:  # some configurations raise on attributes that vary by layer
        return False
    return True


def tiny_model(
    family: str, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any
) -> nn.Module:
    """A random model of `family`, the same each time, with weights large enough that attention is far from uniform.

    Raises:
        NotImplementedError: the family cannot be made tiny (by this recipe).
        Whatever transformers raises where it cannot build the family or run it with that attention implementation.
    """
    config = tiny_config(family, **settings)
    config._experts_implementation = "eager"  # the others have no float64
    # of a family made of several models this is the text model, by itself where it has a class of its own
    named = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    build = AutoModelForCausalLM.from_config if type(config) in AutoModelForCausalLM._model_mapping else named._from_config
    with torch.device("meta"):
        size = sum(weight.numel() for weight in build(config).parameters())
    if size > LIMIT:
        raise NotImplementedError(f"{family} has {size:,} parameters even at its smallest")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = build(config, attn_implementation=attention, dtype=dtype)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if re.search(r"(q_proj|k_proj|query|key|qkv|c_attn|wq|wk)[^.]*\.weight$", name, re.IGNORECASE):
                    weight.mul_(8)
                elif "sink" in name:
                    weight.normal_()
    return model.eval()
