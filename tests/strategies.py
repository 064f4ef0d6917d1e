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
    def scale(self) -> Tensor:
        """Σ_i A_i Σ_d |v_id| Σ_e |W_de|: the size of what is summed, which rounding errors are relative to."""
        sizes = self.values.abs().repeat_interleave(self.group, 1) @ self.projection.abs().sum(-1)[None, :, :, None]
        return (self.weights @ sizes).squeeze(-1)

    def to(self, dtype: torch.dtype) -> "Problem":
        fields = (self.weights, self.sink_mass, self.values, self.projection)
        return Problem(*(field.to(dtype) for field in fields), self.keep)


def tolerance(dtype: torch.dtype, problem: Problem) -> Tensor:
    """What rounding may do to a sum over keys, value_dim and model_dim: their number of ε of the summed sizes."""
    terms = problem.values.shape[2] + problem.values.shape[3] + problem.projection.shape[2]
    return 4 * terms * torch.finfo(dtype).eps * problem.scale.double() / problem.sigma.double().clamp(max=1) + 1e-300


WEIGHTS = ("spread", "peaked", "uniform", "one-hot", "zeros")
VALUES = ("random", "zero", "constant", "cancelling", "hidden")
KEEPS = ("random", "all", "one", "light", "heavy")


@st.composite
def problems(draw, sinks: bool | None = None) -> Problem:
    """Every corner: σ on both sides of ½, one-hot, ties, zeros, cancelling values, sinks, one head, n = 1, keep all."""
    batch = draw(st.integers(1, 2))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    value_dim, model_dim = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    kinds = draw(st.sampled_from(WEIGHTS)), draw(st.sampled_from(VALUES)), draw(st.sampled_from(KEEPS))
    with_sink = draw(st.booleans()) if sinks is None else sinks
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return build(rng, batch, kv_heads, group, queries, keys, value_dim, model_dim, kinds, with_sink)


def build(rng, batch, kv_heads, group, queries, keys, value_dim, model_dim, kinds, with_sink) -> Problem:
    heads = kv_heads * group
    weights = _weights(rng, (batch, heads, queries, keys), kinds[0])
    sink = rng.uniform(0, 0.9, (batch, heads, queries)) if with_sink else np.zeros((batch, heads, queries))
    weights = weights * (1 - sink)[..., None]
    projection = rng.normal(size=(heads, value_dim, model_dim))
    values = _values(rng, (batch, kv_heads, keys, value_dim), kinds[1], projection)
    keep = _keep(rng, weights.reshape(batch, kv_heads, -1, keys).sum(2), kinds[2])
    # an entry that a query looks at must stay, or its output after removal is not defined
    for b, k in np.ndindex(batch, kv_heads):
        for h in range(k * group, (k + 1) * group):
            for t in range(queries):
                if sink[b, h, t] + weights[b, h, t, keep[b, k]].sum() <= 0:
                    keep[b, k, weights[b, h, t].argmax()] = True
    return Problem(*(torch.from_numpy(array) for array in (weights, sink, values, projection)), torch.from_numpy(keep))


def _weights(rng, shape, kind):
    if kind == "uniform":
        return np.full(shape, 1 / shape[-1])
    if kind == "one-hot":
        return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]
    logits = rng.normal(size=shape) * (8 if kind == "peaked" else 1)
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
