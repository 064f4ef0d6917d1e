"""The third verb of an eviction policy: select the entries that stay."""

from eviction.select.attention_only import AttentionOnly
from eviction.select.decision import Decision
from eviction.select.two_stage import TwoStage

__all__ = ["AttentionOnly", "Decision", "TwoStage"]
