"""A context, run once; then each question of it answered on the full cache and on what each policy leaves of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from analysis.experiments.judging import FIELDS, Judging
from analysis.experiments.prompts import Prompt
from analysis.tasks.metrics import Metric, metric
from eviction import EvictedCache, Looked, Policy, look, reading
from eviction.cache.evicted import full_bytes
from hooks.capture import capture
from hooks.forward import forward
from hooks.reference import LoadedModel
from perturbation.divergence import agreement, kl_divergence

Cell = tuple[str, int | float]
"""A policy's name and a budget."""
FULL: Cell = ("full", 1.0)
RIGHT = 0.5
"""The score from which on an answer counts as right."""


@dataclass(frozen=True)
class Full:
    """What the full cache does with a prompt: the tokens that are judged, the logits that foretell them, and what it says."""

    tokens: list[int]
    logits: Tensor
    said: list[int]
    score: float
    judged: Judging


@torch.no_grad()
def answers(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    policies: Mapping[str, Policy],
    cells: Sequence[Cell],
    *,
    judge: int = 8,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """A row for each prompt and cell, that of the full cache first; `prompts` share their context, which is prefilled once.

    Each cell is a compressed cache of its own, on which the question is run and the answer decoded, greedily. The full cache's answer is run
    first, in one pass: as long as the likeliest tokens are the same they are the answer (up to rounding), and decoding goes on from the first that
    is not. That pass gives KL(full ‖ evicted), agreement and log-likelihood of the full cache's answer, or of the reference answer where
    nothing is generated.

    Args:
        loaded: the model.
        prompts: what `prompt` makes of samples, with the same context.
        policies: by the name that rows have.
        cells: names and budgets.
        judge: so many queries of the answer, from the first, are those whose attention outputs are compared; 0 compares none.
        progress: called after each row.

    Raises:
        BudgetError: a budget is outside its range.
        UnsupportedAttention: the model's attention or cache cannot be evicted from, or not by a policy.
    """
    model = loaded.model
    windows = [chosen.window for chosen in policies.values()] or [1]
    window = None if None in windows else max(one for one in windows if one is not None)
    looked = look(model, prompts[0].context.to(model.device), window=window)
    masks = {cell: looked.decide(policies[cell[0]], cell[1]) for cell in cells}
    looked.forget()
    for prompt in prompts:
        full = _full(loaded, looked, prompt, masks, judge)
        yield _row(loaded, prompt, FULL, full, full.said, full.logits, looked.evicted())
        progress()
        for cell in cells:
            cache = looked.evicted(masks[cell])
            row_cache = (cache.nbytes, cache.entries, full_bytes(cache))
            with reading(model) if cache.ragged else nullcontext():
                logits = _foretold(model, cache, prompt, full.tokens)
                said = logits.argmax(-1).tolist()
                if prompt.truth is None:
                    said = _answer(loaded, looked, masks[cell], prompt, full.tokens, said)
            yield _row(loaded, prompt, cell, full, said, logits, row_cache)
            progress()


def _full(loaded: LoadedModel, looked: Looked, prompt: Prompt, masks: Mapping[Cell, Any], judge: int) -> Full:
    model = loaded.model
    if prompt.truth is None:
        tokens = decoded(loaded, looked.evicted(), prompt.opening, prompt.sample.max_new_tokens)
    else:
        tokens = prompt.truth[0].tolist()
    judged = Judging(masks, prompt.length + len(tokens) - 1, min(judge, len(tokens)))
    with capture(model, window=len(tokens), visitor=judged) if judge else nullcontext():
        logits = _foretold(model, looked.evicted(), prompt, tokens)
    said = tokens if prompt.truth is None else logits.argmax(-1).tolist()
    return Full(tokens, logits, said, _score(loaded, prompt, said, tokens), judged)


def _foretold(model: Any, cache: EvictedCache, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
    """The logits that foretell each of `tokens`, which are given to the model after the opening [tokens, vocabulary]."""
    given = torch.cat([prompt.opening, torch.tensor([list(tokens[:-1])], dtype=torch.long)], 1)
    return forward(model, given.to(model.device), cache, last_logits=len(tokens))[0]


def _answer(
    loaded: LoadedModel, looked: Looked, keep: Any, prompt: Prompt, full: Sequence[int], said: Sequence[int]
) -> list[int]:
    """The greedy answer on an evicted cache, given its likeliest tokens after each of the full cache's."""
    same = next((place for place, (one, other) in enumerate(zip(full, said, strict=True)) if one != other), None)
    if same is None:
        return list(full)
    found = [*full[:same], said[same]]
    room = prompt.sample.max_new_tokens - len(found)
    if found[-1] in stops(loaded) or room < 1:
        return found
    opening = torch.cat([prompt.opening, torch.tensor([found], dtype=torch.long)], 1)
    return found + decoded(loaded, looked.evicted(keep), opening, room)


def decoded(loaded: LoadedModel, cache: EvictedCache, opening: Tensor, count: int) -> list[int]:
    """The likeliest tokens after `opening` [1, m] on a cache, one by one, until one that ends an answer (which is among them) or `count`."""
    model, end = loaded.model, stops(loaded)
    given = opening.to(model.device)
    found: list[int] = []
    while len(found) < count:
        given = forward(model, given, cache, last_logits=1).argmax(-1)
        found.append(int(given))
        if found[-1] in end:
            break
    return found


def stops(loaded: LoadedModel) -> set[int]:
    """The tokens that end an answer."""
    configured = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in (*listed, getattr(loaded.tokenizer, "eos_token_id", None)) if token is not None}


def _score(loaded: LoadedModel, prompt: Prompt, said: Sequence[int], tokens: Sequence[int]) -> float:
    if prompt.truth is not None:
        return sum(one == other for one, other in zip(said, tokens, strict=True)) / len(tokens)
    rule: Metric = metric(prompt.metric) if isinstance(prompt.metric, str) else prompt.metric
    return float(rule(_text(loaded, said), prompt.sample))


def _text(loaded: LoadedModel, tokens: Sequence[int]) -> str:
    return loaded.tokenizer.decode(tokens, skip_special_tokens=True)


def _row(
    loaded: LoadedModel,
    prompt: Prompt,
    cell: Cell,
    full: Full,
    said: Sequence[int],
    logits: Tensor,
    cache: Any,
) -> dict[str, Any]:
    held, entries, whole = cache if isinstance(cache, tuple) else (cache.nbytes, cache.entries, cache.nbytes)
    score = _score(loaded, prompt, said, full.tokens)
    likelihoods = logits.double().log_softmax(-1).gather(1, torch.tensor(full.tokens, device=logits.device)[:, None])
    sample = prompt.sample
    nothing = {"perturbation": 0.0, "theta": 0.0, "retained_mass": 1.0, "retained_share": 1.0, "relative_perturbation": 0.0}
    means = full.judged.means(cell)
    if cell == FULL and full.judged.queries:
        means = nothing
    return {
        "task": sample.task,
        "sample": sample.number,
        "length": sample.length,
        "depth": sample.depth,
        "tokens": prompt.context.shape[1],
        "policy": cell[0],
        "budget": float(cell[1]),
        "prediction": _text(loaded, said),
        "answer": "\n".join(sample.answer),
        "score": score,
        "full_score": full.score,
        "flipped": int(full.score >= RIGHT > score),
        "kl": float(kl_divergence(full.logits, logits).mean()),
        "agreement": float(agreement(full.logits, logits).double().mean()),
        "log_likelihood": float(likelihoods.mean()),
        "judged_tokens": len(full.tokens),
        **{name: means[name] for name in FIELDS},
        "entries_kept": float(entries),
        "bytes": int(held),
        "full_bytes": int(whole),
    }
