"""Whose entries an attention call read: some layers read another's, and latent attention reads what was made of the cache."""

from typing import Any

from transformers.cache_utils import Cache

from hooks.errors import UnsupportedAttention
from hooks.records import LayerRecord


def owner(cache: Cache, record: LayerRecord) -> tuple[int, bool]:
    """The place of the cache layer whose entries the record's attention read, and whether it is latent.

    Latent: attention read something else than what is cached, made of it entry by entry.

    Raises:
        UnsupportedAttention: no layer of the cache holds them.
    """
    address = record.keys.untyped_storage().data_ptr()
    for place, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.numel() and keys.untyped_storage().data_ptr() == address:
            values: Any = layer.values  # type: ignore[union-attr]
            if record.values.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
                raise UnsupportedAttention(
                    f"{record.name} reads cached keys as they are, but values that it mixes between heads; it cannot be evicted from"
                )
            return place, False
    own: Any = cache.layers[record.layer] if record.layer < len(cache.layers) else None
    keys = getattr(own, "keys", None)
    if keys is None or not keys.numel():
        raise UnsupportedAttention(
            f"{record.name} attends to entries that no layer of the cache holds; a family that keeps keys and values elsewhere "
            "cannot be evicted from"
        )
    if keys.shape[1] not in (1, record.n_kv_heads):
        raise UnsupportedAttention(
            f"{record.name} makes {record.n_kv_heads} KV heads of {keys.shape[1]} cached ones, in an order that is not known; "
            "it cannot be evicted from"
        )
    return record.layer, True
