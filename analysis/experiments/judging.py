"""What evictions do to the attention outputs of some queries: exact perturbation, bound and retained mass, as means over a model."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bounds.norms import projected_norms
from bounds.theta import condition, retained_mass, theta
from hooks.masks import over_keys
from hooks.records import LayerRecord
from perturbation.output import output_difference, projected_difference
from perturbation.weights import attention_weights

Choice = tuple[str, int | float]
"""A policy's name and a budget."""
Masks = Sequence[Tensor | None]
FIELDS = ("perturbation", "theta", "retained_mass", "retained_share", "relative_perturbation")
UNTOUCHED = dict(zip(FIELDS, (0.0, 0.0, 1.0, 1.0, 0.0), strict=True))
"""What they are where nothing was evicted."""
MISSING = float("nan")


@dataclass
class Judging:
    """A visitor of a capture on the full cache: of each layer that passes it keeps five numbers for each choice.

    `perturbation` is L = ‖o_h − ô_h‖₁ in the model dimension, `theta` the bound θ on it, `retained_mass` σ, `retained_share` where σ > ½;
    `relative_perturbation` is ‖Σ_h (o_h − ô_h)‖₁ / ‖Σ_h o_h‖₁ of the layer. Queries come from the full cache's pass, as theorems take them.

    Attributes:
        masks: for each choice, a keep-mask per decoder layer.
        seen: tokens after the pass.
        queries: how many of the recorded queries are judged, from the first.
    """

    masks: Mapping[Choice, Masks]
    seen: int
    queries: int
    _found: dict[Choice, list[list[float]]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, record: LayerRecord) -> None:
        """A layer is done."""
        if record.output_projection is None or record.refusal is not None:
            for choice in self.masks:
                self._found[choice].append([MISSING] * len(FIELDS))
            return
        some = slice(0, self.queries)
        weights, sinks = attention_weights(**record.inputs)
        weights, sinks = weights[:, :, some], sinks[:, :, some]
        gate = None if record.gate is None else record.gate[:, :, some]
        blocks, heads = record.projection_blocks, record.n_kv_heads
        norms = projected_norms(record.values, blocks, gate=gate)
        whole = record.attention_output[:, some].transpose(1, 2)
        size = projected_difference(whole, blocks, heads, "layer", gate).norm(p=1, dim=-1)
        for choice, masks in self.masks.items():
            mask = masks[record.layer]
            assert mask is not None
            keep = over_keys(mask, self.seen, record.n_keys).expand(-1, heads, -1)
            difference = output_difference(weights, record.values, keep, sinks)
            written = projected_difference(difference, blocks, heads, "head", gate)
            mass = retained_mass(weights, keep, sinks)
            found = (
                written.norm(p=1, dim=-1).mean(),
                theta(weights, norms, keep, sinks).mean(),
                mass.mean(),
                condition(mass).double().mean(),
                (written.sum(1, keepdim=True).norm(p=1, dim=-1) / size.where(size > 0, 1)).mean(),
            )
            self._found[choice].append([float(value) for value in found])

    def means(self, choice: Choice) -> dict[str, float]:
        """Means over layers, heads and queries, by name; NaN where heads have no perturbation of their own in some layer."""
        rows = self._found.get(choice)
        if not rows:
            return dict.fromkeys(FIELDS, MISSING)
        return dict(zip(FIELDS, torch.tensor(rows, dtype=torch.float64).mean(0).tolist(), strict=True))
