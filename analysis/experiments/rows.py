"""From one layer's capture and decisions to numbers: arrays first, rows of the declared tables at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bounds.audit import audit
from bounds.norms import projected_norms
from bounds.theta import condition, retained_mass
from eviction.select import Decision
from hooks.masks import over_keys
from hooks.records import LayerRecord
from perturbation.output import coupling, output_difference, projected_difference
from perturbation.weights import attention_weights

Choice = tuple[str, float]  # (policy, budget)
NORMS = {"L1": 1.0, "L2": 2.0}


@dataclass(frozen=True)
class QuerySet:
    """A named part of a record's queries: `first` to `last` (exclusive)."""

    name: str
    first: int
    last: int


def window_sets(record: LayerRecord) -> list[QuerySet]:
    """The queries of a prefill's capture."""
    return [QuerySet("window", 0, record.n_queries)]


def decoded_sets(record: LayerRecord) -> list[QuerySet]:
    """The queries of a capture of decoded tokens: the first, and those after it."""
    return [QuerySet("first", 0, 1), QuerySet("later", 1, record.n_queries)]


def layer_rows(
    record: LayerRecord,
    sets: Sequence[QuerySet],
    decisions: Mapping[Choice, Decision],
    seen: int,
    norms: Mapping[str, Tensor] | None = None,
    judged: Sequence[str] = tuple(NORMS),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of `heads` and of `layers` (without context and drift) for one layer, all choices, query sets and norms.

    Decisions are over the prompt's tokens; of the `seen` tokens those beyond were written after it and count as kept. `norms` are
    ‖V W_O‖ per name in `NORMS` for the record's values, where they are at hand; `judged` are those that rows are made in.
    """
    weights, sink_mass = attention_weights(**record.inputs)
    blocks = record.projection_blocks
    keep = torch.stack([over_keys(decision.keep, seen, record.n_keys) for decision in decisions.values()])
    masses = _stage1_masses(weights, sink_mass, decisions, seen)
    difference = output_difference(weights[None], record.values[None], keep, sink_mass[None])
    gate = None if record.gate is None else record.gate[None]
    projected = projected_difference(difference, blocks, record.n_kv_heads, "head", gate)
    heads, layers = [], []
    for norm in judged:
        p = NORMS[norm]
        value_norms = norms[norm] if norms else projected_norms(record.values, blocks, norm=p, gate=record.gate)
        held = audit(
            weights[None], record.values[None], blocks, keep, sink_mass[None], norm=p, value_norms=value_norms[None], gate=gate
        )
        together = projected.sum(-3).norm(p=p, dim=-1)
        moved = projected.norm(p=p, dim=-1).sum(-2) > 0
        ratio = torch.where(moved, coupling(projected, norm=p), torch.nan)  # a row of the table is missing where nothing moved
        for queries in sets:
            part = slice(queries.first, queries.last)
            mean = {
                "perturbation": held.perturbation[..., part].mean(-1),
                "theta": held.theta[..., part].mean(-1),
                "retained_mass": held.retained_mass[..., part].mean(-1),
                "retained_share": held.condition[..., part].double().mean(-1),
                "stage1_mass": masses[..., part].mean(-1),
                "stage1_share": torch.where(masses.isnan(), torch.nan, condition(masses).double())[..., part].mean(-1),
                "violations": held.violation[..., part].sum(-1),
            }
            heads.append(_frame(decisions, {name: _numpy(value[:, 0]) for name, value in mean.items()}, queries.name, norm))
            layer = {"perturbation": together[..., part].mean(-1), "coupling": ratio[..., part].nanmean(-1)}
            layers.append(_frame(decisions, {name: _numpy(value[:, 0]) for name, value in layer.items()}, queries.name, norm))
    per_head = pd.concat(heads, ignore_index=True)
    per_head["layer"] = record.layer
    per_head["kv_head"] = per_head["head"] // record.group
    return per_head, pd.concat(layers, ignore_index=True).assign(layer=record.layer)


def drift_rows(
    full: Sequence[LayerRecord], evicted: Mapping[int, Tensor], choice: Choice, sets: Sequence[QuerySet]
) -> pd.DataFrame:
    """‖h − ĥ‖ / ‖h‖ after each layer, h by a forward pass on the full cache and ĥ (by layer) on the evicted one; mean per query set."""
    policy, budget = choice
    rows = []
    for before in full:
        hidden, changed = (states[0].double().flatten(1) for states in (before.hidden_after, evicted[before.layer]))
        change = changed - hidden
        for norm, p in NORMS.items():
            relative = change.norm(p=p, dim=-1) / hidden.norm(p=p, dim=-1)
            for queries in sets:
                rows.append(
                    {
                        "layer": before.layer,
                        "policy": policy,
                        "budget": budget,
                        "queries": queries.name,
                        "norm": norm,
                        "drift": float(relative[queries.first : queries.last].mean()),
                    }
                )
    return pd.DataFrame(rows)


def _stage1_masses(weights: Tensor, sink_mass: Tensor, decisions: Mapping[Choice, Decision], seen: int) -> Tensor:
    """σ₁ per choice [choices, batch, heads, queries]; NaN where the policy has no stages."""
    masses = [
        torch.full_like(sink_mass, torch.nan)
        if decision.stage1 is None
        else retained_mass(weights, over_keys(decision.stage1, seen, weights.shape[-1]), sink_mass)
        for decision in decisions.values()
    ]
    return torch.stack(masses)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def _frame(decisions: Mapping[Choice, Decision], values: dict[str, np.ndarray], queries: str, norm: str) -> pd.DataFrame:
    """Arrays [choices] or [choices, heads] as rows under their keys."""
    shape = next(iter(values.values())).shape
    choices = list(decisions)
    each = int(np.prod(shape[1:]))
    columns: dict[str, object] = {
        "policy": np.repeat([policy for policy, _ in choices], each),
        "budget": np.repeat([budget for _, budget in choices], each),
        "queries": queries,
        "norm": norm,
    }
    if len(shape) > 1:
        columns["head"] = np.tile(np.arange(each), len(choices))
    frame = pd.DataFrame({**columns, **{name: array.ravel() for name, array in values.items()}})
    if "violations" in frame:
        frame["violations"] = frame["violations"].astype("int64")
    return frame
