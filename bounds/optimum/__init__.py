"""The best possible choice, to measure a policy against: exhaustive, exact at any length where theory allows it, or searched."""

from bounds.optimum.branch_and_bound import branch_and_bound
from bounds.optimum.choice import Optimum
from bounds.optimum.dinkelbach import dinkelbach
from bounds.optimum.exhaustive import LIMIT, exhaustive, minimal_theta, minimal_theta_o_hat
from bounds.optimum.local_search import local_search

__all__ = [
    "LIMIT",
    "Optimum",
    "branch_and_bound",
    "dinkelbach",
    "exhaustive",
    "local_search",
    "minimal_theta",
    "minimal_theta_o_hat",
]
