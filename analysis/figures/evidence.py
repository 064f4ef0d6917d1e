"""The figures of what a validation measures beside its pair: ablations, optima, single removals, other policies."""

from collections.abc import Mapping
from functools import partial

import pandas as pd

from analysis.ablations import ABLATIONS
from analysis.figures.ablation import ablation
from analysis.figures.allocation_map import allocation_map
from analysis.figures.bounds_compared import bounds_compared
from analysis.figures.kept_tokens import kept_tokens
from analysis.figures.kl_by_budget import kl_by_budget
from analysis.figures.leave_one_out import leave_one_out
from analysis.figures.optimum_gap import OPTIMA, optimum_gap
from analysis.figures.picture import Picture, panels, query_panels
from analysis.schema import ALLOCATION, ENTRIES, KEPT, POLICIES, QUERY_SETS, RUNS, SINGLE
from analysis.summary import variant_change

MAPPED = ("adakv+two-stage", "fisher")
TOLD = ("snapkv", "snapkv+two-stage", "fisher")
"""Policies whose choice of tokens is shown."""


def ablations(heads: pd.DataFrame, label: str) -> list[Picture]:
    """A figure for each ablation of which there are rows."""
    found = []
    for name, asked in ABLATIONS.items():
        measured = (set(asked.variants.values()) - set(POLICIES)) & set(heads["policy"])
        there = variant_change(heads, asked)
        if asked.lengths is not None or len(measured) < 2 or there.empty:
            continue  # not asked for: the compared pair is always there, and one variant may be another ablation's
        sets = [queries for queries in QUERY_SETS if queries in set(there["queries"])]
        found.append(
            Picture(
                f"ablation_{name}",
                f"Ablation: {name}",
                f"{asked.question} Left of the dashed line a variant perturbs less than {next(iter(asked.variants))}; small points: contexts.",
                query_panels(
                    asked.question,
                    label,
                    sets,
                    lambda ax, queries, last, asked=asked: ablation(heads, asked, queries=queries, ax=ax),  # type: ignore[misc]
                    height=1.7 + 0.32 * max(len(asked.variants), len(asked.budgets or ())),
                ),
            )
        )
    return found


def evidence(tables: Mapping[str, pd.DataFrame], label: str) -> list[Picture]:
    """The figures of the tables beside `heads` and `layers`, of each that has rows."""
    found = []
    runs, single, entries = tables[RUNS.name], tables[SINGLE.name], tables[ENTRIES.name]
    if runs.loc[runs["policy"].isin(POLICIES), "budget"].nunique() > 1:
        found.append(
            Picture(
                "kl_by_budget",
                "What the next tokens lose",
                "A lower line leaves the next-token distribution nearer to the full cache's.",
                panels(
                    "Divergence of the next tokens by cache size",
                    label,
                    [partial(kl_by_budget, runs)],
                    size=(7.5, 4.2),
                ),
            )
        )
    if len(single):
        draws = [partial(bounds_compared, single)]
        found.append(
            Picture(
                "bounds_compared",
                "Two bounds on the truth",
                "Each head of each context under both bounds, in the theory's own setting; the nearer to the dashed line, the tighter.",
                panels("Exact L1 perturbation against θ and θ_ô", label, draws, size=(6.4, 4.6)),
            )
        )
    searched = [column for column, (optimum, *_) in OPTIMA.items() if (single["choice"] == optimum).any()]
    if searched:
        gaps = [partial(optimum_gap, single, column=column) for column in searched]
        found.append(
            Picture(
                "optimum_gap",
                "How far from the best",
                "Each rule's choice over the best one, head by head; at the dashed line a rule is optimal. The gap in L₂ is at least what is "
                "shown.",
                panels("Rules against the optimum, single heads", label, gaps, size=(5.4, 3.4), share=False),
            )
        )
    if len(entries):
        scatters = [
            partial(leave_one_out, entries, estimate=estimate, legend=estimate == "fisher")
            for estimate in ("fisher", "single_eviction", "straight_through", "attention")
        ]
        found.append(
            Picture(
                "leave_one_out",
                "Estimates of a removal against the truth",
                "Each point is a cache entry; a good score orders them as the exact KL does, and one in nats lies on the dashed line.",
                panels("Exact leave-one-out KL against estimates of it", label, scatters, size=(4.3, 4.2), share=True),
            )
        )
    allocation, kept = tables[ALLOCATION.name], tables[KEPT.name]
    maps = [name for name in MAPPED if name in set(allocation["policy"])]
    if maps:
        shown = allocation[allocation["policy"].isin(maps)]
        top = float(100 * (shown["kept"] / shown["tokens"]).max())
        found.append(
            Picture(
                "allocation_map",
                "Where a budget is spent",
                "Darker heads keep more of their entries; a uniform budget would be one shade.",
                panels(
                    "Entries kept by layer and KV head",
                    label,
                    [partial(allocation_map, allocation, policy=name, top=top, bar=name == maps[-1]) for name in maps],
                    size=(4.2, 6),
                    share=True,
                ),
            )
        )
    told = [name for name in TOLD if name in set(kept["policy"])]
    if told:
        found.append(
            Picture(
                "kept_tokens",
                "What was kept, token by token",
                "The first tokens of the first context; the darker the ground, the more of all KV heads keep that token's entry.",
                panels(
                    "Tokens whose entries were kept",
                    label,
                    [partial(kept_tokens, kept, policy=name) for name in told],
                    size=(9, 2.9),
                    down=True,
                ),
            )
        )
    return found
