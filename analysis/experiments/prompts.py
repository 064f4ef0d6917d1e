"""From a task's samples to tokens: what a policy evicts from, and what is run on the rest of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from analysis.errors import InputError
from analysis.tasks.metrics import Metric
from analysis.tasks.table import Sample

SPLIT = "<<here the question begins>>"
"""Marks, in a chat template, where the context ends."""


@dataclass(frozen=True)
class Prompt:
    """A sample in tokens.

    Attributes:
        sample: what it was made of.
        metric: how its answer is scored.
        context: the tokens whose entries a policy evicts [1, n].
        opening: those that come before the answer, run on what is left [1, m], at least one.
        truth: the reference answer, where it is given to the model and nothing is generated [1, t].
    """

    sample: Sample
    metric: str | Metric
    context: Int[Tensor, "1 context"]
    opening: Int[Tensor, "1 opening"]
    truth: Int[Tensor, "1 truth"] | None = None

    @property
    def length(self) -> int:
        """Tokens before the answer."""
        return self.context.shape[1] + self.opening.shape[1]


def prompt(tokenizer: Any, sample: Sample, metric: str | Metric, *, aware: bool, raw: bool, forced: bool) -> Prompt:
    """The tokens of a sample.

    Context and question are tokenised apart, so that a context has the same tokens whatever is asked. In a chat template they are one turn of
    the user's, and the answer prefix begins the model's. Query-agnostic, entries of the context are evicted before the question is run;
    query-aware (`aware`), those of all the prompt but its last token.

    Args:
        tokenizer: the model's.
        sample: context, question, answer prefix.
        metric: how its answer is scored.
        aware: whether the question is seen when entries are chosen.
        raw: never use a chat template.
        forced: give the reference answer to the model instead of generating one.

    Raises:
        InputError: the context has no tokens, or the chat template changes what it is given.
    """
    before, after = sample.context, sample.question + sample.answer_prefix
    templated = not raw and bool(getattr(tokenizer, "chat_template", None))
    if templated:
        turn = [{"role": "user", "content": f"{sample.context}{SPLIT}{sample.question}"}]
        try:
            text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise InputError(f"the model's chat template does not take a user's turn ({error}); give --raw") from error
        parts = text.split(SPLIT)
        if len(parts) != 2:
            raise InputError(
                f"the model's chat template shows a user's turn {len(parts) - 1} times, or the context holds {SPLIT!r}; give --raw to do "
                "without"
            )
        before, after = parts[0], parts[1] + sample.answer_prefix
    context = _ids(tokenizer, before, special=not templated)
    opening = _ids(tokenizer, after, special=False)
    if aware:
        context, opening = torch.cat([context, opening], 1), context[:, :0]
    if not opening.shape[1]:
        context, opening = context[:, :-1], context[:, -1:]
    if not context.shape[1]:
        raise InputError(
            f"{sample.task}, row {sample.number}: the context has {context.shape[1]} tokens; there is nothing to evict from"
        )
    truth = _ids(tokenizer, sample.answer[0], special=False)[:, : sample.max_new_tokens] if forced else None
    return Prompt(sample, metric, context, opening, truth)


def _ids(tokenizer: Any, text: str, *, special: bool) -> Tensor:
    found = torch.tensor([tokenizer(text, add_special_tokens=special).input_ids], dtype=torch.long)
    if special and found.shape[1] and int(found[0, -1]) == getattr(tokenizer, "eos_token_id", None):
        found = found[:, :-1]  # of tokenizers that end every text
    return found


def require_room(prompts: Sequence[Prompt], limit: int | None, label: str) -> None:
    """Whether all prompts and their answers fit into the model's positions.

    Raises:
        InputError: one does not; the message names it.
    """
    for one in prompts:
        most = one.length + one.sample.max_new_tokens
        if limit is not None and most > limit:
            raise InputError(
                f"{one.sample.task}, row {one.sample.number}: {one.length} tokens and {one.sample.max_new_tokens} of the answer exceed the "
                f"{limit} positions of {label}; lower --context-length or --max-new-tokens, or leave the row out"
            )


def by_context(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Prompts with the same context tokens together, in the order in which each context comes first: they share a prefill."""
    groups: dict[tuple[int, ...], list[Prompt]] = {}
    for one in prompts:
        groups.setdefault(tuple(one.context[0].tolist()), []).append(one)
    return list(groups.values())
