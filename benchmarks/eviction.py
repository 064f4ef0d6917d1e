"""What a compressed cache costs and saves: the reference model, a prompt of 8,000 tokens, 20 % cache.

`bytes_over_kept_uniform`, `bytes_over_kept_ragged`: bytes that the cache holds over those of the kept entries (target: at most 1.05).
`decode_speedup_uniform`: time of a decoded token on the full cache over that on the uniform one (target: at least 1.4);
`ragged_over_uniform`: on the ragged cache (AdaKV) over the uniform one (target: within 1.2). `snapkv_over_prefill`,
`two_stage_over_prefill`: capture, score, select and compact over a plain prefill, as its share (targets: 0.02, 0.08).
`prefill_peak_over_plain`: peak memory of prefill with eviction over a plain prefill, by the allocator (target: at most 1.02).
`chunked_peak_over_bound`: peak memory of the prefill in chunks of 512, evicted after each, over the bound: that of one plain pass of 512
tokens on a full cache of the budget's entries, the cache counted (target: at most 1.1; `chunked_ragged_peak_over_bound`: with AdaKV's
budgets); `chunked_peak_over_plain`: over the same prefill, chunked, without eviction. `watched_over_plain`: a token decoded inside an
`evicting` block at which no choice follows, over one outside of it.
"""

import statistics
from pydoc_data.topics import topics

import torch
from _pairs import THREADS, arguments, finish, median_ratio, peak_bytes, seconds
from transformers.cache_utils import DynamicCache

from eviction import Moments, evicting, policy, prefill, reading
from hooks import capture, load
from hooks.forward import forward

TOKENS, BUDGET, DECODED, CHUNK = 8000, 0.2, 24, 512


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


def in_chunks(model, tokens: torch.Tensor) -> None:
    cache = DynamicCache(config=model.config)
    for part in tokens.split(CHUNK, 1):
        forward(model, part, cache, last_logits=1)


def chunked_peaks(model, tokens: torch.Tensor) -> tuple[int, ...]:
    """The bound, the peaks of uniform and of ragged eviction after each chunk, and that of no eviction; caches counted in all."""

    def bound() -> None:
        cache, held = DynamicCache(config=model.config), round(BUDGET * tokens.shape[1])
        size = (1, model.config.num_key_value_heads, held, model.config.head_dim)
        for layer in range(model.config.num_hidden_layers):
            cache.update(torch.zeros(size), torch.zeros(size), layer)
        forward(model, tokens[:, :CHUNK], cache, last_logits=1)

    evicted = [
        peak_bytes(lambda: prefill(model, tokens, policy(name), BUDGET, chunk_size=CHUNK))  # noqa: B023
        for name in ("snapkv+two-stage", "adakv+two-stage")
    ]
    return peak_bytes(bound), *evicted, peak_bytes(lambda: in_chunks(model, tokens))


def watching(model, tokens: torch.Tensor, options) -> dict[str, float]:
    """Decoding inside of an evicting block, between two choices, over decoding outside of it, both on the uniform cache."""
    caches = [prefill(model, tokens, policy("snapkv"), BUDGET).cache for _ in range(2)]

    def decode(cache) -> None:
        for number in range(DECODED):
            forward(model, tokens[:, number : number + 1], cache, last_logits=1)
        cache.crop(-DECODED)

    def watched() -> None:
        with evicting(model, policy("snapkv"), BUDGET, Moments(every=10 * DECODED)):
            decode(caches[1])

    return median_ratio(watched, lambda: decode(caches[0]), options.pairs, options.json)


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
    bound, chunked, ragged_chunked, unevicted = chunked_peaks(loaded.model, tokens)
    watched = watching(loaded.model, tokens, options)
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
            "chunked_peak_over_bound": chunked / bound,
            "chunked_ragged_peak_over_bound": ragged_chunked / bound,
            "chunked_peak_over_plain": chunked / unevicted,
            "watched_over_plain": watched["median"],
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
