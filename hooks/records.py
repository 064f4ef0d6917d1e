"""What one attention call leaves behind, as frozen values."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from hooks.projection import OutputProjection


@dataclass(frozen=True)
class LayerRecord:
    """What attention used in one call of one layer, for the last `queries` queries of the pass.

    Tensors stay on the model's device, in its dtype, and carry no gradient. `keys` and `values` are those that attention
    read: after RoPE, norms and the cache's update, one per KV head. `mask` is boolean (True: visible) or additive.
    `hidden_before` and `hidden_after` are the decoder layer's input and output; `attention_output` is the input of W_O
    and `projected_output` what W_O returned (with its bias). `name` is the attention module's qualified name and `call`
    counts its calls within one capture, from 0.
    """

    name: str
    call: int
    layer: int
    queries: Float[Tensor, "batch heads queries head_dim"]
    keys: Float[Tensor, "batch kv_heads keys head_dim"]
    values: Float[Tensor, "batch kv_heads keys value_dim"]
    scale: float
    mask: Shaped[Tensor, "#batch #heads queries keys"]
    softcap: float | None
    sinks: Float[Tensor, " heads"] | None
    hidden_before: Float[Tensor, "batch queries model_dim"]
    hidden_after: Float[Tensor, "batch queries model_dim"]
    attention_output: Float[Tensor, "batch queries heads value_dim"]
    projected_output: Float[Tensor, "batch queries out_dim"]
    output_projection: OutputProjection

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
        """W_O as the blocks W_h that head h meets; a view of the weight where its layout allows one."""
        return self.output_projection.blocks(self.n_heads)


@dataclass
class Capture:
    """The records of everything that ran inside one `capture` block, in the order in which the layers finished."""

    records: list[LayerRecord] = field(default_factory=list)

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
