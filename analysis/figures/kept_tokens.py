"""What a policy kept, token by token."""

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from analysis.figures.style import axes
from analysis.wording import percent

ACROSS = 12
LONGEST = 9
"""Letters of a token that are shown."""


def kept_tokens(
    kept: pd.DataFrame,
    *,
    policy: str,
    context: str | None = None,
    first: int = 0,
    count: int = 96,
    bar: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The tokens from `first` on as lines of text, each on a ground that is darker the more KV heads keep its entry (white: none).

    `context` is the first of the rows by default.

    Raises:
        ValueError: there is no such row.
    """
    rows = kept[kept["policy"] == policy]
    rows = rows[rows["context"] == (context if context is not None else rows["context"].iloc[0] if len(rows) else "")]
    rows = rows.sort_values("position").iloc[first : first + count]
    if rows.empty:
        raise ValueError(f"no row says what {policy} kept of the tokens from {first} on")
    ax = axes(ax)
    colours = matplotlib.colormaps["Blues"]
    lines = -(-len(rows) // ACROSS)
    for place, (token, share) in enumerate(zip(rows["token"], rows["share"], strict=True)):
        line, at = divmod(place, ACROSS)
        ax.add_patch(Rectangle((at, line), 1, 1, facecolor=colours(share), edgecolor="white", linewidth=1))
        text = token.replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$").strip() or "␣"
        shown = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        ax.text(at + 0.5, line + 0.5, shown, ha="center", va="center", fontsize=7, color="white" if share > 0.6 else "0.1")
    ax.set(xlim=(0, ACROSS), ylim=(lines, 0), xticks=[])
    ax.set_yticks([line + 0.5 for line in range(lines)], [str(first + line * ACROSS) for line in range(lines)])
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set(ylabel="position")
    ax.set_title(
        f"{policy}, {percent(rows['budget'].iloc[0])} cache: {percent(round(rows['share'].mean(), 3))} of these entries"
    )
    if bar:
        ax.figure.colorbar(ScalarMappable(Normalize(0, 1), colours), ax=ax, label="share of KV heads")
    return ax
