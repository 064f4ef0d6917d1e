"""What a GPU reads in one kernel is what is read by head: flex attention on a CPU, varlen flash attention by a stand-in of its contract."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from kinds import KINDS, model, named
from models import prompt
from transformers.cache_utils import DynamicCache

from eviction import Moments, evicting
from eviction.cache import kernels
from hooks.forward import forward

reading = importlib.import_module("eviction.cache.reading")  # the module, not the function of that name


def naive_varlen(query, key, value, starts, ends, max_q, max_k, *, return_aux, scale=None, enable_gqa=False):
    """softmax(scale · q kᵀ) v of each sequence, by loops; the log-sum-exp [heads, queries], as some releases have it."""
    assert query.is_contiguous()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output, lse = torch.full((*query.shape[:2], value.shape[-1]), 7.0).to(query), torch.full(query.shape[:2], 7.0).to(query)
    for number in range(len(starts) - 1):
        asked, there = slice(starts[number], starts[number + 1]), slice(ends[number], ends[number + 1])
        assert asked.stop - asked.start <= max_q
        assert there.stop - there.start <= max_k
        for head in range(query.shape[1]):
            kv = head if key.shape[1] == query.shape[1] else 0
            assert enable_gqa or key.shape[1] == query.shape[1]
            logits = query[asked, head] @ key[there, kv].T * scale
            if logits.shape[1]:
                output[asked, head], lse[asked, head] = logits.softmax(-1) @ value[there, kv], logits.logsumexp(-1)
    return output, lse.T


def runs(used, chosen, pads: int) -> torch.Tensor:
    cache, logits = DynamicCache(config=used.config), []
    tokens, mask = prompt(80, batch=2), torch.ones(2, 80, dtype=torch.long)
    mask[1, :pads] = 0
    start = 0
    with torch.no_grad(), evicting(used, chosen, 0.4, Moments(every=3)):
        for count in (24, 5, 1, 1, 1, 1, 9, 1, 1):
            start += count
            logits.append(forward(used, tokens[:, start - count : start], cache, attention_mask=mask[:, :start]))
    valid = mask[:, :start].bool()
    return torch.cat(logits, 1)[valid]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "latent" not in kind])
@pytest.mark.parametrize("name", ["adakv", "global+two-stage", "pyramidkv"])
@pytest.mark.parametrize("kernel", ["flex", "varlen"])
def test_one_kernel_reads_what_is_read_by_head(kernel, name, kind, monkeypatch):
    used, chosen, taken = model(kind), named(name), []
    pads = 0 if KINDS[kind][1] == "eager" else 5  # in float64 the model's own eager attention gives NaN to pads
    expected = runs(used, chosen, pads)
    monkeypatch.setattr(reading, "takes_one", lambda call: taken.append(1) or True)
    if kernel == "varlen":
        flashed = []
        stand_in = SimpleNamespace(
            varlen_attn=naive_varlen, AuxRequest=kernels._varlen.AuxRequest if kernels._varlen else SimpleNamespace
        )
        monkeypatch.setattr(kernels, "_varlen", stand_in)
        monkeypatch.setattr(kernels, "flash_takes", lambda query, layer: flashed.append(1) or True)
        kernels._entries_first.cache_clear()
    torch.testing.assert_close(runs(used, chosen, pads), expected, rtol=2e-5, atol=2e-5)
    kernels._entries_first.cache_clear()
    assert taken
    assert kernel == "flex" or flashed or KINDS[kind][0] == "gemma2"  # whose soft-cap flash attention does not know


def test_many_queries_over_the_tail_go_in_blocks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    whole = kernels.tail_part(query, keys, values, mask, 0.3, 5.0)
    monkeypatch.setattr(kernels, "BLOCK", 150)
    for one, other in zip(kernels.tail_part(query, keys, values, mask, 0.3, 5.0), whole, strict=True):
        torch.testing.assert_close(one, other)
    logits = 5 * torch.tanh(query @ keys.repeat_interleave(2, 1).mT * 0.3 / 5)
    torch.testing.assert_close(
        whole[0], logits.masked_fill(~mask, -torch.inf).softmax(-1) @ values.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5
    )
