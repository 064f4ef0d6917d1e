"""What an eviction does to the hidden state, layer by layer, by the real forward pass. Runs a model; imported by name."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from hooks.capture import capture
from hooks.errors import UnsupportedAttention
from hooks.forward import forward
from hooks.intervene import hiding
from perturbation.inputs import order_p


@dataclass(frozen=True)
class Drift:
    """How far the hidden state after each decoder layer is from that of the full cache.

    `layers` names the decoder layers (those that have attention), the first dimension of `absolute` = ‖h − ĥ‖_p and `size` = ‖h‖_p;
    ‖·‖ runs over the model dimension, and over the streams of a family that has several.
    """

    layers: tuple[int, ...]
    absolute: Float[Tensor, "layers batch queries"]
    size: Float[Tensor, "layers batch queries"]

    @property
    def relative(self) -> Float[Tensor, "layers batch queries"]:
        """‖h − ĥ‖ / ‖h‖; 0 where h is 0 and nothing moved."""
        return self.absolute / self.size.where(self.size > 0, 1)


@torch.inference_mode()
def drift(
    model: nn.Module,
    prompt: Int[Tensor, "batch prompt"],
    following: Int[Tensor, "batch queries"],
    keep: Sequence[Bool[Tensor, "batch kv_heads prompt"]],
    *,
    evicted: Sequence[Collection[int]] | None = None,
    norm: float = 1,
) -> list[Drift]:
    """Prefill `prompt`, then run `following` on the full cache and again on caches from which entries were evicted.

    Evicting one layer shows what its error becomes on its way up; evicting the first k layers, or all of them, how errors
    add up. Attention in an evicted layer sees what `keep` keeps of the prompt and renormalises, as a compressed cache would; its
    queries come from hidden states that have drifted already. The prompt is prefilled once, whole.

    Examples:
        >>> keep = [torch.arange(40).expand(1, 2, 40) % 2 == 0] * 3  # every other entry, in each of three layers
        >>> one, all_three = drift(model, tokens[:, :40], tokens[:, 40:], keep, evicted=[{1}, range(3)])
        >>> one.absolute.shape, bool((one.relative[0] == 0).all())  # nothing moves below the evicted layer
        (torch.Size([3, 1, 8]), True)

    Args:
        model: a causal language model under sdpa or eager attention whose layers all cache the whole prompt.
        prompt: the tokens that are cached.
        following: the tokens whose hidden states are compared.
        keep: one mask per layer, as a policy decides them.
        evicted: sets of layers (by `layer_idx`) to evict from, each giving one `Drift`; None is one set, of all layers.
        norm: p of ‖·‖_p.

    Raises:
        ValueError: a mask does not fit, `evicted` names a layer that has none, or `norm` is below 1.
        UnsupportedAttention: a layer does not cache the whole prompt (sliding window), or its attention cannot hide entries.
    """
    norm = order_p(norm)
    everything = range(len(keep))
    sets = [everything] if evicted is None else evicted
    for layers in sets:
        if unknown := sorted(set(layers) - set(everything)):
            raise ValueError(
                f"layers {unknown} have no keep-mask: there are {len(keep)} masks, for layers 0 to {len(keep) - 1}"
            )
    cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
    if cache.layers and len(keep) != len(cache.layers):
        raise ValueError(f"{len(keep)} keep-masks for a model that caches {len(cache.layers)} layers")
    forward(model, prompt, cache, last_logits=1)
    _require_whole(cache, len(keep), prompt.shape[1])
    full = _hidden(model, following, cache, [torch.ones_like(mask) for mask in keep])
    found = []
    for layers in sets:
        chosen = set(layers)
        masks = [mask if layer in chosen else torch.ones_like(mask) for layer, mask in enumerate(keep)]
        changed = _hidden(model, following, cache, masks)
        pairs = [(full[layer], changed[layer]) for layer in full]
        absolute = torch.stack([(before - after).flatten(2).norm(p=norm, dim=-1) for before, after in pairs])
        size = torch.stack([before.flatten(2).norm(p=norm, dim=-1) for before, _ in pairs])
        found.append(Drift(tuple(full), absolute, size))
    return found


def _hidden(model: nn.Module, tokens: Tensor, cache: Cache, masks: list[Tensor]) -> dict[int, Tensor]:
    """Hidden states after each decoder layer in float32 or better, on a copy of the cache."""
    with hiding(model, masks), capture(model, window=None) as captured:
        forward(model, tokens, copy.deepcopy(cache), last_logits=1)
    # where a layer attends more than once (looped or shared layers) the last pass through it is what goes on
    return {
        record.layer: record.hidden_after.to(torch.promote_types(torch.float32, record.hidden_after.dtype))
        for record in captured
    }


def _require_whole(cache: Cache, layers: int, length: int) -> None:
    for index, layer in enumerate(cache.layers[:layers]):
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, Tensor) or keys.shape[-2] != length:
            held = keys.shape[-2] if isinstance(keys, Tensor) else "no"
            raise UnsupportedAttention(
                f"layer {index} ({type(layer).__name__}) holds {held} of the prompt's {length} entries, so a keep-mask over the "
                "prompt does not fit it; drift is for layers that cache the whole prompt"
            )
