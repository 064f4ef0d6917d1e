"""How much each layer's attention output is perturbed, attention-only against two-stage."""

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.by_layer import by_layer


def layer_perturbation(
    layers: pd.DataFrame, *, budget: float, queries: str = "first", norm: str = "L1", ax: Axes | None = None
) -> Axes:
    """‖Σ_h (o_h − ô_h) W_h‖ by layer on a log scale; the line is the mean over contexts, the band its range."""
    label = f"{norm} perturbation of the attention output"
    return by_layer(layers, "perturbation", label, budget=budget, queries=queries, norm=norm, log=True, ax=ax)
