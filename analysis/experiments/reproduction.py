"""Does a record reproduce what the model computed? The one comparison that a run's self-check and the family table both make."""

from torch import Tensor

from hooks.errors import UnsupportedAttention
from hooks.records import LayerRecord
from perturbation.output import attention_output
from perturbation.weights import attention_weights


def attention_error(record: LayerRecord) -> float:
    """Relative error of Σ_i A_i v_i, from captured Q, K and V, against what attention returned."""
    return relative_error(_heads(record).transpose(1, 2), record.attention_output)


def projection_error(record: LayerRecord) -> float:
    """Relative error of Σ_h (g ⊙ Σ_i A_i v_i) W_h + bias against what W_O returned.

    Raises:
        UnsupportedAttention: heads have no block of W_O of their own (`LayerRecord.refusal`).
    """
    heads = _heads(record)
    if record.output_projection is None or record.projected_output is None:
        raise UnsupportedAttention(record.refusal or f"{record.name} has no output projection")
    gated = heads if record.gate is None else heads * record.gate.to(heads.dtype)
    written = (gated @ record.projection_blocks.to(heads.dtype)).sum(1)
    bias = record.output_projection.bias
    return relative_error(written if bias is None else written + bias, record.projected_output)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖₂ / ‖theirs‖₂ in float64."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-300))


def _heads(record: LayerRecord) -> Tensor:
    weights, _ = attention_weights(**record.inputs)
    return attention_output(weights, record.values)
