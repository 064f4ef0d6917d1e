"""What a compressed cache costs and saves: the reference model, a prompt of 8,000 tokens, 20 % cache.

`bytes_over_kept_uniform`, `bytes_over_kept_ragged`: bytes that the cache holds over those of the kept entries (target: at most 1.05).
`decode_speedup_uniform`: time of a decoded token on the full cache over that on the uniform one (target: at least 1.4);
`ragged_over_uniform`: on the ragged cache (AdaKV) over the uniform one (target: within 1.2). `snapkv_over_prefill`,
`two_stage_over_prefill`: capture, score, select and compact over a plain prefill, as its share (targets: 0.02, 0.08).
`prefill_peak_over_plain`: peak memory of prefill with eviction over a plain prefill, by the allocator (target: at most 1.02).
"""

import statistics
import sys
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages before this file, which has the name of one

import torch
from _pairs import THREADS, arguments, finish, median_ratio, peak_bytes, seconds
from transformers.cache_utils import DynamicCache

from eviction import policy, prefill, reading
from hooks import capture, load
from hooks.forward import forward

TOKENS, BUDGET, DECODED = 8000, 0.2, 24


def overhead(loaded, tokens: torch.Tensor, name: str, pairs: int) -> dict[str, float]:
    """Score, select and compact, timed by themselves beside the prefill that they follow."""
    from eviction.cache import EvictedCache

    chosen, shares = policy(name), []
    for _ in range(pairs):
        cache = DynamicCache(config=loaded.model.config)
        taken = 0.0
        scored = []

        def look(record):
            nonlocal taken
            taken += seconds(lambda: scored.append(chosen.score(record, BUDGET)))  # noqa: B023

        with capture(loaded.model, window=chosen.window, visitor=look):
            whole = seconds(lambda: forward(loaded.model, tokens, cache, last_logits=1))  # noqa: B023
        taken_after = seconds(
            lambda: EvictedCache.compacted(cache, [d.keep for d in chosen.decide_all(scored)], consume=True)  # noqa: B023
        )
        shares.append((taken + taken_after) / (whole - taken))
    return {"median": statistics.median(shares), "low": min(shares), "high": max(shares)}


@torch.inference_mode()
def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(THREADS)
    loaded = load()
    tokens = loaded.tokenizer("\n".join(topics.values()), return_tensors="pt").input_ids[:, :TOKENS]
    config = loaded.model.config
    per_entry = 2 * config.head_dim * 4

    full = DynamicCache(config=config)
    forward(loaded.model, tokens, full, last_logits=1)
    caches, over = {}, {}
    for kind, name in (("uniform", "snapkv"), ("ragged", "adakv")):
        evicted = prefill(loaded.model, tokens, policy(name), BUDGET)
        kept = sum(int(decision.keep.sum()) for decision in evicted.decisions)
        caches[kind], over[kind] = evicted.cache, evicted.cache.nbytes / (kept * per_entry)
        assert evicted.cache.ragged == (kind == "ragged")

    def decoding(cache):
        def run() -> None:
            for number in range(DECODED):
                forward(loaded.model, tokens[:, number : number + 1], cache, last_logits=1)
            cache.crop(-DECODED)

        return run

    with reading(loaded.model):
        ragged = median_ratio(decoding(caches["ragged"]), decoding(caches["uniform"]), options.pairs, options.json)
    speedup = median_ratio(decoding(full), decoding(caches["uniform"]), options.pairs, options.json)
    del full, caches

    snapkv = overhead(loaded, tokens, "snapkv", max(options.pairs // 2, 2))
    two_stage = overhead(loaded, tokens, "snapkv+two-stage", max(options.pairs // 2, 2))
    plain = peak_bytes(lambda: forward(loaded.model, tokens, DynamicCache(config=config), last_logits=1))
    with_eviction = peak_bytes(lambda: prefill(loaded.model, tokens, policy("snapkv+two-stage"), BUDGET))
    finish(
        {
            "bytes_over_kept_uniform": over["uniform"],
            "bytes_over_kept_ragged": over["ragged"],
            "decode_speedup_uniform": speedup["median"],
            "decode_speedup_low": speedup["low"],
            "decode_speedup_high": speedup["high"],
            "ragged_over_uniform": ragged["median"],
            "ragged_low": ragged["low"],
            "ragged_high": ragged["high"],
            "snapkv_over_prefill": snapkv["median"],
            "two_stage_over_prefill": two_stage["median"],
            "prefill_peak_over_plain": with_eviction / plain,
            "decoded_full_ms": 1000 * speedup["measured_s"] / DECODED,
            "decoded_uniform_ms": 1000 * speedup["base_s"] / DECODED,
            "tokens": TOKENS,
            "budget": BUDGET,
            "pairs": options.pairs,
            "threads": THREADS,
        }
    )


if __name__ == "__main__":
    main()
