"""The theory's own setting: one query, its own attention, each query head with entries of its own. What rules choose, and the optima."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import floor

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.schema import LEAST_L
from bounds import audit, branch_and_bound, dinkelbach, local_search, projected_distances, projected_norms
from eviction.looking import last_query
from hooks.masks import seen
from hooks.records import LayerRecord
from perturbation import perturbation
from perturbation.output import attention_output
from perturbation.weights import attention_weights

NORMS = {"L1": 1.0, "L2": 2.0}
NODES = 200
"""Of the search for the least θ: most heads are proved optimal in fewer, and all have a certified lower bound."""
EXCHANGES = 100
"""Of the search for the least L2 error, which starts from the best of the rules."""
SEARCHABLE = 4_096
"""Entries up to which that search is made: it needs memory for each pair of them."""
UNSEARCHED = f"the search for the least error is left out over more than {SEARCHABLE:,} entries, and where attention is gated"


def single_head_rows(
    records: Sequence[LayerRecord], budgets: Sequence[float], epsilon: float, alpha: float, searched: Sequence[int]
) -> pd.DataFrame:
    """Rows of the table `single` of one prompt, by its last query.

    Args:
        records: of a prefill, one for each layer; batch 1.
        budgets: shares of the entries.
        epsilon: of two-stage selection.
        alpha: of two-stage selection.
        searched: layers whose least errors are searched for.
    """
    parts = [_layer(_within_reach(last_query(record)), budgets, epsilon, alpha, record.layer in searched) for record in records]
    return pd.concat(parts, ignore_index=True)


def _within_reach(record: LayerRecord) -> LayerRecord:
    """The record with the keys that its query sees: all, but under a sliding window."""
    visible = seen(record.mask)[0].any(0).any(0)
    if bool(visible.all()):
        return record
    return replace(record, keys=record.keys[:, :, visible], values=record.values[:, :, visible], mask=record.mask[..., visible])


def _layer(record: LayerRecord, budgets: Sequence[float], epsilon: float, alpha: float, search: bool) -> pd.DataFrame:
    weights, sink_mass = attention_weights(**record.inputs)
    values = record.values.repeat_interleave(record.group, 1)
    blocks, gate = record.projection_blocks, record.gate
    outputs = attention_output(weights, values)
    norms = {name: projected_norms(values, blocks, norm=p, gate=gate)[:, :, 0] for name, p in NORMS.items()}
    apart = projected_distances(values, blocks, outputs, norm=1, gate=gate)[:, :, 0]
    attention = weights[:, :, 0]
    rows = []
    for budget in budgets:
        count = max(round(budget * record.n_keys), 1)
        keeps = _rules(attention, norms["L1"], apart, sink_mass[:, :, 0], count, epsilon, alpha)
        lower = {}
        if search:
            least = branch_and_bound(attention, norms["L1"], count, sink_mass[:, :, 0], nodes=NODES)
            keeps["least θ"], lower["least θ"] = least.keep, least.lower
            if gate is None and record.n_keys <= SEARCHABLE:
                best = _best(weights, values, blocks, keeps, sink_mass)
                keeps[LEAST_L] = local_search(weights, values, blocks, best, sink_mass, exchanges=EXCHANGES).keep
        for norm, p in NORMS.items():
            found = audit(
                weights[None],
                values[None],
                blocks,
                torch.stack(list(keeps.values())),
                sink_mass[None],
                norm=p,
                value_norms=norms[norm][None, :, :, None],
                gate=None if gate is None else gate[None],
                centred=True,
            )
            assert found.theta_o_hat is not None
            columns = {
                "perturbation": found.perturbation,
                "theta": found.theta,
                "theta_o_hat": found.theta_o_hat,
                "retained_mass": found.retained_mass,
                "violations": found.violation,
            }
            rows.append(_frame(list(keeps), {name: value[:, 0, :, 0] for name, value in columns.items()}, budget, norm))
            rows[-1]["lower"] = np.nan
            for name, value in lower.items():
                if norm == "L1":
                    rows[-1].loc[rows[-1]["choice"] == name, "lower"] = value[0].cpu().numpy()
    return pd.concat(rows, ignore_index=True).assign(layer=record.layer)


def _rules(
    attention: Tensor, norms: Tensor, apart: Tensor, sink_mass: Tensor, count: int, epsilon: float, alpha: float
) -> dict[str, Tensor]:
    first = floor(Fraction(str(alpha)) * count)  # exactly: 0.3 of 10 is 3
    stage1 = _top(attention, first)

    def two_stages(added: float) -> Tensor:
        return stage1 | _top(((attention + added) * norms).masked_fill(stage1, -1), count - first)

    return {
        "attention": _top(attention, count),
        "norm": _top(attention * norms, count),
        "two-stage": two_stages(epsilon),
        "two-stage, ε = 0": two_stages(0),
        "centred": _top(attention * apart, count),
        "ratio": dinkelbach(attention, apart, count, sink_mass).keep,
    }


def _best(weights: Tensor, values: Tensor, blocks: Tensor, keeps: Mapping[str, Tensor], sink_mass: Tensor) -> Tensor:
    """For each head the choice of least L2 error; of equals the earlier."""
    choices = torch.stack(list(keeps.values()))  # [choices, batch, heads, keys]
    errors = perturbation(weights[None], values[None], blocks, choices, sink_mass[None], norm=2)[..., 0]
    return choices.take_along_dim(errors.argmin(0)[None, ..., None], 0)[0]


def _top(scores: Tensor, count: int) -> Tensor:
    """The `count` highest; of equals the earlier."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)


def _frame(names: Sequence[str], values: Mapping[str, Tensor], budget: float, norm: str) -> pd.DataFrame:
    heads = next(iter(values.values())).shape[1]
    frame = pd.DataFrame({name: value.double().cpu().numpy().ravel() for name, value in values.items()})
    frame["violations"] = frame["violations"].astype("int64")
    return frame.assign(choice=np.repeat(names, heads), head=np.tile(np.arange(heads), len(names)), budget=budget, norm=norm)
