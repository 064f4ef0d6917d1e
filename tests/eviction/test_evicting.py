"""What `evicting` chooses, how much it ever holds, and that it works in whatever runs a model."""

import contextlib
import copy
import threading

import pytest
import torch
from models import prompt, tiny
from transformers import TextIteratorStreamer
from transformers.cache_utils import DynamicCache

from eviction import BudgetError, EvictedCache, Moments, cache_bytes, evicting, generate, policy, prefill, reading
from hooks import UnsupportedAttention, capture, hiding
from hooks.dispatch import is_intercepted
from hooks.forward import cache_keyword, forward

SNAP = {"window": 4, "kernel": 3}
PASSES = (9, 9, 3, *[1] * 6, 2, *[1] * 5)


def naive_snapkv(queries, keys, held, budget: int, window: int, kernel: int, pads: int):
    """One row of one layer, by loops: keep [kv_heads, seen]. queries [heads, seen, d], keys [kv_heads, seen, d], held [kv_heads, seen]."""
    heads, seen, size = queries.shape
    kv_heads = keys.shape[0]
    looks = []
    for t in range(max(seen - window, pads), seen):
        row = torch.zeros(heads, seen, dtype=torch.float64)
        for head in range(heads):
            visible = [i for i in range(t + 1) if held[head * kv_heads // heads, i]]
            if not visible:
                break
            logits = (queries[head, t] @ keys[head * kv_heads // heads, visible].T) * size**-0.5
            row[head, visible] = logits.softmax(-1)
        else:
            looks.append(row)
    mean = torch.stack(looks).mean(0)
    keep = torch.zeros_like(held)
    for head in range(kv_heads):
        there = held[head].nonzero().flatten().tolist()
        if len(there) <= budget:
            keep[head, there] = True
            continue
        protected = there[-min(window, budget - 1) :] if budget > 1 else []
        group = mean.unflatten(0, (kv_heads, -1))[head]
        pooled = []
        for i in there:
            near = [j for j in range(i - kernel // 2, i + kernel // 2 + 1) if j in there and j not in protected]
            pooled.append(torch.stack([max([float(one[j]) for j in near], default=0) * torch.ones(()) for one in group]).mean())
        free = [(-float(score), i) for score, i in zip(pooled, there, strict=True) if i not in protected]
        keep[head, protected + [i for _, i in sorted(free)[: budget - len(protected)]]] = True
    return keep


@torch.no_grad()
@pytest.mark.parametrize("budget", [7, 0.4])
@pytest.mark.parametrize("pads", [0, 3])
def test_choices_are_those_of_the_last_queries_over_what_is_left(budget, pads):
    """However few tokens a pass has: an oracle that knows all queries of the masked full cache chooses the same."""
    (model, other), chosen, events = [tiny("llama", dtype=torch.float64) for _ in range(2)], policy("snapkv", **SNAP), []
    compressed, full = (DynamicCache(config=model.config) for _ in range(2))
    held = [torch.zeros(2, 0, dtype=torch.bool)] * 3
    queries = [torch.zeros(4, 0, 8, dtype=torch.float64)] * 3
    blocks = contextlib.ExitStack()
    blocks.enter_context(evicting(model, chosen, budget, Moments(every=2), watch=events.append))
    seen = 0
    for number, count in enumerate(PASSES):
        seen, before = seen + count, len(events)
        tokens, mask = prompt(count, seed=number), torch.ones(1, seen, dtype=torch.long)
        mask[0, :pads] = 0
        forward(model, tokens, compressed, attention_mask=mask)
        hidden = [each[None] for each in held]
        with hiding(other, hidden), capture(other, window=None) as captured:
            forward(other, tokens, full, attention_mask=mask)
        for layer, record in enumerate(captured):
            fresh = torch.ones(2, count, dtype=torch.bool)
            held[layer] = torch.cat([held[layer], fresh], 1)
            held[layer][:, :pads] = False
            queries[layer] = torch.cat([queries[layer], torch.zeros(4, count, 8, dtype=torch.float64)], 1)
            own = record.query_valid[0].nonzero().flatten()
            queries[layer][:, seen - len(own) :] = record.queries[0][:, own]
        if len(events) == before:
            continue
        entries = budget if isinstance(budget, int) else max(1, int(budget * (seen - pads) + 0.5))
        for layer in range(3):
            keys = full.layers[layer].keys[0]
            naive = naive_snapkv(queries[layer], keys, held[layer], entries, 4, 3, pads)
            assert torch.equal(events[-1].keep[layer][0], naive), (number, layer)
            held[layer] = naive
        if number == 9:  # what is carried along lives with the cache
            blocks.close()
            blocks.enter_context(evicting(model, chosen, budget, Moments(every=2), watch=events.append))
    blocks.close()
    assert len(events) >= 7


@torch.no_grad()
def test_h2o_adds_up_what_every_query_gave_to_what_it_saw():
    (model, other), chosen, events = [tiny("llama", dtype=torch.float64) for _ in range(2)], policy("h2o", recent=2), []
    compressed, full = (DynamicCache(config=model.config) for _ in range(2))
    held, sums = [torch.zeros(2, 0, dtype=torch.bool)] * 3, [torch.zeros(4, 0, dtype=torch.float64)] * 3
    with_choice = 0
    block = contextlib.ExitStack()
    block.enter_context(evicting(model, chosen, 6, Moments(every=3), watch=events.append))
    for number, count in enumerate((6, 5, *[1] * 9)):
        tokens, before = prompt(count, seed=number), len(events)
        forward(model, tokens, compressed)
        with hiding(other, [each[None] for each in held]), capture(other, window=None) as captured:
            forward(other, tokens, full)
        for layer, record in enumerate(captured):
            held[layer] = torch.cat([held[layer], torch.ones(2, count, dtype=torch.bool)], 1)
            sums[layer] = torch.nn.functional.pad(sums[layer], (0, count))
            for head in range(4):
                for t in range(count):
                    row = record.mask[0, head if record.mask.shape[1] > 1 else 0, t].nonzero().flatten()
                    logits = (record.queries[0, head, t] @ record.keys[0, head // 2, row].T) * 8**-0.5
                    sums[layer][head, row] += logits.softmax(-1)
        if len(events) == before:
            continue
        with_choice += 1
        for layer in range(3):
            score = sums[layer].unflatten(0, (2, 2)).mean(1)
            for head in range(2):
                there = held[layer][head].nonzero().flatten().tolist()
                free = sorted(there[:-2], key=lambda i: (-float(score[head, i]), i))  # noqa: B023
                keep = torch.zeros_like(held[layer][head])
                keep[[*free[:4], *there[-2:]]] = True
                assert torch.equal(events[-1].keep[layer][0, head], keep if len(there) > 6 else held[layer][head])
                held[layer][head] = events[-1].keep[layer][0, head]
    block.close()
    assert with_choice >= 4


CHUNKED = ["snapkv", "snapkv+two-stage", "adakv+two-stage", "global+norm", "h2o", "tova", "expected-attention", "keynorm", "random"]


@torch.no_grad()
@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("chunk_size", [1, 7, 19, 39])
def test_chunks_evicted_at_the_end_choose_what_one_piece_does(name, chunk_size):
    model, tokens = tiny("llama", dtype=torch.float64), prompt(40)
    settings = SNAP if "snapkv" in name or "adakv" in name or "global" in name else {}
    whole = prefill(model, tokens, policy(name, **settings), 0.3)
    if name == "h2o":  # which looks at the queries of the last pass alone, unless it adds up in every chunk
        chunked = prefill(model, tokens, policy(name, **settings), 39, chunk_size=chunk_size)
        whole = prefill(model, tokens, policy(name, **settings), 39)
    else:
        chunked = prefill(model, tokens, policy(name, **settings), 0.3, chunk_size=chunk_size, choose="at the end")
    torch.testing.assert_close(chunked.logits, whole.logits)
    for one, other in zip(chunked.decisions, whole.decisions, strict=True):
        assert torch.equal(one.keep, other.keep)
    assert chunked.full_bytes == whole.full_bytes


@torch.no_grad()
@pytest.mark.parametrize("name", ["start-recent", "random"])
@pytest.mark.parametrize("chunk_size", [1, 7, 19])
def test_policies_that_look_at_nothing_keep_the_same_tokens_in_chunks(name, chunk_size):
    model, tokens = tiny("llama"), prompt(40, batch=2)
    whole, chunked = (prefill(model, tokens, policy(name), 14, chunk_size=size) for size in (None, chunk_size))
    for one, other in zip(chunked.decisions, whole.decisions, strict=True):
        assert torch.equal(one.keep, other.keep)
    rising = prefill(model, tokens, policy("snapkv", **SNAP), 14, chunk_size=chunk_size)
    assert not torch.equal(rising.decisions[1].keep, prefill(model, tokens, policy("snapkv", **SNAP), 14).decisions[1].keep)
