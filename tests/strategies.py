"""Problems of eviction for the property tests: what attention used, and a keep-mask. Tested in test_strategies.py."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Float64 tensors in the shapes of `perturbation` and `bounds`, weights summing to 1 − sink_mass."""

    weights: Tensor
    sink_mass: Tensor
    values: Tensor
    projection: Tensor
    keep: Tensor

    @property
    def group(self) -> int:
        return self.weights.shape[1] // self.values.shape[1]

    @property
    def kept(self) -> Tensor:
        """The keep-mask per query head, [batch, heads, 1, keys]."""
        return self.keep.repeat_interleave(self.group, dim=1)[:, :, None]

    @property
    def sigma(self) -> Tensor:
        return self.sink_mass + (self.weights * self.kept).sum(-1)

    @property
    def left(self) -> Tensor:
        """A' = A / σ on what is kept; 0 where σ is 0."""
        sigma = self.sigma[..., None]
        return torch.where(sigma > 0, self.weights * self.kept / sigma.where(sigma > 0, 1), 0)

    @property
    def scale(self) -> Tensor:
        """Σ_i (A_i + A'_i) Σ_d |v_id| Σ_e |W_de|: the size of what is summed, which rounding errors are relative to."""
        sizes = self.values.abs().repeat_interleave(self.group, 1) @ self.projection.abs().sum(-1)[None, :, :, None]
        return ((self.weights + self.left) @ sizes).squeeze(-1)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order in which truth and bounds take them."""
        return self.weights, self.values, self.projection, self.keep, self.sink_mass

    def to(self, dtype: torch.dtype) -> "Problem":
        fields = (self.weights, self.sink_mass, self.values, self.projection)
        return Problem(*(field.to(dtype) for field in fields), self.keep)


def tolerance(dtype: torch.dtype, problem: Problem) -> Tensor:
    """What rounding may do to a sum over keys, value_dim and model_dim: their number of ε of the summed sizes."""
    terms = problem.values.shape[2] + problem.values.shape[3] + problem.projection.shape[2]
    return 4 * terms * torch.finfo(dtype).eps * problem.to(torch.float64).scale + 1e-300


WEIGHTS = ("spread", "peaked", "steep", "uniform", "one-hot", "zeros")
VALUES = ("random", "zero", "constant", "shared", "cancelling", "hidden")
KEEPS = ("random", "all", "one", "light", "heavy")


@st.composite
def problems(draw, sinks: bool | None = None, blind: bool | None = None) -> Problem:
    """Every corner: σ on both sides of ½, near 0 and 0 itself, one-hot, ties, zeros, cancelling values, sinks, one head, n = 1, keep all.

    `sinks` and `blind` (a query may be left with nothing, σ = 0) are drawn unless they are asked for. One in four problems is drawn number by
    number from a small grid, where ties and cancellation are common and hypothesis can climb towards a violation.
    """
    with_sink = draw(st.booleans()) if sinks is None else sinks
    may_be_blind = draw(st.booleans()) if blind is None else blind
    if draw(st.integers(0, 3)) == 3:
        return _drawn(draw, with_sink, may_be_blind)
    batch = draw(st.integers(1, 2))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    value_dim, model_dim = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    kinds = draw(st.sampled_from(WEIGHTS)), draw(st.sampled_from(VALUES)), draw(st.sampled_from(KEEPS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return build(rng, batch, kv_heads, group, queries, keys, value_dim, model_dim, kinds, with_sink, may_be_blind)


def _drawn(draw, with_sink: bool, blind: bool) -> Problem:
    group, queries, keys = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    value_dim, model_dim = draw(st.integers(1, 2)), draw(st.integers(1, 2))

    def numbers(low, high, *shape):
        count = int(np.prod(shape))
        return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype=float).reshape(shape)

    parts = numbers(0, 16, 1, group, queries, keys)
    parts[parts.sum(-1) == 0] = 1
    sink = numbers(0, 9, 1, group, queries) / 10 if with_sink else np.zeros((1, group, queries))
    weights = parts / parts.sum(-1, keepdims=True) * (1 - sink)[..., None]
    values = numbers(-8, 8, 1, 1, keys, value_dim) / 4
    projection = numbers(-8, 8, group, value_dim, model_dim) / 4
    keep = numbers(0, 1, 1, 1, keys).astype(bool)
    return _posed(weights, sink, values, projection, keep, blind)


def build(
    rng, batch, kv_heads, group, queries, keys, value_dim, model_dim, kinds, with_sink: bool, blind: bool = False
) -> Problem:
    heads = kv_heads * group
    weights = _weights(rng, (batch, heads, queries, keys), kinds[0])
    sink = rng.uniform(0, 0.9, (batch, heads, queries)) if with_sink else np.zeros((batch, heads, queries))
    weights = weights * (1 - sink)[..., None]
    projection = rng.normal(size=(heads, value_dim, model_dim))
    values = _values(rng, (batch, kv_heads, keys, value_dim), kinds[1], projection)
    keep = _keep(rng, weights.reshape(batch, kv_heads, -1, keys).sum(2), kinds[2])
    return _posed(weights, sink, values, projection, keep, blind)


def _posed(weights, sink, values, projection, keep, blind) -> Problem:
    """Keep what a well-posed removal must: an entry that each query looks at, or (blind) at least one at all, where there is no sink."""
    batch, kv_heads, _ = keep.shape
    group = weights.shape[1] // kv_heads
    for b, k in np.ndindex(batch, kv_heads):
        for h in range(k * group, (k + 1) * group):
            for t in range(weights.shape[2]):
                nothing = not keep[b, k].any() if blind else weights[b, h, t, keep[b, k]].sum() <= 0
                if nothing and sink[b, h, t] <= 0:
                    keep[b, k, weights[b, h, t].argmin() if blind else weights[b, h, t].argmax()] = True
    return Problem(*(torch.from_numpy(array) for array in (weights, sink, values, projection)), torch.from_numpy(keep))


def _weights(rng, shape, kind):
    if kind == "uniform":
        return np.full(shape, 1 / shape[-1])
    if kind == "one-hot":
        return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]
    logits = rng.normal(size=shape) * {"peaked": 8, "steep": 30}.get(kind, 1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    if kind == "zeros":  # exact zeros, as a mask leaves them
        weights = weights * (weights >= np.median(weights, -1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _values(rng, shape, kind, projection):
    if kind == "zero":
        return np.zeros(shape)
    values = rng.normal(size=shape)
    if kind == "constant":
        return np.broadcast_to(values[:, :, :1], shape).copy()
    if kind == "shared":  # one large component that no eviction can change
        return values + 100 * rng.normal(size=(*shape[:2], 1, shape[3]))
    if kind == "cancelling":  # pairs of opposite values
        values[:, :, 1::2] = -values[:, :, : 2 * (shape[2] // 2) : 2]
    if kind == "hidden" and shape[3] > 1:  # seen by the cache, annihilated by the first head's W_O
        left = np.linalg.svd(projection[0])[0][:, -1]
        projection[0] -= np.outer(left, left @ projection[0])
        values = values * 1e-3 + rng.normal(size=(*shape[:3], 1)) * left
    return values


def _keep(rng, mass, kind):
    shape, keys = mass.shape, mass.shape[-1]
    if kind == "all":
        return np.ones(shape, bool)
    if kind == "random":
        return rng.random(shape) < 0.5
    order = mass.argsort(-1)
    if kind == "heavy":
        order = order[..., ::-1]
    keep = np.zeros(shape, bool)
    np.put_along_axis(keep, order[..., : 1 if kind == "one" else max(1, keys // 2)], True, -1)
    return keep


def with_pads(problem: Problem, pads: int) -> Problem:
    """The same problem behind `pads` entries of weight 0 and large values, every other one of them in the keep-mask."""

    def ahead(tensor: Tensor, dim: int, filling: float) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = pads
        return torch.cat([torch.full(shape, filling, dtype=tensor.dtype), tensor], dim)

    kept = ahead(problem.keep, -1, False)
    kept[..., :pads:2] = True
    return Problem(ahead(problem.weights, -1, 0), problem.sink_mass, ahead(problem.values, -2, 1e3), problem.projection, kept)
