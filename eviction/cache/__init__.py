"""Caches that hold what was kept, and free the rest."""

from eviction.cache.uniform import EvictedCache, cache_bytes

__all__ = ["EvictedCache", "cache_bytes"]
