"""The summaries in words and units that a person reads, for the terminal and the report alike."""

import pandas as pd

from analysis.schema import POLICIES, QUERY_SETS

LEGEND = (
    "improved: heads with lower L under two-stage selection (a tie counts ½). ΔL: relative change of L per head, mean and median; ΔΣL: of the "
    "sum over heads. σ > ½, σ₁ > ½: queries where kept entries, or stage 1's and the always-kept, hold over half of the "
    "attention (two-stage). θ / L: median over heads, two-stage."
)


def perturbation_table(summary: pd.DataFrame) -> pd.DataFrame:
    """`summary.perturbation_summary` as text, in the order of the query sets; `LEGEND` says what its columns are."""
    order = summary.assign(place=summary["queries"].map(list(QUERY_SETS).index)).sort_values(["place", "budget"])
    return pd.DataFrame(
        {
            "queries": order["queries"],
            "cache": order["budget"].map(share),
            "improved": order["improved"].map(share),
            "mean ΔL": order["mean_change"].map(signed),
            "median ΔL": order["median_change"].map(signed),
            "ΔΣL": order["total_change"].map(signed),
            "σ > ½": order["sigma_share"].map(share),
            "σ₁ > ½": order["stage1_share"].map(share),
            "θ / L": order["tightness"].map("{:.1f}".format),
        }
    ).reset_index(drop=True)


def behaviour_table(summary: pd.DataFrame) -> pd.DataFrame:
    """`summary.behaviour_summary` as text."""
    return pd.DataFrame(
        {
            "selection": summary["policy"].map(POLICIES),
            "cache": summary["budget"].map(share),
            "KL (nats)": summary["kl"].map("{:.4f}".format),
            "top-1 agreement": summary["agreement"].map(share),
            "bytes": summary["bytes_share"].map(share),
        }
    )


def ledger_table(claims: pd.DataFrame) -> pd.DataFrame:
    """The ledger as text: what the paper says, what was measured with its interval at 95 %, the verdict."""
    return pd.DataFrame(
        {
            "claim": claims["id"],
            "verdict": claims["verdict"],
            "statement": claims["statement"],
            "measured": [number(value) for value in claims["value"]],
            "95 % interval": [
                "" if pd.isna(low) or low == high else f"{number(low)} to {number(high)}"
                for low, high in zip(claims["low"], claims["high"], strict=True)
            ],
            "paper": claims["paper_value"].fillna(""),
        }
    )


def counted(claims: pd.DataFrame) -> str:
    """How many claims have each verdict, in words."""
    counts = claims["verdict"].value_counts()
    words = {  # of one, of several
        "holds": ("holds", "hold"),
        "does not hold here": ("does not hold here", "do not hold here"),
        "undecided": ("is undecided", "are undecided"),
        "not measured": ("was not measured", "were not measured"),
    }
    said = [f"{(count := int(counts.get(name, 0)))} {words[name][count != 1]}" for name in words]
    return f"Of {len(claims)} claims {', '.join(said)}."


def number(value: float) -> str:
    """0.41873 as "0.419", 0 as "0"; nothing where there is none."""
    return "" if pd.isna(value) else f"{value:.3g}"


def share(value: float) -> str:
    """0.4187 as "41.9 %"."""
    return "–" if pd.isna(value) else f"{100 * value:.1f} %"


def signed(value: float) -> str:
    """0.4187 as "+41.9 %"."""
    return "–" if pd.isna(value) else f"{100 * value:+.1f} %"
