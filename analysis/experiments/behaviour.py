"""Exact against estimated: what an entry's removal does to the next token, and what policies' choices do to the tokens that follow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from analysis.errors import InputError
from analysis.statistics import recall
from eviction import Policy, policy
from eviction.looked import look
from eviction.observation import Observation
from eviction.signs import Asked
from eviction.signs import Path as Along
from perturbation.leave_one_out import Progress, leave_one_out
from perturbation.output import Level
from perturbation.removal import Removals
from perturbation.single import single_eviction_error

RIVALS = ("attention", "value_norm", "single_eviction", "straight_through", "straight_through_layer")
ALONG: dict[str, Along] = {"fisher": "model", "straight_through": "residual", "straight_through_layer": "layer"}


def passages(tokenizer: Any, count: int, length: int, *, repeats: bool = False) -> list[Tensor]:
    """`count` disjoint passages of `length` tokens [1, length] of Python's documentation, evenly spaced.

    Its topics repeat each other's sections word for word, and a model copies what it reads a second time: each paragraph is taken once, unless
    `repeats` are wanted.

    Raises:
        InputError: there is not as much text.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            paragraphs.setdefault(str(len(paragraphs)) if repeats else " ".join(paragraph.split()), paragraph)
    tokens = tokenizer("\n\n".join(paragraphs.values()), return_tensors="pt").input_ids[0]
    step = len(tokens) // count
    if step < length:
        raise InputError(f"{count} passages of {length} tokens are more than the {len(tokens)} tokens of text that there are")
    return [tokens[None, place * step : place * step + length] for place in range(count)]


def estimated(model: nn.Module, tokens: Tensor, signs: int = 8, seed: int = 0) -> dict[str, list[Tensor]]:
    """What ranks the entries before the last token of a prompt [1, tokens], by the last query alone.

    By name, for each layer [KV heads, entries].

    `attention` A and `value_norm` A‖V W_O‖₁ (group means), `single_eviction` ‖Σ_h A/(1 − A)(o − ν)‖₂; the KL in nats by `fisher`, by
    `straight_through` (what lies above the attention output taken as the identity) and `straight_through_layer` (only the layers above).
    """
    looked = look(model, tokens, window=1)
    found: dict[str, list[Tensor]] = {}

    def add(name: str, scores: Tensor) -> None:
        found.setdefault(name, []).append(scores[0, :, :-1])

    for seen in looked.observations:
        add("attention", seen.grouped(seen.window_mean(1)))
        add("value_norm", seen.grouped(seen.window_mean(1) * seen.norms()))
        add("single_eviction", _single(seen))
    for name, along in ALONG.items():
        nats = looked.nats(Asked(signs, seed, along), 1)
        for call in looked.calls:
            add(name, nats[call])
    return found


def _single(seen: Observation) -> Tensor:
    record = seen.record
    level: Level = "group" if seen.n_kv_heads == record.n_kv_heads else "layer"  # one latent entry is what all heads read
    found = single_eviction_error(seen.weights, record.values, record.projection_blocks, seen.sink_mass, norm=2, level=level)
    return found[:, :, 0]


def by_entry(
    model: nn.Module,
    tokens: Tensor,
    layers: Sequence[int],
    *,
    signs: int = 8,
    save: str | Path | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Exact leave-one-out KL of the last query of a prompt [1, tokens], and what each estimate says: a row for each entry of each KV head.

    Columns: `layer`, `kv_head`, `entry`, `exact` (nats), and one for each of `estimated`. Give a model in float64.
    """
    exact = leave_one_out(Removals.of(model, tokens[:, :-1], tokens[:, -1:]), layers, save=save, progress=progress)
    found = estimated(model, tokens, signs)
    parts = []
    for layer in layers:
        truth = exact[layer][..., 0]
        heads, entries = (axis.flatten().numpy() for axis in torch.meshgrid(*map(torch.arange, truth.shape), indexing="ij"))
        guesses = {name: scores[layer].flatten().double().cpu().numpy() for name, scores in found.items()}
        parts.append(
            pd.DataFrame({"layer": layer, "kv_head": heads, "entry": entries, "exact": truth.flatten().numpy(), **guesses})
        )
    return pd.concat(parts, ignore_index=True)


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    """`by_entry`'s estimates against the exact KL: a row for each layer and estimate.

    Columns: `layer`, `estimate`, `spearman` (over all entries of all KV heads), `recall20` (the share of the exact top 20 % in the estimate's),
    and `nats`, the median of the estimate over the exact KL (NaN for what is not in nats).
    """
    found = []
    for layer, part in rows.groupby("layer"):
        truth = part["exact"].to_numpy()
        for name in (*ALONG, *(one for one in RIVALS if one not in ALONG)):
            guess = part[name].to_numpy()
            found.append(
                {
                    "layer": layer,
                    "estimate": name,
                    "spearman": float(spearmanr(truth, guess)[0]),
                    "recall20": recall(truth, guess),
                    "nats": float(np.median(guess / truth)) if name in ALONG else float("nan"),
                }
            )
    return pd.DataFrame(found)


def what_follows(
    model: nn.Module,
    prompt: Tensor,
    following: Tensor,
    policies: Mapping[str, Policy],
    budgets: Sequence[int | float],
    progress: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """What each policy's choice at each budget, after one prefill, does to the teacher-forced tokens that follow.

    Columns: `policy`, `budget`, and the means over those tokens of `Behaviour` (`kl`, `reverse_kl`, `total_variation`, `agreement`,
    `log_likelihood`). The prefill is run once for all; full attention only.
    """
    windows = [chosen.window for chosen in policies.values()]
    window = None if None in windows else max(one for one in windows if one is not None)
    looked = look(model, prompt, window=window)
    removals = Removals.of(model, prompt, following)
    rows = []
    for name, chosen in policies.items():
        for budget in budgets:
            keep = {layer: mask for layer, mask in enumerate(looked.decide(chosen, budget)) if mask is not None}
            found = {key: float(value.double().mean()) for key, value in asdict(removals.without(keep)).items()}
            rows.append({"policy": name, "budget": budget, **found})
            progress()
    return pd.DataFrame(rows)


def rivals() -> dict[str, Policy]:
    """The policies that the behaviour score is compared with."""
    return {
        "snapkv-max": policy("snapkv"),
        "snapkv-none": policy("snapkv", pooling="none"),
        "two-stage-max": policy("snapkv+two-stage"),
        "two-stage-none": policy("snapkv+two-stage", pooling="none"),
        "adakv+two-stage-max": policy("adakv+two-stage"),
        "adakv+two-stage-none": policy("adakv+two-stage", pooling="none"),
        "start-recent": policy("start-recent"),
        "random": policy("random"),
    }
