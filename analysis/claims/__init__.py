"""Which of the theory's claims hold on the model at hand: declared claims, measured on a run's rows. Loads neither torch nor transformers."""

from analysis.claims.declared import CLAIMS
from analysis.claims.ledger import ledger
from analysis.claims.rules import Claim, Rule, verdict

__all__ = ["CLAIMS", "Claim", "Rule", "ledger", "verdict"]
