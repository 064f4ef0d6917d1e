"""A context, run once; then each question of it answered on the full cache and on what each policy leaves of it."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analysis import schema
from analysis.experiments.judging import FIELDS, UNTOUCHED, Judging, Masks
from analysis.experiments.judging import Choice as Cell
from analysis.experiments.prompts import Prompt
from analysis.tasks.metrics import metric
from eviction import EvictedCache, Policy, look, reading
from eviction.cache.evicted import full_bytes
from hooks.capture import capture
from hooks.forward import forward
from hooks.reference import LoadedModel
from perturbation.divergence import agreement, kl_divergence

FULL: Cell = (schema.FULL, 1.0)


@dataclass(frozen=True)
class Full:
    """What the full cache does with a prompt: the tokens that are judged, the logits that foretell them, and what it says."""

    tokens: list[int]
    logits: Float[Tensor, "tokens vocabulary"]
    said: list[int]
    score: float
    judging: Judging


class Answering:
    """One prefill of a context, on which any number of prompts are answered under any number of policies and budgets.

    Each cell is a compressed cache of its own, on which the question is run and the answer decoded, greedily, whatever other cells there
    are. The full cache's answer is run first, in one pass: as long as the likeliest tokens are the same they are the answer (up to
    rounding, in a model that sees the same in one pass as token by token), and decoding goes on from the first that is not. That pass gives
    KL(full ‖ evicted), agreement and log-likelihood of the full cache's answer, or of the reference answer where nothing is generated.

    Args:
        loaded: the model.
        context: tokens [1, n].
        policies: all that may be asked for, by the name that rows have; what is captured depends on them.
        cells: names and budgets that will be asked for.
        judge: so many queries of each answer, from the first, are those whose attention outputs are compared; 0 compares none.

    Raises:
        UnsupportedAttention: the model's attention or cache cannot be evicted from.
    """

    def __init__(
        self, loaded: LoadedModel, context: Tensor, policies: Mapping[str, Policy], cells: Sequence[Cell], *, judge: int = 8
    ) -> None:
        self.loaded, self.judge = loaded, judge
        windows = [chosen.window for chosen in policies.values()] or [1]
        window = None if None in windows else max(one for one in windows if one is not None)
        self.looked = look(loaded.model, context.to(loaded.model.device), window=window)
        self.masks: dict[Cell, Masks] = {}
        self.refused: dict[Cell, Exception] = {}
        for cell in cells:
            if cell == FULL:
                continue
            try:
                self.masks[cell] = self.looked.decide(policies[cell[0]], cell[1])
            except Exception as error:  # told when the cell is asked for; the others go on
                self.refused[cell] = error
        self.looked.forget()
        self._full: tuple[Prompt, Full] | None = None

    @torch.no_grad()
    def row(self, prompt: Prompt, cell: Cell) -> dict[str, Any]:
        """A prompt's row under a cell: columns of `SAMPLES`, but for those that say where it comes from.

        Raises:
            BudgetError: the budget is outside its range.
            UnsupportedAttention: the policy cannot choose in this model.
        """
        if cell in self.refused:
            raise self.refused[cell]
        full = self.full(prompt)
        cache = self.looked.evicted(self.masks.get(cell))
        size = {"entries_kept": float(cache.entries), "bytes": cache.nbytes, "full_bytes": full_bytes(cache)}
        if cell == FULL:
            said, logits, truth = full.said, full.logits, UNTOUCHED if self.judge else full.judging.means(cell)
        else:
            with reading(self.loaded.model) if cache.ragged else nullcontext():
                logits = self._foretold(cache, prompt, full.tokens)
                said = logits.argmax(-1).tolist()
                if prompt.truth is None:
                    said = self._answer(prompt, cell, full.tokens, said)
            truth = full.judging.means(cell)
        given = torch.tensor(full.tokens, device=logits.device)[:, None]
        score = self._score(prompt, said, full.tokens)
        return {
            "tokens": prompt.context.shape[1],
            "prediction": self._text(said),
            "score": score,
            "full_score": full.score,
            "flipped": int(full.score >= schema.RIGHT > score),
            "kl": float(kl_divergence(full.logits, logits).mean()),
            "agreement": float(agreement(full.logits, logits).double().mean()),
            "log_likelihood": float(logits.double().log_softmax(-1).gather(1, given).mean()),
            "judged_tokens": len(full.tokens),
            **{name: truth[name] for name in FIELDS},
            **size,
        }

    @torch.no_grad()
    def full(self, prompt: Prompt) -> Full:
        """What the full cache does with a prompt; computed once for its cells."""
        if self._full is None or self._full[0] is not prompt:
            self._full = (prompt, self._run_full(prompt))
        return self._full[1]

    def _run_full(self, prompt: Prompt) -> Full:
        if prompt.truth is None:
            tokens = self._decoded(self.looked.evicted(), prompt.opening, prompt.sample.max_new_tokens)
        else:
            tokens = prompt.truth[0].tolist()
        judging = Judging(dict(self.masks), prompt.length + len(tokens) - 1, min(self.judge, len(tokens)))
        with capture(self.loaded.model, window=len(tokens), visitor=judging) if self.judge else nullcontext():
            logits = self._foretold(self.looked.evicted(), prompt, tokens)
        said = tokens if prompt.truth is None else logits.argmax(-1).tolist()
        return Full(tokens, logits, said, self._score(prompt, said, tokens), judging)

    def _foretold(self, cache: EvictedCache, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
        """The logits that foretell each of `tokens`, which are given to the model after the opening [tokens, vocabulary]."""
        model = self.loaded.model
        given = torch.cat([prompt.opening, torch.tensor([list(tokens[:-1])], dtype=torch.long)], 1)
        return forward(model, given.to(model.device), cache, last_logits=len(tokens))[0]

    def _answer(self, prompt: Prompt, cell: Cell, full: Sequence[int], said: Sequence[int]) -> list[int]:
        """The greedy answer on an evicted cache, given its likeliest tokens after each of the full cache's."""
        same = next((place for place, (one, other) in enumerate(zip(full, said, strict=True)) if one != other), None)
        if same is None:
            return list(full)
        found = [*full[:same], said[same]]
        room = prompt.sample.max_new_tokens - len(found)
        if found[-1] in stops(self.loaded) or room < 1:
            return found
        opening = torch.cat([prompt.opening, torch.tensor([found], dtype=torch.long)], 1)
        return found + self._decoded(self.looked.evicted(self.masks[cell]), opening, room)

    def _decoded(self, cache: EvictedCache, opening: Tensor, count: int) -> list[int]:
        """The likeliest tokens after `opening`, one by one, until one that ends an answer (which is among them) or `count`."""
        model, end = self.loaded.model, stops(self.loaded)
        given = opening.to(model.device)
        found: list[int] = []
        while len(found) < count:
            given = forward(model, given, cache, last_logits=1).argmax(-1)
            found.append(int(given))
            if found[-1] in end:
                break
        return found

    def _score(self, prompt: Prompt, said: Sequence[int], tokens: Sequence[int]) -> float:
        if prompt.truth is not None:
            return sum(one == other for one, other in zip(said, tokens, strict=True)) / len(tokens)
        rule = metric(prompt.metric) if isinstance(prompt.metric, str) else prompt.metric
        score = float(rule(self._text(said), prompt.sample))
        if not 0 <= score <= 1:
            raise ValueError(f"a score lies in [0, 1], not at {score:g}; mend the metric of {prompt.sample.task}")
        return score

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.loaded.tokenizer.decode(tokens, skip_special_tokens=True))


def stops(loaded: LoadedModel) -> set[int]:
    """The tokens that end an answer."""
    configured = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in (*listed, getattr(loaded.tokenizer, "eos_token_id", None)) if token is not None}
