"""How far each rule's choice is from the best there is."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import axes, plain_log, unperturbed
from analysis.schema import LEAST_L
from analysis.wording import percent

OPTIMA = {"theta": ("least θ", "L1", "θ / least θ"), "perturbation": (LEAST_L, "L2", "L₂ / least L₂ found")}


def optimum_gap(single: pd.DataFrame, *, column: str = "perturbation", ax: Axes | None = None) -> Axes:
    """A box per rule over single query heads: `column` (theta or perturbation) under its choice over that of the optimum; 1 is the best.

    For θ the optimum is a certified lower bound. For L it is what an exchange search found, so that the true gap is at least what is shown.
    Box: middle half, whiskers: 5 to 95 %.

    Raises:
        ValueError: no optimum was searched for in these rows.
    """
    name, norm, label = OPTIMA[column]
    rows = single[single["norm"] == norm]
    keys = ["context", "layer", "head", "budget"]
    best = rows[rows["choice"] == name].set_index(keys)["lower" if column == "theta" else column]
    if best.dropna().empty:
        raise ValueError(f"no row says what the {name} is")
    best = best[best > 0]
    ax = axes(ax)
    if best.empty:
        return unperturbed(ax)
    others = rows[~rows["choice"].isin([found for found, _, _ in OPTIMA.values()])]
    joined = others.join(best.rename("best"), on=keys, how="inner")
    joined["ratio"] = joined[column] / joined["best"]
    order = joined.groupby("choice")["ratio"].median().sort_values().index.tolist()
    sns.boxplot(
        joined, x="ratio", y="choice", order=order, color="#9ecae1", whis=(5, 95), showfliers=False, linewidth=0.9, ax=ax
    )
    ax.axvline(1, color="0.3", linewidth=1, linestyle="--")
    ax.set(xscale="log", xlabel=label, ylabel="", title=f"{percent(joined['budget'].iloc[0])} cache, {best.size} heads")
    plain_log(ax.xaxis)
    return ax
