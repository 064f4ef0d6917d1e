"""What a model and its inputs must be like for eviction to mean what it should."""

from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn
from transformers import masking_utils
from transformers.cache_utils import Cache

from eviction.cache.hybrid import has_linear_states
from hooks.dispatch import implementations
from hooks.errors import UnsupportedAttention


def require_places(model: nn.Module) -> None:
    """Refuse attention whose result depends on where entries lie in memory.

    Raises:
        UnsupportedAttention: ALiBi, a sparse index or a paged kernel.
    """
    config: Any = model.config
    parts = [config, getattr(config, "attn_config", None)]
    if config.model_type == "bloom" or any(getattr(part, "alibi", False) for part in parts):
        raise UnsupportedAttention(
            f"{type(model).__name__} uses ALiBi, whose bias is by the distance of entries in the cache; eviction would change it"
        )
    if getattr(config, "index_topk", None):
        raise UnsupportedAttention(
            f"{type(model).__name__} uses sparse-index attention, which chooses entries by an index of its own; eviction would leave "
            "it pointing at others"
        )
    if paged := sorted(name for name in implementations(model) if name.startswith("paged")):
        raise UnsupportedAttention(
            f"attention '{paged[0]}' keeps entries in pages that heads share; load the model with attn_implementation='sdpa'"
        )


def require_prompt(prompt: Tensor) -> None:
    """Refuse what holds no token.

    Raises:
        ValueError: it is not [batch, tokens], or empty.
    """
    if prompt.dim() != 2 or not prompt.numel():
        raise ValueError(f"a prompt [batch, tokens] of at least one token is needed, not tokens {tuple(prompt.shape)}")


def require_rerun(cache: Cache) -> None:
    """Refuse to run the last tokens again where they have changed a state for good.

    Raises:
        UnsupportedAttention: a layer has a linear state.
    """
    if has_linear_states(cache):
        raise UnsupportedAttention("the last tokens cannot be run again over layers with a linear state, which has gone on")


def left_padding(shape: tuple[int, int], attention_mask: Any, *, whole: bool = True) -> Bool[Tensor, "batch tokens"] | None:
    """True where there is a token; None where that is everywhere. `shape` is that of all tokens seen, `whole` whether none are to come.

    Raises:
        ValueError: the mask has another shape or pads on the right, or a whole row has no token.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
        got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"an attention mask {got} does not fit tokens {shape}, those in the cache counted; it is 0 where a token is a pad"
        )
    padding = attention_mask.bool()
    if bool(padding.all()):
        return None
    if not bool((padding[:, 1:] >= padding[:, :-1]).all()) or (whole and not bool(padding[:, -1].all())):
        raise ValueError(
            "prompts of different lengths are padded on the left: the attention mask has a 0 after a 1, or a row without tokens"
        )
    return padding


def require_pads_left_out(cache: Cache, padding: Tensor | None, seen: int) -> None:
    """Refuse pads in a later pass where this transformers would let them into linear states: it masks those of the first pass alone.

    Raises:
        UnsupportedAttention: a pass after the first holds a pad.
    """
    if padding is None or not seen or not has_linear_states(cache) or hasattr(masking_utils, "create_recurrent_attention_mask"):
        return
    if bool((~padding[:, seen:]).any()):
        pads = int((~padding).sum(1).amax())
        raise UnsupportedAttention(
            f"a row has {pads} pads, more than the {seen} tokens of the passes before this one, and this transformers lets such pads into "
            f"linear states; use chunks of at least {pads} tokens, or transformers 5.13 or newer"
        )
