"""What a policy costs: time to the first token, and for each token after it, policies taking turns."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from analysis.schema import FULL
from eviction import Policy, prefill, reading
from hooks.forward import forward, greedy

REPEATS = 3


def timing_rows(model: Any, prompt: Tensor, policies: Mapping[str, Policy], budget: float, tokens: int) -> pd.DataFrame:
    """Rows of the table `timings`: each policy at `budget`, and the full cache, decoding `tokens` tokens after the first.

    The first turn, which warms caches up, is not kept.
    """
    rows = []
    for repeat in range(REPEATS + 1):
        for name, chosen in ((FULL, None), *policies.items()):
            start = _now(prompt)
            if chosen is None:
                cache: Cache = DynamicCache(config=model.config)
                logits = forward(model, prompt, cache, last_logits=1)
            else:
                prefilled = prefill(model, prompt, chosen, budget)
                cache, logits = prefilled.cache, prefilled.logits
            first = logits.argmax(-1)
            middle = _now(prompt)
            with nullcontext() if chosen is None else reading(model):
                greedy(model, first, cache, 1 + tokens)
            rows.append(
                {
                    "policy": name,
                    "budget": 1.0 if chosen is None else budget,
                    "repeat": repeat,
                    "first_token_s": middle - start,
                    "token_s": (_now(prompt) - middle) / tokens,
                }
            )
    return pd.DataFrame([row for row in rows if row["repeat"]])


def _now(on: Tensor) -> float:
    if on.is_cuda:
        torch.cuda.synchronize(on.device)
    return time.perf_counter()
