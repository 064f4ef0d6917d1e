"""Caches that hold what was kept, and free the rest."""

from eviction.cache.evicted import EvictedCache, cache_bytes
from eviction.cache.ragged import RaggedLayer
from eviction.cache.reading import reading
from eviction.cache.uniform import EvictedLayer

__all__ = ["EvictedCache", "EvictedLayer", "RaggedLayer", "cache_bytes", "reading"]
