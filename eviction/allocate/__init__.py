"""The second verb of an eviction policy: allocate the budget to heads."""

from eviction.allocate.base import Allocate, Candidates, apportion, require_budget, uniform_entries
from eviction.allocate.offline import HeadKV, PyramidKV
from eviction.allocate.ranked import AdaKV, Global
from eviction.allocate.uniform import Uniform, require_room

__all__ = [
    "AdaKV",
    "Allocate",
    "Candidates",
    "Global",
    "HeadKV",
    "PyramidKV",
    "Uniform",
    "apportion",
    "require_budget",
    "require_room",
    "uniform_entries",
]
