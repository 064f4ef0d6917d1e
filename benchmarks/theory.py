"""What truth and bounds cost, and how tight the bounds are, on the reference model.

`analysis_over_prefill`: exact L, θ and σ for 2 rankings x 20 budgets x 32 queries x every head and layer of a captured context
of 4,096 tokens, over one prefill of the same context (target: at most 0.5). `norms_over_matmul`: ‖V W_O‖₁ of one layer over
the bare product of the same size into a buffer allocated before (target: at most 1.4), with `norms_extra_blocks`, the memory
that it takes beyond its result in blocks of ν (target: 1). `l1_over_gram_l2`: the same norms in L1 over those in L2 without
projecting (target: at least 4). `theta_over_l` and `centred_over_l`: medians of θ / L and θ_ô / L over all heads at 20 % cache,
the query's own attention, 4 contexts of 1,024 tokens; `violations` of L ≤ θ_ô ≤ Σ_E A‖ν‖ + (1 − σ)‖ô‖ ≤ θ among them.
"""

import statistics
import sys
from pydoc_data.topics import topics

import torch
from _pairs import THREADS, arguments, finish, median_ratio, peak_bytes
from transformers.cache_utils import DynamicCache

from analysis.experiments.contexts import texts, tokenised
from analysis.settings import ValidationSettings
from bounds import audit, audit_curve, projected_norms
from bounds.norms import BLOCK
from hooks import capture, load
from hooks.forward import forward
from hooks.records import LayerRecord
from perturbation import attention_weights, ranking

TOKENS, WINDOW, BUDGETS = 4096, 32, 20


def judge(record: LayerRecord) -> int:
    """Exact L, θ and σ of two rankings, by attention and by A‖ν‖, at 20 budgets."""
    weights, sink_mass = attention_weights(**record.inputs)
    norms = projected_norms(record.values, record.projection_blocks)
    per_kv_head = (1, record.n_kv_heads, record.group)
    mean = weights.mean(2)
    scores = torch.stack([mean.view(*per_kv_head, -1).mean(2), (mean * norms[:, :, 0]).view(*per_kv_head, -1).mean(2)])
    budgets = [round((number + 1) / BUDGETS * record.n_keys) for number in range(BUDGETS)]
    found = audit_curve(
        weights[None],
        record.values[None],
        record.projection_blocks,
        ranking(scores),
        budgets,
        sink_mass[None],
        value_norms=norms[None],
    )
    assert found.perturbation.shape == (BUDGETS, 2, 1, record.n_heads, record.n_queries)
    return found.violations


def speed(loaded, options) -> dict[str, float]:
    tokens = loaded.tokenizer("\n".join(topics.values()), return_tensors="pt").input_ids[:, :TOKENS]

    @torch.inference_mode()
    def prefill() -> None:
        forward(loaded.model, tokens, DynamicCache(config=loaded.model.config), last_logits=1)

    with torch.inference_mode(), capture(loaded.model, window=WINDOW) as captured:
        forward(loaded.model, tokens, DynamicCache(config=loaded.model.config), last_logits=1)

    @torch.inference_mode()
    def analysis() -> None:
        broken = sum(judge(record) for record in captured)
        assert broken == 0, f"{broken} violations"

    whole = median_ratio(analysis, prefill, options.pairs, options.json)

    record = captured[len(captured) // 2]
    values, blocks = record.values.contiguous(), record.projection_blocks.contiguous()
    spread = values[:, :, None].expand(-1, -1, record.group, -1, -1).flatten(1, 2)[0].contiguous()
    buffer = torch.empty(record.n_heads, record.n_keys, blocks.shape[-1])

    @torch.inference_mode()
    def product() -> None:
        torch.bmm(spread, blocks, out=buffer)

    @torch.inference_mode()
    def norms() -> torch.Tensor:
        return projected_norms(values, blocks)

    @torch.inference_mode()
    def gram() -> torch.Tensor:
        return projected_norms(values, blocks, norm=2)

    repeat = max(options.pairs, 15)
    over = median_ratio(norms, product, repeat, True)
    saved = median_ratio(norms, gram, repeat, True)
    extra = (peak_bytes(norms) - record.n_heads * record.n_keys * 4) / (record.n_heads * BLOCK * blocks.shape[-1] * 4)
    return {
        "analysis_over_prefill": whole["median"],
        "analysis_low": whole["low"],
        "analysis_high": whole["high"],
        "prefill_s": whole["base_s"],
        "norms_over_matmul": over["median"],
        "norms_low": over["low"],
        "norms_high": over["high"],
        "norms_extra_blocks": extra,
        "l1_over_gram_l2": saved["median"],
    }


@torch.inference_mode()
def tightness(loaded, quiet: bool) -> dict[str, float]:
    settings = ValidationSettings()
    theta, centred, broken, half = [], [], 0, []
    for text in texts(settings):
        context = tokenised(text, loaded.tokenizer, settings, None)
        with capture(loaded.model, window=1) as captured:
            loaded.model(context.tokens, logits_to_keep=1)
        for record in captured:
            weights, sink_mass = attention_weights(**record.inputs)
            # each query head by itself, as the theory has it: its own mask over its own copy of the values
            values = record.values.repeat_interleave(record.group, 1)
            order = ranking(weights[:, :, 0])
            keep = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., : round(0.2 * record.n_keys)], True)
            found = audit(weights, values, record.projection_blocks, keep, sink_mass, centred=True)
            broken += found.violations
            theta += (found.theta / found.perturbation).flatten().tolist()
            centred += (found.theta_o_hat / found.perturbation).flatten().tolist()
            half += found.condition.flatten().tolist()
        if not quiet:
            print(f"{context.name}: median θ / L {statistics.median(theta):.2f} so far", file=sys.stderr)
    return {
        "theta_over_l": statistics.median(theta),
        "centred_over_l": statistics.median(centred),
        "violations": broken,
        "heads": len(theta),
        "condition_share": statistics.mean(half),
    }


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(THREADS)
    loaded = load()
    figures = tightness(loaded, options.json)
    finish({**figures, **speed(loaded, options), "tokens": TOKENS, "pairs": options.pairs, "threads": THREADS})


if __name__ == "__main__":
    main()
