"""Tiny random models of real families, built from their configurations."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PARTICULAR = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 256, "attn_logit_softcapping": 5.0},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 256},
    "phi": {"num_key_value_heads": 4},
}


def tiny(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **settings):
    """A model of `family` with three layers, four query heads and two KV heads, the same every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **PARTICULAR.get(family, {}), **settings})
    config._experts_implementation = "eager"  # the others have no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():  # larger weights than the initialiser's, so that attention is not uniform
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4)
            if name.endswith("sinks"):
                weight.normal_()
    return model


def prompt(length: int = 24, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))
