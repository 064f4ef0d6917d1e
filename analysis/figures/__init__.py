"""Figures: one function a file, DataFrame in, Axes out, usable alone in a notebook. Loads neither torch nor transformers."""

from analysis.figures.ablation import ablation
from analysis.figures.allocation_map import allocation_map
from analysis.figures.bound_tightness import bound_tightness
from analysis.figures.bounds_compared import bounds_compared
from analysis.figures.budget_curve import budget_curve
from analysis.figures.drift import drift
from analysis.figures.gallery import gallery
from analysis.figures.head_map import head_map
from analysis.figures.kept_tokens import kept_tokens
from analysis.figures.kl_by_budget import kl_by_budget
from analysis.figures.layer_perturbation import layer_perturbation
from analysis.figures.leave_one_out import leave_one_out
from analysis.figures.needle_map import needle_map
from analysis.figures.optimum_gap import optimum_gap
from analysis.figures.retained_mass import retained_mass
from analysis.figures.score_by_budget import score_by_budget
from analysis.figures.score_by_perturbation import score_by_perturbation
from analysis.figures.win_rate import win_rate

__all__ = [
    "ablation",
    "allocation_map",
    "bound_tightness",
    "bounds_compared",
    "budget_curve",
    "drift",
    "gallery",
    "head_map",
    "kept_tokens",
    "kl_by_budget",
    "layer_perturbation",
    "leave_one_out",
    "needle_map",
    "optimum_gap",
    "retained_mass",
    "score_by_budget",
    "score_by_perturbation",
    "win_rate",
]
