"""One context, validated: prefill once, choose for every policy and budget, then hold each choice against the truth."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from analysis.ablations import BASE, CANDIDATE
from analysis.experiments.behaviour import by_entry
from analysis.experiments.choices import Choices, choices, others
from analysis.experiments.contexts import Context
from analysis.experiments.kept import Keep, allocation_rows, every_choice, kept_rows
from analysis.experiments.rows import NORMS, Choice, decoded_sets, drift_rows, layer_rows, window_sets
from analysis.experiments.selfcheck import SelfCheck, check
from analysis.experiments.single_heads import single_head_rows
from analysis.experiments.timings import timing_rows
from analysis.schema import ALLOCATION, ENTRIES, FULL, HEADS, KEPT, LAYERS, RUNS, SINGLE, TABLES, TIMINGS
from analysis.settings import ValidationSettings
from bounds.norms import projected_norms
from eviction.cache import EvictedCache, cache_bytes, reading
from eviction.errors import BudgetError
from eviction.looked import look
from eviction.looking import last_query
from eviction.observation import Observation
from eviction.select import Decision
from hooks.capture import capture
from hooks.dispatch import implementations
from hooks.errors import UnsupportedAttention
from hooks.forward import crop, forward, greedy
from hooks.records import LayerRecord
from hooks.reference import LoadedModel
from perturbation.divergence import agreement, kl_divergence

SEARCHED = 3
"""Layers, evenly spaced, whose heads' optima are searched for."""
REMOVED = 5
"""Layers, evenly spaced, whose entries are removed one by one."""
CHUNK = 8
"""Choices that are held against the truth at once."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ContextResult:
    """The rows of one context by table, what the self-check found on it, and why a table is empty that was asked for."""

    tables: dict[str, pd.DataFrame]
    selfcheck: SelfCheck
    refused: dict[str, str] = field(default_factory=dict)


def steps(settings: ValidationSettings) -> int:
    """How often `validate_context` reports progress, at most."""
    return 8 + len(choices(settings).asked)


@torch.no_grad()
def validate_context(
    loaded: LoadedModel,
    context: Context,
    settings: ValidationSettings,
    progress: Progress = lambda step: None,
    exact: nn.Module | None = None,
) -> ContextResult:
    """Rows for one context.

    The prompt is prefilled once, with its last queries captured. The full cache then decodes 1 + `later` tokens greedily; they are fed once
    more, all at once, on the full cache (captured: the queries "first" and "later") and on the evicted cache of every policy and
    budget (hidden-state drift of the compared pair, KL and agreement of the `later` tokens). Variants whose window does not fit the context
    are left out.

    Args:
        loaded: the model.
        context: the prompt.
        settings: what is measured.
        progress: called with what begins.
        exact: the same model in float64, for the removal of single entries; None leaves that out.

    Raises:
        SelfCheckFailed: capture or eviction does not reproduce this model.
    """
    model = loaded.model
    prompt = context.tokens.to(model.device)
    length = prompt.shape[1]
    chosen = choices(settings).within(length)

    progress("prefill")
    cache = DynamicCache(config=model.config)
    EvictedCache.require_support(cache)
    with capture(model, window=max(chosen.policies[name].window or 0 for name, _ in chosen.asked)) as prefilled:
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
    heads, layers, decisions = _layers(prefilled.records, decoded.records, chosen, settings)
    runs = [_run(context, FULL, 1.0, length, cache_bytes(cache), length, 0.0, 1.0)]

    def ran(name: str, budget: float, evicted_logits: Tensor, held: int, kept: int) -> None:
        # logits after token i foretell token i + 1; those after the last foretell a token beyond the set
        full, other = full_logits[0, : settings.later], evicted_logits[0, : settings.later]
        kl = float(kl_divergence(full, other).mean())
        runs.append(_run(context, name, budget, length, held, kept, kl, float(agreement(full, other).double().mean())))

    drifts = []
    sets = decoded_sets(decoded[0])
    for choice in chosen.asked:
        progress(f"{choice[0]} at {choice[1]:.3g}")
        evicted = EvictedCache.compacted(cache, [layer[choice].keep for layer in decisions])
        held, kept = evicted.nbytes, round(evicted.entries)
        if choice[0] in (BASE, CANDIDATE):
            with capture(model, window=None) as after:
                evicted_logits = forward(model, tokens, evicted)
            drifts.append(drift_rows(decoded.records, after.records, choice, sets))
        else:
            evicted_logits = forward(model, tokens, evicted)
        ran(*choice, evicted_logits, held, kept)
    keys = ["layer", "policy", "budget", "queries", "norm"]
    layers = layers.merge(pd.concat(drifts, ignore_index=True), on=keys, how="left", validate="one_to_one")
    found = {HEADS.name: chosen.in_all_words(heads), LAYERS.name: chosen.in_all_words(layers)}
    refused: dict[str, str] = {}
    if settings.others:
        progress("single heads")
        found[SINGLE.name] = single_head_rows(
            prefilled.records,
            (settings.middle_budget,),
            settings.epsilon,
            settings.alpha,
            spaced(len(prefilled.records), SEARCHED),
        )
        progress("other policies")

        def judged(name: str, budget: float, evicted: EvictedCache) -> None:
            held, kept = evicted.nbytes, round(evicted.entries)
            with reading(model):
                ran(name, budget, forward(model, tokens, evicted), held, kept)

        try:
            asked, shown = others(settings), settings.middle_budget
            looked = look(model, prompt, window=max(one.window or 0 for one in asked.values()))
            # what the pair keeps is known; the others are decided and run here
            masks = {name: by_layer(prefilled.records, decisions, (name, shown)) for name in (BASE, CANDIDATE)}
            masks |= every_choice(looked, asked, settings.budgets, shown, judged)
            pieces = [loaded.tokenizer.decode([one]) for one in prompt[0].tolist()]
            found[ALLOCATION.name] = pd.concat(
                [allocation_rows(name, shown, keep) for name, keep in masks.items()], ignore_index=True
            )
            found[KEPT.name] = pd.concat(
                [kept_rows(name, shown, keep, pieces) for name, keep in masks.items()], ignore_index=True
            )
        except (UnsupportedAttention, BudgetError) as error:
            refused[ALLOCATION.name] = refused[KEPT.name] = str(error)
    if exact is not None:
        progress("leave-one-out")
        try:
            with torch.enable_grad():
                found[ENTRIES.name] = by_entry(
                    exact, prompt[:, : settings.leave_one_out], spaced(len(prefilled.records), REMOVED)
                )
        except UnsupportedAttention as error:
            refused[ENTRIES.name] = str(error)
    if settings.full:
        progress("timing")
        pair = {**{name: chosen.policies[name] for name in (BASE, CANDIDATE)}, "fisher": others(settings)["fisher"]}
        found[TIMINGS.name] = timing_rows(model, prompt, pair, settings.middle_budget, settings.later)
    tables = {name: frame.assign(context=context.name) for name, frame in found.items()}
    tables[RUNS.name] = chosen.in_all_words(pd.DataFrame(runs))
    whole = {table.name: table.checked(tables.get(table.name, pd.DataFrame())) for table in TABLES}
    return ContextResult(whole, selfcheck, refused)


def by_layer(records: list[LayerRecord], decisions: list[dict[Choice, Decision]], choice: Choice) -> Keep:
    """What a choice keeps, for each decoder layer; None for one without attention."""
    keep = {record.layer: decided[choice].keep for record, decided in zip(records, decisions, strict=True)}
    return tuple(keep.get(layer) for layer in range(max(keep) + 1))


def spaced(layers: int, count: int) -> list[int]:
    """`count` layers from the first to the last, evenly spaced; all where there are no more."""
    if layers <= count:
        return list(range(layers))
    return [round(place * (layers - 1) / (count - 1)) for place in range(count)]


def _layers(
    prefilled: list[LayerRecord], decoded: list[LayerRecord], chosen: Choices, settings: ValidationSettings
) -> tuple[pd.DataFrame, pd.DataFrame, list[dict[Choice, Decision]]]:
    """Decisions of every layer, and the rows of both captures under them."""
    heads, layers, decisions = [], [], []
    for wide, after in zip(prefilled, decoded, strict=True):
        before = last_query(wide, settings.window)
        # the decoded capture's keys and values begin with the prompt's: norms are made once, for all of them
        norms = {name: projected_norms(after.values, after.projection_blocks, norm=p) for name, p in NORMS.items()}
        prompt_norms = {name: norm[..., : before.n_keys] for name, norm in norms.items()}
        gated = before.gate is not None  # then what an entry writes depends on the query, and truth needs norms of its own
        decided = _decide(wide, prompt_norms, chosen)
        decisions.append(decided)
        for record, sets, known in (
            (before, window_sets(before), None if gated else prompt_norms),
            (after, decoded_sets(after), None if gated else norms),
        ):
            for some, judged in _chunks(chosen):
                per_head, per_layer = layer_rows(record, sets, {choice: decided[choice] for choice in some}, known, judged)
                heads.append(per_head)
                layers.append(per_layer)
    return pd.concat(heads, ignore_index=True), pd.concat(layers, ignore_index=True), decisions


def _chunks(chosen: Choices) -> Iterator[tuple[list[Choice], tuple[str, ...]]]:
    """Choices that are held against the truth at once, and in which norms: the pair in all, variants in L1."""
    for compared, judged in ((True, tuple(NORMS)), (False, ("L1",))):
        some = [choice for choice in chosen.asked if (choice[0] in (BASE, CANDIDATE)) is compared]
        for start in range(0, len(some), CHUNK):
            yield some[start : start + CHUNK], judged


def _decide(record: LayerRecord, norms: Mapping[str, Tensor], chosen: Choices) -> dict[Choice, Decision]:
    known = {p: norms[name] for name, p in NORMS.items()}
    seen: dict[int, Observation] = {}
    decided = {}
    for name, budget in chosen.asked:
        policy = chosen.policies[name]
        window = policy.window or 1
        if window not in seen:
            seen[window] = Observation(last_query(record, window), known)
        decided[name, budget] = policy.decide(seen[window], budget)
    return decided


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
