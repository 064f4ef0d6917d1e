"""SnapKV and its two-stage selection choose what a plain float64 account of the paper's algorithms chooses, from the model's weights on."""

import numpy as np
import pytest
import torch
from models import prompt, tiny

from eviction import policy, prefill
from hooks import capture


def account(record, projection, window, kernel, budget, alpha, epsilon):
    """Algorithms 1 and 2 of arXiv 2502.03805 for one layer, in loops: the kept positions of each KV head, in order."""
    queries, keys, values = (part[0].numpy() for part in (record.queries, record.keys, record.values))
    heads, count = queries.shape[0], keys.shape[1]
    group, before = heads // keys.shape[0], count - window
    pooled, norms = np.zeros((heads, before)), np.zeros((heads, before))
    for h in range(heads):
        looked = np.zeros(count)
        for t in range(count - window, count):
            logits = [queries[h, t] @ keys[h // group, i] * record.scale for i in range(t + 1)]
            powers = np.exp(np.array(logits) - max(logits))
            looked[: t + 1] += powers / powers.sum() / window
        for i in range(before):
            near = range(max(i - kernel // 2, 0), min(i + kernel // 2 + 1, before))
            pooled[h, i] = max(looked[j] for j in near)
            block = projection[:, h * values.shape[2] : (h + 1) * values.shape[2]]
            norms[h, i] = np.abs(block @ values[h // group, i]).sum()
    kept = []
    for k in range(keys.shape[0]):
        own = slice(k * group, (k + 1) * group)
        attention, norm = pooled[own].mean(0), norms[own].mean(0)
        by_attention = sorted(range(before), key=lambda i: (-attention[i], i))
        free = budget - window
        first = free if alpha is None else int(alpha * free + 1e-9)
        chosen = by_attention[:first]
        rest = sorted((i for i in range(before) if i not in chosen), key=lambda i: (-(attention[i] + epsilon) * norm[i], i))
        kept.append(sorted(chosen + rest[: free - first]) + list(range(before, count)))
    return kept


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize(("length", "budget"), [(40, 12), (64, 33), (25, 24)])
@pytest.mark.parametrize(("window", "kernel"), [(4, 3), (8, 7), (1, 1)])
@pytest.mark.parametrize(("alpha", "epsilon"), [(None, 0.0), (0.5, 1e-4), (0.25, 1e-2), (0.0, 0.0)])
def test_the_entries_kept_are_those_of_the_account(family, length, budget, window, kernel, alpha, epsilon):
    model, tokens = tiny(family, dtype=torch.float64), prompt(length, seed=length)
    settings = {"window": window, "kernel": kernel}
    name = "snapkv" if alpha is None else "snapkv+two-stage"
    settings |= {} if alpha is None else {"alpha": alpha, "epsilon": epsilon}
    found = prefill(model, tokens, policy(name, **settings), budget).decisions
    with capture(model, window=None) as captured:
        model(tokens)
    for record, decision, layer in zip(captured, found, model.model.layers, strict=True):
        weight = layer.self_attn.o_proj.weight.numpy()
        expected = account(record, weight, window, kernel, budget, alpha, epsilon)
        assert [head.nonzero().flatten().tolist() for head in decision.keep[0]] == expected
