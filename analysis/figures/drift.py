"""How the hidden state drifts from the full cache's, layer after layer."""

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.by_layer import by_layer


def drift(layers: pd.DataFrame, *, budget: float, queries: str = "later", norm: str = "L1", ax: Axes | None = None) -> Axes:
    """‖h − ĥ‖ / ‖h‖ after each layer, every layer evicted; the line is the mean over contexts, the band its range."""
    label = f"relative {norm} drift of the hidden state"
    ax = by_layer(layers, "drift", label, budget=budget, queries=queries, norm=norm, ax=ax)
    ax.set_ylim(bottom=0, auto=True)  # panels that share the axis may still raise its top
    return ax
