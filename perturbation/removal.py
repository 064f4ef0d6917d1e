"""What removing cache entries does to the next-token distributions that follow, by the real forward pass. Runs a model; imported by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hooks.errors import UnsupportedAttention
from hooks.forward import forward
from hooks.intervene import hiding, replaying
from hooks.layers import decoder_layers
from perturbation.divergence import Behaviour, behaviour


class _Past(DynamicLayer):
    """Entries that any number of rows share; what is written is seen in its pass and not kept."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The shared entries and the row's own."""
        assert self.keys is not None
        assert self.values is not None
        rows = key_states.shape[0]
        keys, values = (part.expand(rows, -1, -1, -1) for part in (self.keys, self.values))
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


@dataclass(frozen=True)
class Removals:
    """A prompt that was prefilled once, and the tokens that follow it, on which removals are judged.

    Entries of the prompt are removed after it was prefilled: keys and values of the prompt are those of the full cache, and the tokens
    that follow, teacher forced, attend to what is left, layer after layer, as they would on a compressed cache. Made by `of`.

    Attributes:
        prompt: the tokens whose entries are removed.
        full: logits of the tokens that follow on the full cache [queries, vocabulary].
    """

    model: nn.Module
    prompt: Int[Tensor, "1 prompt"]
    following: Int[Tensor, "1 queries"]
    full: Float[Tensor, "queries vocabulary"]
    _past: tuple[tuple[Tensor, Tensor], ...]
    _outputs: Mapping[int, Tensor]

    @classmethod
    @torch.inference_mode()
    def of(cls, model: nn.Module, prompt: Int[Tensor, "1 prompt"], following: Int[Tensor, "1 queries"]) -> "Removals":
        """Prefill `prompt`, and run `following` on the full cache.

        Give the prompt's last token as the only one that follows for the next token's distribution, or its last w for a window of queries.
        Use a model in float64: the KL of one entry lies near 1e-8.

        Raises:
            ValueError: there are no tokens.
            UnsupportedAttention: a layer does not cache the whole prompt (sliding windows, linear attention).
        """
        if not prompt.numel() or not following.numel():
            raise ValueError(
                f"tokens are needed before and after: prompt {tuple(prompt.shape)}, following {tuple(following.shape)}"
            )
        cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
        forward(model, prompt, cache, last_logits=1)
        past = []
        for index, layer in enumerate(cache.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if type(layer) is not DynamicLayer or keys is None or values is None or keys.shape[2] != prompt.shape[1]:
                raise UnsupportedAttention(
                    f"layer {index} ({type(layer).__name__}) does not cache the whole prompt; removals are for layers of full attention"
                )
            past.append((keys, values))
        outputs: dict[int, Tensor] = {}
        handles = [layer.module.register_forward_hook(_keeping(outputs, layer.index)) for layer in decoder_layers(model)[0]]
        try:
            full = forward(model, following, _cache(tuple(past)))[0]
        finally:
            for handle in handles:
                handle.remove()
        return cls(model, prompt, following, full, tuple(past), outputs)

    @property
    def entries(self) -> int:
        """Of the prompt, in each KV head."""
        return self.prompt.shape[1]

    @property
    def heads(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        return tuple(keys.shape[1] for keys, _ in self._past)

    @torch.inference_mode()
    def without(self, keep: Mapping[int, Bool[Tensor, "candidates _ entries"]]) -> Behaviour:
        """What the tokens that follow do where layer l sees only what `keep[l]` keeps, for each candidate by itself.

        Only the lowest layer of `keep` and those above it are run.

        Args:
            keep: by decoder layer, masks [candidates, KV heads or 1, entries]; as many candidates in all.

        Returns:
            Numbers [candidates, queries], in nats where they are divergences.

        Raises:
            ValueError: there is no mask, or masks do not fit.
        """
        counts = {mask.shape[0] for mask in keep.values()}
        if len(counts) != 1 or any(mask.shape[2] != self.entries for mask in keep.values()):
            shapes = {layer: tuple(mask.shape) for layer, mask in keep.items()}
            raise ValueError(
                f"masks {shapes} do not fit: [candidates, KV heads or 1, entries {self.entries}] are needed, alike in all layers"
            )
        (count,) = counts
        below = {layer: output.expand(count, *output.shape[1:]) for layer, output in self._outputs.items() if layer < min(keep)}
        with replaying(self.model, below), hiding(self.model, keep):
            logits = forward(self.model, self.following.expand(count, -1), _cache(self._past))
        tokens = self.following[0, 1:]
        return behaviour(self.full.expand_as(logits), logits, tokens)

    def one_by_one(
        self, layer: int, batch: int = 64, *, start: int = 0
    ) -> Iterator[tuple[Int[Tensor, "candidates 2"], Behaviour]]:
        """Exact leave-one-out: each entry of each KV head of `layer` removed by itself, `batch` of them at a time.

        Yields (KV head, entry) of each candidate and what its removal does; `start` leaves out those that were done before, so that a run
        that was stopped goes on.
        """
        heads = self.heads[layer]
        places = torch.cartesian_prod(torch.arange(heads), torch.arange(self.entries))
        for part in places[start:].split(batch):
            keep = torch.ones(len(part), heads, self.entries, dtype=torch.bool, device=self.full.device)
            keep[torch.arange(len(part)), part[:, 0], part[:, 1]] = False
            yield part, self.without({layer: keep})


def _cache(past: tuple[tuple[Tensor, Tensor], ...]) -> Cache:
    return Cache(layers=[_Past(*pair) for pair in past])


def _keeping(outputs: dict[int, Tensor], index: int) -> Any:
    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            raise UnsupportedAttention(
                f"{type(module).__name__} returns more than its hidden state; its layers cannot be run by parts"
            )
        outputs[index] = output

    return keep
