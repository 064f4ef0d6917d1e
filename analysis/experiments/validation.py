"""One context, validated: prefill once, choose for every policy and budget, then hold each choice against the truth."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import nn

from analysis.ablations import BASE, CANDIDATE
from analysis.experiments.behaviour import by_entry
from analysis.experiments.choices import Choices, choices, others
from analysis.experiments.contexts import Context
from analysis.experiments.kept import allocation_rows, every_choice, kept_rows
from analysis.experiments.rows import NORMS, Choice, QuerySet, decoded_sets, drift_rows, layer_rows, window_sets
from analysis.experiments.selfcheck import SelfCheck, check
from analysis.experiments.single_heads import UNSEARCHED, single_head_rows
from analysis.experiments.timings import timing_rows
from analysis.schema import ALLOCATION, ENTRIES, FULL, HEADS, KEPT, LAYERS, LEAST_L, RUNS, SINGLE, TABLES, TIMINGS
from analysis.settings import ValidationSettings
from bounds.norms import projected_norms
from eviction.cache import EvictedCache, cache_bytes, reading
from eviction.looked import Decisions, Looked, kept_of, look
from eviction.looking import last_query
from eviction.observation import Observation
from eviction.select import Decision
from hooks.capture import capture
from hooks.dispatch import implementations
from hooks.errors import UnsupportedAttention
from hooks.forward import forward, greedy
from hooks.hidden import hidden_states
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
    """The rows of one context by table, what the self-check found on it, and why a table is empty or a policy could not choose."""

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
        UnsupportedAttention: the model's attention or cache cannot be captured, taken apart into heads, or evicted from.
        SelfCheckFailed: capture or eviction does not reproduce this model.
    """
    model = loaded.model
    prompt = context.tokens.to(model.device)
    length = prompt.shape[1]
    chosen = choices(settings).within(length)
    beside = others(settings) if settings.others else {}
    windows = [chosen.policies[name].window or 0 for name, _ in chosen.asked] + [one.window or 0 for one in beside.values()]

    progress("prefill")
    looked = look(model, prompt, window=max(windows))
    prefilled = [seen.record for seen in looked.observations]

    progress("decode")
    tokens = greedy(model, looked.logits.argmax(-1)[:, None], copy.deepcopy(looked.cache), 1 + settings.later)
    with capture(model, window=None) as decoded:
        full_logits = forward(model, tokens, copy.deepcopy(looked.cache))

    progress("self-check")
    kept_all = forward(model, tokens, looked.evicted())
    selfcheck = check([prefilled, decoded], full_logits, kept_all, eager="eager" in implementations(model))
    selfcheck.require()

    progress("truth and bounds")
    heads, layers, decisions = judged_layers(looked, decoded.records, chosen, settings)
    runs = [_run(context, FULL, 1.0, length, cache_bytes(looked.cache), length, 0.0, 1.0)]

    def ran(name: str, budget: float, evicted: EvictedCache, sets: Sequence[QuerySet] = ()) -> None:
        """Run the tokens on an evicted cache; the drift of hidden states is noted for `sets`."""
        held, kept = evicted.nbytes, round(evicted.entries)
        with (
            reading(model) if evicted.ragged else nullcontext(),
            hidden_states(model) if sets else nullcontext() as after,
        ):
            logits = forward(model, tokens, evicted)
        if after is not None:
            drifts.append(drift_rows(decoded.records, after, (name, budget), sets))
        # logits after token i foretell token i + 1; those after the last foretell a token beyond the set
        full, other = full_logits[0, : settings.later], logits[0, : settings.later]
        kl = float(kl_divergence(full, other).mean())
        runs.append(_run(context, name, budget, length, held, kept, kl, float(agreement(full, other).double().mean())))

    drifts: list[pd.DataFrame] = []
    sets = decoded_sets(decoded[0])
    for choice in chosen.asked:
        progress(f"{choice[0]} at {choice[1]:.3g}")
        ran(*choice, looked.evicted(kept_of(decisions[choice])), sets if choice[0] in (BASE, CANDIDATE) else ())
    keys = ["layer", "policy", "budget", "queries", "norm"]
    layers = layers.merge(pd.concat(drifts, ignore_index=True), on=keys, how="left", validate="one_to_one")
    found = {HEADS.name: chosen.in_all_words(heads), LAYERS.name: chosen.in_all_words(layers)}
    refused: dict[str, str] = {}
    attending = [record.layer for record in prefilled]
    if settings.others:
        progress("single heads")
        found[SINGLE.name] = single_head_rows(
            prefilled, (settings.middle_budget,), settings.epsilon, settings.alpha, spaced(attending, SEARCHED)
        )
        progress("other policies")
        shown = settings.middle_budget
        # what the pair keeps is known; the others are decided and run here
        masks = {name: kept_of(decisions[name, shown]) for name in (BASE, CANDIDATE)}
        more, refused = every_choice(looked, beside, settings.budgets, shown, ran)
        masks |= more
        if LEAST_L not in set(found[SINGLE.name]["choice"]):
            refused[LEAST_L] = UNSEARCHED
        pieces = [loaded.tokenizer.decode([one]) for one in prompt[0].tolist()]
        found[ALLOCATION.name] = pd.concat(
            [allocation_rows(name, shown, keep) for name, keep in masks.items()], ignore_index=True
        )
        found[KEPT.name] = pd.concat([kept_rows(name, shown, keep, pieces) for name, keep in masks.items()], ignore_index=True)
    if exact is not None:
        progress("leave-one-out")
        try:
            with torch.enable_grad():
                found[ENTRIES.name] = by_entry(exact, prompt[:, : settings.leave_one_out], spaced(attending, REMOVED))
        except UnsupportedAttention as error:
            refused[ENTRIES.name] = str(error)
    if settings.full:
        progress("timing")
        pair = {**{name: chosen.policies[name] for name in (BASE, CANDIDATE)}, "fisher": others(settings)["fisher"]}
        timed = {name: one for name, one in pair.items() if name not in refused}
        found[TIMINGS.name] = timing_rows(model, prompt, timed, settings.middle_budget, settings.later)
    tables = {name: frame.assign(context=context.name) for name, frame in found.items()}
    tables[RUNS.name] = chosen.in_all_words(pd.DataFrame(runs))
    whole = {table.name: table.checked(tables.get(table.name, pd.DataFrame())) for table in TABLES}
    return ContextResult(whole, selfcheck, refused)


def spaced(layers: Sequence[int], count: int) -> list[int]:
    """`count` of the layers from the first to the last, evenly spaced; all where there are no more."""
    if len(layers) <= count:
        return list(layers)
    return [layers[round(place * (len(layers) - 1) / (count - 1))] for place in range(count)]


def judged_layers(
    looked: Looked, decoded: Sequence[LayerRecord], chosen: Choices, settings: ValidationSettings
) -> tuple[pd.DataFrame, pd.DataFrame, dict[Choice, Decisions]]:
    """Rows of `heads` and `layers` of all choices, by the prompt's last queries and those decoded after it, and what was decided."""
    length = looked.tokens.shape[1]
    norms, observations = [], []
    for seen, after in zip(looked.observations, decoded, strict=True):
        if seen.record.layer != after.layer:
            raise UnsupportedAttention(
                f"layers attend in another order while decoding: {after.name} comes for {seen.record.name}"
            )
        made = {name: projected_norms(after.values, after.projection_blocks, norm=p) for name, p in NORMS.items()}
        # the decoded capture's keys and values begin with the prompt's, unless a sliding window has left some of them behind
        if after.n_keys - after.n_queries == length:
            prompts = {name: norm[..., :length] for name, norm in made.items()}
        else:
            record = seen.record
            prompts = {name: projected_norms(record.values, record.projection_blocks, norm=p) for name, p in NORMS.items()}
        norms.append((prompts, made))
        observations.append(replace(seen, known_norms={p: prompts[name] for name, p in NORMS.items()}))
    looked = replace(looked, observations=observations)
    decisions = {choice: looked.decisions(chosen.policies[choice[0]], choice[1]) for choice in chosen.asked}
    heads, layers = [], []
    for seen, after, (prompts, made) in zip(looked.observations, decoded, norms, strict=True):
        before = last_query(seen.record, settings.window)
        gated = before.gate is not None  # then what an entry writes depends on the query, and truth needs norms of its own
        decided = {choice: _of_heads(seen, decision[before.layer]) for choice, decision in decisions.items()}
        for record, sets, known, tokens in (
            (before, window_sets(before), None if gated else prompts, length),
            (after, decoded_sets(after), None if gated else made, length + after.n_queries),
        ):
            for some, judged in _chunks(chosen):
                per_head, per_layer = layer_rows(
                    record, sets, {choice: decided[choice] for choice in some}, tokens, known, judged
                )
                heads.append(per_head)
                layers.append(per_layer)
    return pd.concat(heads, ignore_index=True), pd.concat(layers, ignore_index=True), decisions


def _of_heads(seen: Observation, decision: Decision | None) -> Decision:
    """A decision for the heads that attend, where the cache holds one for all; what a sliding window drops anyway counts as kept."""
    assert decision is not None
    tokens = decision.keep.shape[-1]
    dropped = torch.arange(tokens, device=decision.keep.device) < tokens - (tokens if seen.held is None else seen.held)
    keep, stage1 = (
        None if mask is None else (mask | dropped).expand(-1, seen.record.n_kv_heads, -1)
        for mask in (decision.keep, decision.stage1)
    )
    assert keep is not None
    return Decision(keep, stage1)


def _chunks(chosen: Choices) -> Iterator[tuple[list[Choice], tuple[str, ...]]]:
    """Choices that are held against the truth at once, and in which norms: the pair in all, variants in L1."""
    for compared, judged in ((True, tuple(NORMS)), (False, ("L1",))):
        some = [choice for choice in chosen.asked if (choice[0] in (BASE, CANDIDATE)) is compared]
        for start in range(0, len(some), CHUNK):
            yield some[start : start + CHUNK], judged


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
