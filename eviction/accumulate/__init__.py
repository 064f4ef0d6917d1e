"""The first verb of an eviction policy: accumulate how much each entry matters."""

from eviction.accumulate.base import Accumulate
from eviction.accumulate.expected import ExpectedAttention
from eviction.accumulate.fisher import Fisher, StraightThrough
from eviction.accumulate.h2o import H2O
from eviction.accumulate.positions import KeyNorm, Random, StartRecent
from eviction.accumulate.snapkv import SnapKV
from eviction.accumulate.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "Accumulate",
    "ExpectedAttention",
    "Fisher",
    "KeyNorm",
    "Random",
    "SnapKV",
    "StartRecent",
    "StraightThrough",
]
