"""The only floor that touches a live model: capture, W_O, interventions, the reference model."""

from hooks.capture import capture
from hooks.errors import ModelUnavailable, UnsupportedAttention
from hooks.intervene import hiding
from hooks.projection import OutputProjection
from hooks.records import Capture, LayerRecord
from hooks.reference import LoadedModel, load

__all__ = [
    "Capture",
    "LayerRecord",
    "LoadedModel",
    "ModelUnavailable",
    "OutputProjection",
    "UnsupportedAttention",
    "capture",
    "hiding",
    "load",
]
