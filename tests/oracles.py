"""Naive float64 truths in loops over plain numbers. They share no code with what they judge."""

from fractions import Fraction

import numpy as np


def plain(problem):
    """Weights, sink mass, values and W_O as float64 arrays."""
    fields = (problem.weights, problem.sink_mass, problem.values, problem.projection)
    return tuple(np.asarray(field.double()) for field in fields)


def written(problem):
    """ν_{h,i} = v_i W_h, [batch, heads, keys, model_dim]."""
    _, _, values, projection = plain(problem)
    group = projection.shape[0] // values.shape[1]
    return np.array([[row[h // group] @ projection[h] for h in range(projection.shape[0])] for row in values])


def per_query(problem, number):
    """`number(A [keys], a0, kept [keys], ν [keys, model_dim])` of every head and query, as an array [batch, heads, queries, …]."""
    weights, sink, _, _ = plain(problem)
    keep, nu = np.asarray(problem.keep), written(problem)
    group = weights.shape[1] // keep.shape[1]
    return np.array(
        [
            [
                [number(weights[b, h, t], sink[b, h, t], keep[b, h // group], nu[b, h]) for t in range(weights.shape[2])]
                for h in range(weights.shape[1])
            ]
            for b in range(weights.shape[0])
        ]
    )


def exact_theta(weights, sink, norms, keep):
    """θ = C − (2 − 1/σ) Σ_R A ‖ν‖ in rational numbers, one query."""
    a, sizes = [Fraction(float(x)) for x in weights], [Fraction(float(x)) for x in norms]
    sigma = Fraction(float(sink)) + sum(x for x, kept in zip(a, keep, strict=True) if kept)
    held = sum(x * size for x, size, kept in zip(a, sizes, keep, strict=True) if kept)
    return sum(x * size for x, size in zip(a, sizes, strict=True)) - (2 - 1 / sigma) * held


def outputs(problem):
    """o and ô in the residual stream, [batch, heads, queries, model_dim] each, straight from the definitions."""
    weights, sink, values, projection = plain(problem)
    keep = np.asarray(problem.keep)
    batch, heads, queries, keys = weights.shape
    group = heads // values.shape[1]
    full = np.zeros((batch, heads, queries, projection.shape[2]))
    evicted = np.zeros_like(full)
    for b, h, t in np.ndindex(batch, heads, queries):
        kept = [i for i in range(keys) if keep[b, h // group, i]]
        sigma = sink[b, h, t] + sum(weights[b, h, t, i] for i in kept)
        for i in range(keys):
            written = values[b, h // group, i] @ projection[h]
            full[b, h, t] += weights[b, h, t, i] * written
            if i in kept and sigma > 0:  # a query to which nothing is left reads nothing
                evicted[b, h, t] += weights[b, h, t, i] / sigma * written
    return full, evicted


def attention(queries, keys, scale, visible=None, softcap=None, sinks=None, bias=None):
    """Probabilities [batch, heads, queries, keys] and sink mass, one softmax at a time."""
    q, k = np.asarray(queries, float), np.asarray(keys, float)
    batch, heads, count, _ = q.shape
    group = heads // k.shape[1]
    weights, sink = np.zeros((batch, heads, count, k.shape[2])), np.zeros((batch, heads, count))
    for b, h, t in np.ndindex(batch, heads, count):
        logits = np.array([q[b, h, t] @ key * scale for key in k[b, h // group]])
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if visible is not None:
            logits = np.where(visible[b, h, t], logits, -np.inf)
        if bias is not None:
            logits = logits + bias[b, h, t]
        own = -np.inf if sinks is None else float(sinks[h] if np.ndim(sinks) == 1 else sinks[b][h][t])
        top = max(logits.max(), own)
        powers = np.exp(logits - top)
        extra = 0.0 if sinks is None else np.exp(own - top)
        weights[b, h, t] = powers / (powers.sum() + extra)
        sink[b, h, t] = extra / (powers.sum() + extra)
    return weights, sink
