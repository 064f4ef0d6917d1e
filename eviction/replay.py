"""What removing each entry does to what the window's tokens say: they run again, with gradients, on constant keys and values."""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from eviction.live import Held, Live, LiveAttention, Sketch, precise, through
from eviction.signs import Asked, directions
from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept
from hooks.forward import forward
from hooks.intervene import apart
from hooks.records import LayerRecord

WEIGHTS = 1 << 23
"""Attention weights, over all layers, that may exist at a time even where keys and values are few."""

Call = tuple[int, int]
"""An attention module's id, and which of its calls in a pass it is."""


class _Nothing(DynamicLayer):
    """Keeps nothing: what is written goes to attention, which looks elsewhere for the rest."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new states alone."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens before those that run."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of a full cache."""
        return self.seen + query_length, 0


def removal_nats(
    model: nn.Module,
    tokens: Int[Tensor, "batch window"],
    held: Mapping[Call, Held],
    asked: Asked,
    *,
    seen: int,
    attention_mask: Tensor | None = None,
    sketches: Mapping[Call, Sketch] | None = None,
) -> dict[Call, Float[Tensor, "batch heads keys"]]:
    """½ E_ε[(Σ_{h in k} A_{h,i} / (1 − A_{h,i}) · g_h·(o_h − v_i))²] of each cached KV head k and entry i, mean over the window's queries.

    The KL (nats) of removing the entry, to second order. A/(1 − A)·(o − v) is what its removal does to a head's output, g =
    ∂(Σ_y √p_y ε_y log p_y) / ∂e, with p held constant, for random signs ε over the whole vocabulary (`eviction.signs`) and an addition e to the
    attention output: E_ε[g gᵀ] is the Fisher information of the next-token distribution about e (`design.md`, estimates).

    `tokens` are the last of the `seen` ones; each query's own key and value are live, all others are the constants that `held` has. Queries do
    not see each other's change, so they run some at a time, and where memory goes with the entries, draws of signs one after the other: it
    grows neither with the window nor with the draws. g·(o − v) falls out of attention's own backward pass, and is held for the pools of
    `sketches` alone, which are filled.

    Guarantees: parameters' `requires_grad` and `grad` are not touched; works under `torch.no_grad()` and `torch.inference_mode()`.

    Raises:
        KeyError: an attention call has nothing in `held`.
        UnsupportedAttention: the path is not the whole model, and layers hand on more than one hidden state, or heads share W_O.
    """
    window = tokens.shape[1]
    some = min(window, together(held))
    with torch.inference_mode(False), torch.enable_grad():
        found = {
            call: torch.zeros(
                len(one.slots), one.heads, one.record.n_keys, dtype=precise(one.record.keys), device=one.slots.device
            )
            for call, one in held.items()
        }
        for start in range(0, window, some):
            probe = torch.zeros((), device=tokens.device, requires_grad=True)
            part = slice(start, min(start + some, window))
            run = _Run(held, part, seen - window, found, probe, asked.path == "residual", sketches or {})
            _add(model, tokens[:, run.part].clone(), run, asked, attention_mask)
    for call, nats in found.items():
        looking = held[call].record.query_valid.sum(1).clamp(min=1)
        nats /= 2 * asked.signs * looking[:, None, None]
        if sketches:
            sketches[call].done((2 * asked.signs * looking).to(nats.dtype).rsqrt())
    return found


def together(held: Mapping[Call, Held]) -> int:
    """Queries that are run together: as many as have no more attention weights, over all layers, than there are numbers in keys and values."""
    room = max(WEIGHTS, sum(one.record.keys.numel() + one.record.values.numel() for one in held.values()))
    return max(room // max(sum(one.weights for one in held.values()), 1), 1)


def _add(model: nn.Module, tokens: Tensor, run: "_Run", asked: Asked, attention_mask: Tensor | None) -> None:
    """Run some queries, and gather what removals do along each draw of signs."""
    cut = contextlib.nullcontext(None) if asked.path == "model" else apart(model)
    with cut as layers, intercept(model, run.attend):
        logits = _logits(model, tokens, run, attention_mask)
    drawn = directions(logits.detach(), asked, run.part.start)
    if layers is None:
        _along([logits], run.probe, [drawn])
        return
    assert layers.last is not None
    at_norm = _along([logits], layers.last, [drawn])
    if asked.path == "layer":
        _along(layers.outputs, run.probe, [at_norm] * len(layers.outputs))
        return
    with torch.no_grad():
        for query, key, value, live in run.passed:
            through(_through_projection(at_norm, live.held.record, run.part), query, key, value, live)


def _along(outputs: Sequence[Tensor], towards: Tensor, directions: Sequence[Tensor]) -> Tensor:
    """Vector-Jacobian products for each of a batch of directions, as `torch.vmap` documents it."""
    return torch.vmap(lambda *one: torch.autograd.grad(outputs, towards, one)[0])(*directions)


def _through_projection(
    gradient: Float[Tensor, "signs batch queries model_dim"], record: LayerRecord, part: slice
) -> Float[Tensor, "signs batch queries heads value_dim"]:
    found = torch.einsum("sbqd,hvd->sbqhv", gradient, record.projection_blocks.detach().to(gradient.dtype))
    return found if record.gate is None else found * record.gate[:, :, part].transpose(1, 2)


def _logits(model: nn.Module, tokens: Tensor, run: "_Run", attention_mask: Tensor | None) -> Tensor:
    before = run.first + run.part.start
    mask = None if attention_mask is None else attention_mask[:, : before + tokens.shape[1]].clone()
    config: Any = model.config
    layers = config.get_text_config(decoder=True).num_hidden_layers
    cache = Cache(layers=[_Nothing(before) for _ in range(layers)])
    return forward(model, tokens, cache, attention_mask=mask)


@dataclass
class _Run:
    """One pass of some of the window's queries."""

    held: Mapping[Call, Held]
    part: slice
    first: int
    """The slot of the window's first token."""
    nats: Mapping[Call, Tensor]
    probe: Tensor
    """A number that every attention call depends on."""
    keeps: bool
    """Whether what went into attention is kept, for a gradient that does not come by itself."""
    sketches: Mapping[Call, Sketch]
    passed: list[tuple[Tensor, Tensor, Tensor, Live]] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)

    def attend(self, call: AttentionCall, proceed: Proceed) -> AttentionResult:
        """Attention of the queries over what is held, each one's own key and value live."""
        here = (id(call.module), self.calls[id(call.module)])
        self.calls[id(call.module)] += 1
        held = self.held[here]
        valid = held.record.query_valid[:, None, self.part, None]
        live = Live(held, self.part, self.first, None if bool(valid.all()) else valid, self.nats[here], self.sketches.get(here))
        if self.keeps:
            self.passed.append((call.query.detach(), call.key.detach(), call.value.detach(), live))
        return LiveAttention.apply(call.query, call.key, call.value, self.probe, live), None
