"""Records of one layer made from random numbers, for what looks at records without a model."""

import torch
from torch import nn

from hooks.projection import OutputProjection
from hooks.records import LayerRecord


def record(
    *, batch=1, kv_heads=2, group=2, queries=8, keys=24, width=4, model_dim=12, pads=(0,), seed=0, layer=0, dtype=torch.float64
):
    """The last `queries` queries of a causal prefill of `keys` tokens; `pads[b]` of row b, at its left, are padding."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    heads = kv_heads * group
    queries = min(queries, keys)
    position = torch.arange(keys)
    causal = position <= position[-queries:, None]
    pads = (tuple(pads) * batch)[:batch]
    seen = torch.stack([causal & (position >= pad) for pad in pads])[:, None]
    valid = torch.stack([position[-queries:] >= pad for pad in pads])
    seen = seen | (~valid[:, None, :, None] & (position == keys - 1))  # a pad's query means nothing, but must see something
    module = nn.Linear(heads * width, model_dim, bias=False, dtype=dtype)
    module.weight.data = numbers(model_dim, heads * width)
    hidden = torch.zeros(batch, queries, model_dim, dtype=dtype)
    return LayerRecord(
        name=f"layer.{layer}",
        call=0,
        layer=layer,
        queries=2 * numbers(batch, heads, queries, width),
        keys=numbers(batch, kv_heads, keys, width),
        values=numbers(batch, kv_heads, keys, width),
        scale=width**-0.5,
        mask=seen,
        query_valid=valid,
        softcap=None,
        sinks=None,
        hidden_before=hidden,
        hidden_after=hidden,
        attention_output=torch.zeros(batch, queries, heads, width, dtype=dtype),
        gate=None,
        projected_output=None,
        output_projection=OutputProjection("o_proj", module, heads * width),
    )
