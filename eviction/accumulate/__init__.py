"""The first verb of an eviction policy: accumulate how much each entry matters over the observation window."""

from eviction.accumulate.snapkv import SnapKV

__all__ = ["SnapKV"]
