"""Figures: one function a file, DataFrame in, Axes out, usable alone in a notebook. Loads neither torch nor transformers."""

from analysis.figures.bound_tightness import bound_tightness
from analysis.figures.drift import drift
from analysis.figures.gallery import gallery
from analysis.figures.head_map import head_map
from analysis.figures.layer_perturbation import layer_perturbation
from analysis.figures.retained_mass import retained_mass
from analysis.figures.win_rate import win_rate

__all__ = ["bound_tightness", "drift", "gallery", "head_map", "layer_perturbation", "retained_mass", "win_rate"]
