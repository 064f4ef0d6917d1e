"""Tasks: what a model is asked about a context, and how its answer is scored. Loads neither torch nor transformers."""

from analysis.tasks.asked import Asked
from analysis.tasks.metrics import METRICS, metric
from analysis.tasks.registry import GROUPS, Task, known, make, names, register, ruling, task, unregister
from analysis.tasks.table import COLUMNS, Sample, samples

__all__ = [
    "COLUMNS",
    "GROUPS",
    "METRICS",
    "Asked",
    "Sample",
    "Task",
    "known",
    "make",
    "metric",
    "names",
    "register",
    "ruling",
    "samples",
    "task",
    "unregister",
]
