"""The third verb of an eviction policy: select the entries that stay."""

from eviction.select.attention_only import AttentionOnly
from eviction.select.decision import Decision, Scores, Select
from eviction.select.greedy import Greedy
from eviction.select.one_stage import Centred, Defensive, RatioOptimum, SingleEviction, Weighted
from eviction.select.two_stage import TwoStage

__all__ = [
    "AttentionOnly",
    "Centred",
    "Decision",
    "Defensive",
    "Greedy",
    "RatioOptimum",
    "Scores",
    "Select",
    "SingleEviction",
    "TwoStage",
    "Weighted",
]
