"""What capture costs: a 4,096-token prefill of the reference model with a 32-query capture of every layer, over a plain one.

`capture_over_prefill`: ratio of times (target: at most 1.10). `capture_peak_layers`: memory that the capture adds at its peak,
counted by the allocator, in layers of K and V (target: below 2).
"""

from pydoc_data.topics import topics

import torch
from _pairs import THREADS, arguments, finish, median_ratio, peak_bytes
from transformers.cache_utils import DynamicCache

from hooks import capture, load
from hooks.forward import forward

TOKENS, WINDOW = 4096, 32


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(THREADS)
    loaded = load()
    tokens = loaded.tokenizer("\n".join(topics.values()), return_tensors="pt").input_ids[:, :TOKENS]

    @torch.inference_mode()
    def plain() -> None:
        forward(loaded.model, tokens, DynamicCache(config=loaded.model.config), last_logits=1)

    @torch.inference_mode()
    def captured() -> None:
        with capture(loaded.model, window=WINDOW):
            forward(loaded.model, tokens, DynamicCache(config=loaded.model.config), last_logits=1)

    ratio = median_ratio(captured, plain, options.pairs, options.json)
    config = loaded.model.config
    layer = 2 * config.num_key_value_heads * TOKENS * config.head_dim * 4
    added = peak_bytes(captured) - peak_bytes(plain)
    finish(
        {
            "capture_over_prefill": ratio["median"],
            "low": ratio["low"],
            "high": ratio["high"],
            "capture_peak_layers": added / layer,
            "prefill_s": ratio["base_s"],
            "tokens": TOKENS,
            "window": WINDOW,
            "pairs": options.pairs,
            "threads": THREADS,
        }
    )


if __name__ == "__main__":
    main()
