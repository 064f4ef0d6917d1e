"""Tiny random models for the tests: `hooks.tiny`'s, at the size that the tests count on."""

import torch

from hooks.tiny import tiny_model

LAYERS = {"num_hidden_layers": 3, "max_position_embeddings": 256, "sliding_window": None}
GPT2 = {**LAYERS, "n_layer": 3, "n_positions": 256}
PARTICULAR = {
    "gpt2": GPT2,
    "bloom": GPT2,
    "gemma2": {**LAYERS, "sliding_window": 256, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gpt_oss": {**LAYERS, "sliding_window": 256},
    "phi": {**LAYERS, "num_key_value_heads": 4},
}


def tiny(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **settings):
    """A model of `family` with three layers, four query heads and two KV heads, the same every time."""
    return tiny_model(family, attention=attention, dtype=dtype, **{**PARTICULAR.get(family, LAYERS), **settings})


def prompt(length: int = 24, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))
