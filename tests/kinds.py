"""Tiny models of every kind of attention, and every policy at a size that fits them."""

from functools import cache

import pytest
import torch
from models import prompt, tiny
from transformers import cache_utils
from transformers.cache_utils import DynamicCache

from eviction import policy
from hooks.forward import forward
from hooks.tiny import tiny_model

# the sliding windows are of 8 tokens; what has no float64 softmax is held to the precision of float32's
KINDS = {
    "full": ("llama", "sdpa"),
    "full, float32 softmax": ("llama", "eager"),
    "learned positions": ("gpt2", "sdpa"),
    "sliding and full": ("gemma3_text", "sdpa"),
    "chunked and full": ("llama4_text", "sdpa"),
    "soft-cap, sliding": ("gemma2", "eager"),
    "sinks, sliding": ("gpt_oss", "eager"),
    "latent": ("deepseek_v3", "sdpa"),
    "latent, float32 softmax": ("deepseek_v3", "eager"),
    "gated, beside linear attention": ("qwen3_next", "sdpa"),
    "beside a state space in the same layer": ("falcon_h1", "sdpa"),
    "shared KV, sliding": ("gemma3n_text", "sdpa"),
    "shared KV, last token alone": ("gemma4_text", "sdpa"),
    "one attention module for several layers": ("zamba2", "sdpa"),
    "a window in the cache alone": ("moshi", "sdpa"),
}
SETTINGS = {"sliding and full": {"layer_types": ["sliding_attention", "full_attention"] * 2}}
# the lowest transformers that is supported dispatches less, and caches latent attention expanded
LATEST = hasattr(cache_utils, "DummyLayer")
if not LATEST:
    del KINDS["a window in the cache alone"]
latest = pytest.mark.skipif(not LATEST, reason="not so in this transformers")


@cache
def model(kind: str):
    family, attention = KINDS[kind]
    return tiny_model(family, attention=attention, dtype=torch.float64, **SETTINGS.get(kind, {}))


@cache
def small_model():
    return tiny("llama", num_hidden_layers=2)


def named(name: str, attends: int = 4, heads: int = 4):
    settings = {"scores": tuple((1.0 + layer, 3.0, 0.5, 2.0)[:heads] for layer in range(attends))} if "headkv" in name else {}
    if name.startswith(("snapkv", "adakv", "headkv", "pyramidkv", "global", "caote", "defensive", "layer-")):
        settings |= {"window": 4, "kernel": 3}
    elif name.startswith(("fisher", "straight")):
        settings |= {"window": 4, "before": 1, "after": 2, "dilation": 0.1, "sink": 1, "signs": 2}
    elif name.startswith(("h2o", "random", "expected", "start")):
        settings |= {"recent": 3} if "start" not in name else {}
    return policy(name, **settings)


def owners(kind: str) -> int:
    """Layers that hold entries."""
    held = DynamicCache(config=model(kind).config)
    with torch.no_grad():
        forward(model(kind), prompt(4), held)
    return sum(getattr(layer, "keys", None) is not None for layer in held.layers)


LINEAR = (
    "gated, beside linear attention",
    "beside a state space in the same layer",
    "one attention module for several layers",
)


def refuses(name: str, kind: str) -> bool:
    """Policies that run the last tokens again cannot do so over linear states, straight-through not where a layer hands on several streams, and
    removals are not counted together where several layers read an entry.
    """
    if not name.startswith(("fisher", "straight")):
        return False
    return (
        kind in LINEAR
        or ("greedy" in name and kind.startswith("shared KV"))
        or (name.startswith("straight") and kind == "shared KV, sliding")
    )
