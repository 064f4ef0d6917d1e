"""What one attention call leaves behind, as frozen values."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hooks.errors import UnsupportedAttention
from hooks.projection import OutputProjection


@dataclass(frozen=True)
class LayerRecord:
    """What attention used in one call of one layer, for the last `queries` queries of the pass.

    Tensors stay on the model's device, in its dtype, and carry no gradient. `keys` and `values` are those that attention
    read: after RoPE, norms and the cache's update, one per KV head. `mask` is boolean (True: visible) or additive; pads are hidden in it.
    In a padded batch the queries are each row's last ones that are no pads; `query_valid` is False where a row has fewer, and what stands
    there means nothing. `hidden_before` and `hidden_after` are the decoder layer's input and output, with a dimension for its streams
    where a family has several; `attention_output` is what attention
    returned, `gate` the factor that it is multiplied with before W_O (None: there is none), and `projected_output` what W_O returned (with
    its bias). `name` is the attention module's qualified name and `call` counts its calls within one capture, from 0; `layer` is the decoder
    layer's place in the model's list of layers.
    """

    name: str
    call: int
    layer: int
    queries: Float[Tensor, "batch heads queries head_dim"]
    keys: Float[Tensor, "batch kv_heads keys head_dim"]
    values: Float[Tensor, "batch kv_heads keys value_dim"]
    scale: float
    mask: Shaped[Tensor, "#batch #heads queries keys"]
    query_valid: Bool[Tensor, "batch queries"]
    softcap: float | None
    sinks: Float[Tensor, " heads"] | Float[Tensor, "batch heads queries"] | None
    hidden_before: Float[Tensor, "batch queries *streams model_dim"]
    hidden_after: Float[Tensor, "batch queries *streams model_dim"]
    attention_output: Float[Tensor, "batch queries heads value_dim"]
    gate: Float[Tensor, "batch heads queries value_dim"] | None
    projected_output: Float[Tensor, "batch queries out_dim"] | None
    output_projection: OutputProjection | None
    refusal: str | None = None
    """Why heads have no perturbation of their own here, where they have none."""

    @property
    def n_heads(self) -> int:
        """H, query heads."""
        return self.queries.shape[1]

    @property
    def n_kv_heads(self) -> int:
        """K, heads of keys and values."""
        return self.keys.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share one KV head, G = H / K."""
        return self.n_heads // self.n_kv_heads

    @property
    def n_keys(self) -> int:
        """n, entries that attention could read."""
        return self.keys.shape[2]

    @property
    def n_queries(self) -> int:
        """T, queries recorded."""
        return self.queries.shape[2]

    @property
    def inputs(self) -> dict[str, Any]:
        """What the attention probabilities are made of, as `perturbation.attention_weights(**record.inputs)` takes it."""
        return {name: getattr(self, name) for name in ("queries", "keys", "scale", "mask", "softcap", "sinks")}

    @property
    def projection_blocks(self) -> Float[Tensor, "heads value_dim model_dim"]:
        """W_O as the blocks W_h that head h meets; a view of the weight where its layout allows one.

        Where the record has a `gate`, the block that a query's output meets is diag(gate) W_h: give `gate=record.gate` to what takes it.

        Raises:
            UnsupportedAttention: heads have no block of their own; the message is `refusal`.
        """
        if self.output_projection is None or self.refusal is not None:
            raise UnsupportedAttention(self.refusal or f"{self.name} has no output projection")
        return self.output_projection.blocks(self.n_heads)

    def to(self, device: str | torch.device) -> "LayerRecord":
        """The same record with its tensors on `device`; W_O stays with the model."""
        moved: dict[str, Any] = {
            item.name: value.to(device) for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)
        }
        return replace(self, **moved)


@dataclass
class Capture:
    """The records of everything that ran inside one `capture` block, in the order in which the layers finished.

    `skipped` names the decoder layers without attention (linear attention, state-space and the like), of which there is no record.
    """

    records: list[LayerRecord] = field(default_factory=list)
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[LayerRecord]:
        return iter(self.records)

    def __getitem__(self, index: int) -> LayerRecord:
        return self.records[index]

    def named(self, name: str, call: int = -1) -> LayerRecord:
        """The record of the attention module `name`, its last call unless another is asked for.

        Raises:
            KeyError: nothing was recorded under that name; the names that were are listed.
            IndexError: the module was called fewer times than that.
        """
        calls = [record for record in self.records if record.name == name]
        if not calls:
            known = ", ".join(dict.fromkeys(record.name for record in self.records)) or "none"
            raise KeyError(f"no attention call of {name!r} was captured; captured: {known}")
        return calls[call]
