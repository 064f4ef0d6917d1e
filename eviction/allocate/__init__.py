"""The second verb of an eviction policy: allocate the budget to heads."""

from eviction.allocate.uniform import Uniform

__all__ = ["Uniform"]
