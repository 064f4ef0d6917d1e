"""A policy is three verbs, as in Algorithm 2 of arXiv 2502.03805: accumulate, allocate, select."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from bounds.norms import projected_norms
from eviction.accumulate import SnapKV
from eviction.allocate import Uniform
from eviction.select import AttentionOnly, Decision, TwoStage
from hooks.records import LayerRecord
from perturbation.weights import attention_weights


@dataclass(frozen=True)
class Policy:
    """A frozen composition of the three verbs; equal settings are equal policies."""

    name: str
    accumulate: SnapKV = field(default_factory=SnapKV)
    allocate: Uniform = field(default_factory=Uniform)
    select: AttentionOnly | TwoStage = field(default_factory=AttentionOnly)

    @property
    def window(self) -> int:
        """The queries that must be captured for this policy to decide, and the entries that it always keeps."""
        return self.accumulate.window

    def decide(self, record: LayerRecord, budget: int | float) -> Decision:
        """Which of the layer's entries stay, from what its attention used in the prefill.

        Norms are ‖v_i W_h‖ without a gate, which differs from query to query and is not known for the queries to come.

        Args:
            record: the layer's capture, with at least `window` queries.
            budget: entries per KV head, or a fraction of the keys.

        Raises:
            BudgetError: the budget does not hold more than the window.
            ValueError: fewer queries were captured than the window has, or scores are not finite.
        """
        weights, _ = attention_weights(**record.inputs)
        norms = projected_norms(record.values, record.projection_blocks) if self.select.needs_norms else None
        return self.choose(weights, norms, record.n_kv_heads, budget)

    def choose(
        self,
        weights: Float[Tensor, "batch heads queries keys"],
        value_norms: Float[Tensor, "batch heads 1 keys"] | None,
        n_kv_heads: int,
        budget: int | float,
    ) -> Decision:
        """`decide`, from attention weights of the window and ‖V W_O‖₁ that are already at hand."""
        keys = weights.shape[-1]
        entries = self.allocate(budget, keys, min(self.window, keys))
        if entries == keys:
            everything = weights.new_ones(weights.shape[0], n_kv_heads, keys).bool()
            return Decision(everything, everything if self.select.needs_norms else None)
        scores = self.accumulate(weights, n_kv_heads)
        norms = None
        if value_norms is not None:
            norms = value_norms[..., 0, : keys - self.window].unflatten(1, (n_kv_heads, -1)).mean(2)
        return self.select(scores, entries, self.window, norms)


def snapkv(**settings: object) -> Policy:
    """SnapKV with attention-only selection; `settings` are those of `SnapKV` (window, kernel, pooling)."""
    return Policy("snapkv", SnapKV(**settings))  # type: ignore[arg-type]


def snapkv_two_stage(alpha: float = 0.5, epsilon: float = 1e-4, **settings: object) -> Policy:
    """SnapKV with CriticalKV's two-stage selection."""
    return Policy("snapkv+two-stage", SnapKV(**settings), select=TwoStage(alpha, epsilon))  # type: ignore[arg-type]
