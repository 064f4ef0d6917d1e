"""The pipeline: accumulate, allocate, select, and the compressed cache that decoding goes on with."""

from eviction.cache import EvictedCache, cache_bytes, reading
from eviction.errors import BudgetError
from eviction.evicting import evicting
from eviction.generate import Prefilled, generate, prefill
from eviction.head_scores import HeadScores
from eviction.looked import Looked, look
from eviction.moments import Moments
from eviction.observation import Observation
from eviction.passes import Eviction
from eviction.policy import Policy, snapkv, snapkv_two_stage
from eviction.registry import describe, names, policy, register, unregister
from eviction.select import Decision

__all__ = [
    "BudgetError",
    "Decision",
    "EvictedCache",
    "Eviction",
    "HeadScores",
    "Looked",
    "Moments",
    "Observation",
    "Policy",
    "Prefilled",
    "cache_bytes",
    "describe",
    "evicting",
    "generate",
    "look",
    "names",
    "policy",
    "prefill",
    "reading",
    "register",
    "snapkv",
    "snapkv_two_stage",
    "unregister",
]
