"""Naive float64 truths in loops over plain numbers. They share no code with what they judge."""

import numpy as np


def outputs(problem):
    """o and ô in the residual stream, [batch, heads, queries, model_dim] each, straight from the definitions."""
    weights, sink, values, projection, keep = (
        np.asarray(field) for field in (problem.weights, problem.sink_mass, problem.values, problem.projection, problem.keep)
    )
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
            if i in kept:
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
