"""Head scores of a model: needles hidden in Python's documentation, asked for, and looked for head by head."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from analysis.errors import InputError
from analysis.experiments.contexts import Text, texts
from analysis.settings import ValidationSettings
from analysis.tasks.needle import CITIES
from eviction.cache.owner import owner
from eviction.head_scores import HeadScores, Measure, copied, needle_mass
from hooks.capture import capture
from hooks.forward import forward
from hooks.records import LayerRecord
from hooks.reference import LoadedModel
from perturbation.weights import attention_weights

WORDS = (
    "amber",
    "falcon",
    "river",
    "copper",
    "lantern",
    "meadow",
    "orchid",
    "granite",
    "harbor",
    "violet",
    "thunder",
    "willow",
)
NEEDLE = "\n\nThe code word of the city of {city} is {answer}.\n\n"
QUESTION = "\n\nQuestion: What is the code word of the city of {city}?\nAnswer: The code word of the city of {city} is"


@dataclass(frozen=True)
class Needle:
    """A context with a needle in it and a question at its end: `tokens` [1, n], then the `answer` [T] to it."""

    tokens: Tensor
    answer: Tensor
    needle: slice


def needles(tokenizer: Any, count: int, length: int, seed: int) -> list[Needle]:
    """`count` contexts of `length` tokens, the answer included, the needle at depths from the start to the end.

    Raises:
        InputError: they are too short for needle, question and answer.
    """
    random_ = random.Random(seed)  # noqa: S311
    hay = texts(ValidationSettings(passages=min(count, 64), context_length=length, seed=seed))
    return [_needle(tokenizer, hay[number % len(hay)], number / max(count - 1, 1), length, random_) for number in range(count)]


def _needle(tokenizer: Any, hay: Text, depth: float, length: int, random_: random.Random) -> Needle:
    def ids(text: str, special: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special).input_ids)

    city, answer = random_.choice(CITIES), " ".join(random_.sample(WORDS, 4))
    first = [token for token in ids("", special=True) if token == tokenizer.bos_token_id]
    needle, asked = ids(NEEDLE.format(city=city, answer=answer)), QUESTION.format(city=city)
    # tokenised in one piece, as the model would say it after the question
    whole, alone = ids(f"{asked} {answer}"), ids(asked)
    shared = next((i for i, (one, other) in enumerate(zip(whole, alone, strict=False)) if one != other), len(alone))
    question, said = whole[:shared], whole[shared:]
    room = length - len(first) - len(needle) - len(question) - len(said)
    if room < 32:
        raise InputError(
            f"--context-length {length} leaves {room} tokens beside the needle and its question: give at least {length - room + 32}"
        )
    text = ids(hay.content)[:room]
    before = round(depth * len(text))
    context = first + text[:before] + needle + text[before:] + question
    start = len(first) + before
    return Needle(torch.tensor([context]), torch.tensor(said), slice(start, start + len(needle)))


@torch.no_grad()
def measure_heads(
    loaded: LoadedModel,
    *,
    contexts: int,
    context_length: int,
    measure: Measure,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> HeadScores:
    """Mean scores over needle contexts, the answers given to the model as if it had said them.

    Layers that read another's entries (shared KV) count with the layer that holds them.

    Raises:
        InputError: the contexts are too short, or longer than the model's positions.
        UnsupportedAttention: the model's attention cannot be captured, or its entries lie in no cache layer.
    """
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if limit is not None and context_length > limit:
        raise InputError(f"--context-length {context_length} exceeds the {limit} positions of the model")
    found = needles(loaded.tokenizer, contexts, context_length, seed)
    sums: dict[int, list[Tensor]] = {}
    right = asked = 0
    for number, one in enumerate(found):
        report(number, contexts)
        device = next(loaded.model.parameters()).device
        tokens, answer = one.tokens.to(device), one.answer.to(device)
        fed = torch.cat([tokens, answer[None, :-1]], 1)
        cache = DynamicCache(config=loaded.model.config)

        def look(
            record: LayerRecord, cache: DynamicCache = cache, one: Needle = one, fed: Tensor = fed, answer: Tensor = answer
        ) -> None:
            weights = attention_weights(**record.inputs)[0][0]
            if measure == "headkv":
                scores = needle_mass(weights, one.needle)
            else:
                scores = copied(weights, one.needle, fed[0], answer)
            sums.setdefault(owner(cache, record)[0], []).append(scores.double().cpu())

        with capture(loaded.model, window=len(answer), visitor=look):
            logits = forward(loaded.model, fed, cache, last_logits=len(answer))
        right += int((logits[0].argmax(-1) == answer).sum())
        asked += len(answer)
    report(contexts, contexts)
    rows = tuple(tuple(torch.stack(sums[place]).mean(0).tolist()) for place in sorted(sums))
    return HeadScores(rows, loaded.name, measure, contexts, context_length, seed, right / asked)
