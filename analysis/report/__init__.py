"""The report that a run ends with, made from its tables alone. Loads neither torch nor transformers."""

from analysis.report.render import render
from analysis.report.tables import behaviour_table, perturbation_table

__all__ = ["behaviour_table", "perturbation_table", "render"]
