"""Figures: one function a file, DataFrame in, Axes out, usable alone in a notebook. Loads neither torch nor transformers."""

from analysis.figures.bound_tightness import bound_tightness
from analysis.figures.drift import drift
from analysis.figures.gallery import gallery
from analysis.figures.head_map import head_map
from analysis.figures.layer_perturbation import layer_perturbation
from analysis.figures.needle_map import needle_map
from analysis.figures.retained_mass import retained_mass
from analysis.figures.score_by_budget import score_by_budget
from analysis.figures.score_by_perturbation import score_by_perturbation
from analysis.figures.win_rate import win_rate

__all__ = [
    "bound_tightness",
    "drift",
    "gallery",
    "head_map",
    "layer_perturbation",
    "needle_map",
    "retained_mass",
    "score_by_budget",
    "score_by_perturbation",
    "win_rate",
]
