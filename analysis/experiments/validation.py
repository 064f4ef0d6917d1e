"""One context, validated: prefill once, choose for every policy and budget, then hold each choice against the truth."""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from transformers.cache_utils import DynamicCache

from analysis.experiments.contexts import Context
from analysis.experiments.rows import NORMS, Choice, decoded_sets, drift_rows, layer_rows, window_sets
from analysis.experiments.selfcheck import SelfCheck, check
from analysis.settings import ValidationSettings
from bounds.norms import projected_norms
from eviction.accumulate import SnapKV
from eviction.cache import EvictedCache, cache_bytes
from eviction.observation import Observation
from eviction.policy import Policy
from eviction.select import Decision, TwoStage
from hooks.capture import capture
from hooks.dispatch import implementations
from hooks.forward import crop, forward, greedy
from hooks.records import Capture, LayerRecord
from hooks.reference import LoadedModel
from perturbation.divergence import agreement, kl_divergence

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ContextResult:
    """The rows of one context, and what the self-check found on it."""

    heads: pd.DataFrame
    layers: pd.DataFrame
    runs: pd.DataFrame
    selfcheck: SelfCheck


def policies(settings: ValidationSettings) -> tuple[Policy, Policy]:
    """The two policies that a validation compares: equal but for the selection."""
    accumulate = SnapKV(settings.window, settings.kernel, settings.pooling)  # type: ignore[arg-type]
    return (
        Policy("snapkv", accumulate),
        Policy("snapkv+two-stage", accumulate, select=TwoStage(settings.alpha, settings.epsilon)),
    )


def steps(settings: ValidationSettings) -> int:
    """How often `validate_context` reports progress."""
    return 4 + 2 * len(settings.budgets)


@torch.inference_mode()
def validate_context(
    loaded: LoadedModel, context: Context, settings: ValidationSettings, progress: Progress = lambda step: None
) -> ContextResult:
    """Rows for one context.

    The prompt is prefilled once, with its last `window` queries captured. The full cache then decodes 1 + `later` tokens
    greedily; they are fed once more, all at once, on the full cache (captured: the queries "first" and "later") and
    on the evicted cache of every policy and budget (hidden-state drift, KL and agreement of the `later` tokens).

    Raises:
        SelfCheckFailed: capture or eviction does not reproduce this model.
    """
    model = loaded.model
    prompt = context.tokens.to(model.device)
    length = prompt.shape[1]

    progress("prefill")
    cache = DynamicCache(config=model.config)
    EvictedCache.require_support(cache)
    with capture(model, window=settings.window) as prefilled:
        logits = forward(model, prompt, cache, last_logits=1)

    progress("decode")
    tokens = greedy(model, logits.argmax(-1), cache, 1 + settings.later)
    crop(cache, length)
    with capture(model, window=None) as decoded:
        full_logits = forward(model, tokens, cache)
    crop(cache, length)

    progress("self-check")
    everything = [torch.ones_like(record.keys[..., :length, 0], dtype=torch.bool) for record in prefilled]
    kept_all = forward(model, tokens, EvictedCache.compacted(cache, everything))
    selfcheck = check([prefilled, decoded], full_logits, kept_all, eager="eager" in implementations(model))
    selfcheck.require()

    progress("truth and bounds")
    heads, layers, decisions = _layers(prefilled, decoded, settings)
    runs = [_run(context, "full", 1.0, length, cache_bytes(cache), length, 0.0, 1.0)]
    drifts = []
    sets = decoded_sets(decoded[0])
    for choice in decisions[0]:
        progress(f"{choice[0]} at {choice[1]:.0%}")
        evicted = EvictedCache.compacted(cache, [layer[choice].keep for layer in decisions])
        held, kept = evicted.nbytes, round(evicted.entries)
        with capture(model, window=None) as after:
            evicted_logits = forward(model, tokens, evicted)
        drifts.append(drift_rows(decoded.records, after.records, choice, sets))
        # logits after token i foretell token i + 1; those after the last foretell a token beyond the set
        full, other = full_logits[0, : settings.later], evicted_logits[0, : settings.later]
        kl = float(kl_divergence(full, other).mean())
        agreed = float(agreement(full, other).double().mean())
        runs.append(_run(context, *choice, length, held, kept, kl, agreed))
    keys = ["layer", "policy", "budget", "queries", "norm"]
    layers = layers.merge(pd.concat(drifts, ignore_index=True), on=keys, how="left", validate="one_to_one")
    return ContextResult(heads.assign(context=context.name), layers.assign(context=context.name), pd.DataFrame(runs), selfcheck)


def _layers(
    prefilled: Capture, decoded: Capture, settings: ValidationSettings
) -> tuple[pd.DataFrame, pd.DataFrame, list[dict[Choice, Decision]]]:
    """Decisions of every layer, and the rows of both captures under them."""
    heads, layers, decisions = [], [], []
    for before, after in zip(prefilled, decoded, strict=True):
        # the decoded capture's keys and values begin with the prompt's: norms are made once, for all of them
        norms = {name: projected_norms(after.values, after.projection_blocks, norm=p) for name, p in NORMS.items()}
        prompt_norms = {name: norm[..., : before.n_keys] for name, norm in norms.items()}
        gated = before.gate is not None  # then what an entry writes depends on the query, and truth needs norms of its own
        decided = _decide(before, prompt_norms["L1"], settings)
        decisions.append(decided)
        for record, sets, known in (
            (before, window_sets(before), None if gated else prompt_norms),
            (after, decoded_sets(after), None if gated else norms),
        ):
            per_head, per_layer = layer_rows(record, sets, decided, known)
            heads.append(per_head)
            layers.append(per_layer)
    return pd.concat(heads, ignore_index=True), pd.concat(layers, ignore_index=True), decisions


def _decide(record: LayerRecord, norms: torch.Tensor, settings: ValidationSettings) -> dict[Choice, Decision]:
    seen = Observation(record, {1: norms})
    return {(policy.name, budget): policy.decide(seen, budget) for policy in policies(settings) for budget in settings.budgets}


def _run(
    context: Context, policy: str, budget: float, tokens: int, held: int, kept: int, kl: float, agreed: float
) -> dict[str, object]:
    return {
        "context": context.name,
        "policy": policy,
        "budget": budget,
        "tokens": tokens,
        "kl": kl,
        "agreement": agreed,
        "entries_kept": kept,
        "bytes": held,
    }
