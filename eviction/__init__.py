"""The pipeline: accumulate, allocate, select, and the compressed cache that decoding goes on with."""

from eviction.cache import EvictedCache, cache_bytes
from eviction.errors import BudgetError
from eviction.generate import Prefilled, generate, prefill
from eviction.policy import Policy, snapkv, snapkv_two_stage
from eviction.select import Decision

__all__ = [
    "BudgetError",
    "Decision",
    "EvictedCache",
    "Policy",
    "Prefilled",
    "cache_bytes",
    "generate",
    "prefill",
    "snapkv",
    "snapkv_two_stage",
]
