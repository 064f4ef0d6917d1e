"""Capture, eviction and decoding on one GPU: random weights in Llama-3.1-8B's shape, bfloat16, 32K tokens, nothing to download.

Without a GPU the same runs on the CPU at a toy size, so that it is known to work; its times then mean nothing. Made to take less
than 4 minutes on a GPU.

`capture_identical`: logits with capture are bit for bit those without. `float32_error`: largest relative difference (L2, over decoded
tokens) between the ragged cache and the full one with the evicted entries masked, in a two-layer model in float32 (must be below 1e-4);
`bfloat16_error`: the same of the whole model, beside `bfloat16_noise`, that of two kernels on the full cache.
`capture_over_prefill`, `score_over_prefill` (two-stage), `evict_over_prefill`: seconds over a plain prefill's.
`decode_uniform_speedup`, `decode_ragged_speedup`: seconds of a token on the full cache over those on what 20 % leave. `peak_*_gb`:
most memory that the allocator held, weights apart.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import transformers
from _pairs import arguments, finish, peak_bytes
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from eviction import EvictedCache, cache_bytes, policy, prefill, reading
from hooks import capture, hiding
from hooks.forward import forward

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
TOY = {
    **SHAPE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
TOKENS, CHUNK, BUDGET, DECODED = (32768, 2048, 0.2, 32) if GPU else (512, 128, 0.2, 8)


def build(dtype: torch.dtype, **settings) -> LlamaForCausalLM:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(LlamaConfig(**{**(SHAPE if GPU else TOY), **settings})).eval()
    finally:
        torch.set_default_dtype(before)


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def timed(work: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds after a warm-up."""
    taken = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def peak(work: Callable[[], object]) -> float:
    """Gigabytes beyond what was held before."""
    if not GPU:
        return peak_bytes(work) / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def decoded(model, cache, steps: torch.Tensor) -> torch.Tensor:
    return torch.cat([forward(model, step, cache, last_logits=1) for step in steps.split(1, 1)], 1)


def against_masked(model, tokens: torch.Tensor, steps: torch.Tensor, name: str) -> tuple[float, float]:
    """How far the evicted cache is from the full one with the rest masked; and that from itself under another kernel."""
    found = prefill(model, tokens, policy(name), BUDGET)
    assert found.cache.ragged
    with reading(model):
        got = decoded(model, found.cache, steps)
    full = DynamicCache(config=model.config)
    forward(model, tokens, full, last_logits=1)
    with hiding(model, found.keep):
        expected = decoded(model, full, steps)
    full.crop(-steps.shape[1])
    everything = [None if mask is None else torch.ones_like(mask) for mask in found.keep]
    with hiding(model, everything):  # a mask of nothing is another kernel
        one = decoded(model, full, steps)
    full.crop(-steps.shape[1])
    return error(got, expected), error(one, decoded(model, full, steps))


@torch.inference_mode()
def main() -> None:
    options = arguments(__doc__)
    generator = torch.Generator().manual_seed(0)
    vocabulary = (SHAPE if GPU else TOY)["vocab_size"]
    tokens, steps = (torch.randint(0, vocabulary, (1, count), generator=generator).to(DEVICE) for count in (TOKENS, DECODED))
    figures: dict[str, object] = {
        "device": torch.cuda.get_device_name() if GPU else "cpu, toy size",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens": TOKENS,
        "budget": BUDGET,
    }

    small = build(torch.float32, num_hidden_layers=2, vocab_size=1000)
    exact, _ = against_masked(small, tokens[:, : min(TOKENS, 4096)] % 1000, steps[:, :8] % 1000, "adakv+two-stage")
    figures["float32_error"] = exact
    assert exact < 1e-4, exact
    del small

    model = build(torch.bfloat16 if GPU else torch.float32)
    plain = lambda: forward(model, tokens, DynamicCache(config=model.config), last_logits=1)  # noqa: E731

    def captured() -> torch.Tensor:
        with capture(model, window=32, visitor=lambda record: None):
            return plain()

    figures["capture_identical"] = bool(torch.equal(plain(), captured()))
    figures["bfloat16_error"], figures["bfloat16_noise"] = against_masked(model, tokens, steps[:, :8], "adakv+two-stage")

    base = timed(plain)
    figures["prefill_s"] = base
    figures["capture_over_prefill"] = timed(captured) / base
    for name in ("snapkv", "snapkv+two-stage", "adakv+two-stage"):
        key = name.replace("+", "_").replace("-", "_")
        figures[f"{key}_over_prefill"] = timed(lambda: prefill(model, tokens, policy(name), BUDGET), 2) / base  # noqa: B023
    figures["score_over_prefill"], figures["evict_over_prefill"] = (part / base for part in parts(model, tokens))

    figures["peak_prefill_gb"] = peak(plain)
    figures["peak_evicting_gb"] = peak(lambda: prefill(model, tokens, policy("adakv+two-stage"), BUDGET))
    figures["peak_chunked_gb"] = peak(lambda: prefill(model, tokens, policy("adakv+two-stage"), BUDGET, chunk_size=CHUNK))

    full = DynamicCache(config=model.config)
    forward(model, tokens, full, last_logits=1)
    caches = {"full": full}
    for kind, name in (("uniform", "snapkv"), ("ragged", "adakv")):
        caches[kind] = prefill(model, tokens, policy(name), BUDGET).cache
    figures |= {
        f"cache_{kind}_gb": cache_bytes(cache) / 1e9
        for kind, cache in zip(("full", "uniform", "ragged"), caches.values(), strict=True)
    }
    each = {}
    for name, cache in caches.items():

        def decode() -> None:
            decoded(model, cache, steps)  # noqa: B023
            cache.crop(-steps.shape[1])  # noqa: B023

        with reading(model) if name == "ragged" else nullcontext():
            each[name] = timed(decode) / DECODED
            figures[f"peak_decode_{name}_gb"] = peak(decode)
    figures["decode_full_ms"] = 1000 * each["full"]
    figures["decode_uniform_speedup"], figures["decode_ragged_speedup"] = (
        each["full"] / each[name] for name in ("uniform", "ragged")
    )
    if not options.json:
        for name, value in figures.items():
            print(f"{name:28} {value}", file=sys.stderr)
    finish(figures)


def parts(model, tokens: torch.Tensor) -> tuple[float, float]:
    """Seconds of scoring and of selecting and compacting by themselves, of two-stage selection."""
    chosen, taken, scored = policy("snapkv+two-stage"), [], []
    for _ in range(2):
        cache, spent = DynamicCache(config=model.config), 0.0
        scored.clear()

        def look(record) -> None:
            nonlocal spent
            wait()
            start = time.perf_counter()
            scored.append(chosen.score(record, BUDGET))
            wait()
            spent += time.perf_counter() - start

        with capture(model, window=chosen.window, visitor=look):
            forward(model, tokens, cache, last_logits=1)
        wait()
        start = time.perf_counter()
        EvictedCache.compacted(cache, [decision.keep for decision in chosen.decide_all(scored)], consume=True)
        wait()
        taken.append((spent, time.perf_counter() - start))
    return taken[-1]


if __name__ == "__main__":
    main()
