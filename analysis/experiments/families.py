"""Which families can be captured exactly: each run as a tiny random model, in float64, with capture held against it."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from analysis.experiments.reproduction import attention_error, projection_error
from hooks.capture import capture
from hooks.errors import UnsupportedAttention
from hooks.records import Capture
from hooks.tiny import tiny_model

Status = Literal["exact", "coupled", "refused", "not built"]
MEANING: dict[Status, str] = {
    "exact": "captured; heads have perturbations of their own",
    "coupled": "captured; what follows attention couples the heads, so numbers per head are refused",
    "refused": "not captured, for the reason given",
    "not built": "no tiny model of it can be built here; try capture on a real one, it is exact or refuses",
}
QUERIES, TOKENS = 6, 20
EXACT = 1e-10
EAGER = 1e-6
"""Relative errors allowed in float64: many families' eager attention casts its softmax to float32."""


@dataclass(frozen=True)
class FamilyStatus:
    """What happened to one family. Errors are relative (‖ours − model's‖₂ / ‖model's‖₂), the largest over its records.

    `logits_equal`: bit for bit the same with capture and without. `attention_error`: Σ A V from the record against what
    attention returned. `projection_error`: Σ_h (g ⊙ A V) W_h + bias against what W_O returned. None where it was not measured.
    """

    family: str
    status: Status
    attention: str
    records: int
    skipped: int
    gated: bool
    logits_equal: bool | None
    attention_error: float | None
    projection_error: float | None
    note: str

    @property
    def checks(self) -> dict[str, bool | None]:
        """Which checks passed; None where one does not apply."""
        allowed = EAGER if self.attention == "eager" else EXACT
        return {
            "logits": self.logits_equal,
            "attention": None if self.attention_error is None else self.attention_error <= allowed,
            "W_O": None if self.projection_error is None else self.projection_error <= allowed,
        }


def examine(family: str) -> FamilyStatus:
    """Build `family` tiny, under sdpa or else eager attention, run it with capture and without, and compare."""
    reasons: list[str] = []
    for attention in ("sdpa", "eager"):
        try:
            model = tiny_model(family, attention=attention, dtype=torch.float64)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {_first_line(error)}")
            continue
        return _examined(family, attention, model)
    return FamilyStatus(family, "not built", "", 0, 0, False, None, None, None, reasons[-1])


@torch.no_grad()
def _examined(family: str, attention: str, model: Any) -> FamilyStatus:
    tokens = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    try:
        with capture(model, window=QUERIES) as captured:
            watched = model(tokens, use_cache=False).logits
        plain = model(tokens, use_cache=False).logits
    except UnsupportedAttention as error:
        return FamilyStatus(family, "refused", attention, 0, 0, False, None, None, None, str(error))
    except Exception as error:
        note = f"does not run: {type(error).__name__}: {_first_line(error)}"
        return FamilyStatus(family, "not built", attention, 0, 0, False, None, None, None, note)
    return _compared(family, attention, captured, torch.equal(plain, watched))


def _compared(family: str, attention: str, captured: Capture, logits_equal: bool) -> FamilyStatus:
    projected: float | None = None
    refusal = ""
    try:
        projected = max(map(projection_error, captured))
    except UnsupportedAttention as error:
        refusal = str(error)
    return FamilyStatus(
        family,
        "coupled" if refusal else "exact",
        attention,
        len(captured),
        len(captured.skipped),
        any(record.gate is not None for record in captured),
        logits_equal,
        max(map(attention_error, captured)),
        projected,
        refusal,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
