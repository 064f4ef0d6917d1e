"""How long a validation of the compared pair takes, in prefills of the same contexts (target: at most 10).

`validate_over_prefill`: attention-only against two-stage selection at the default budgets, without ablations, optima, other policies and
single removals, figures and report included, without loading the model, over plain prefills of the same
contexts (sdpa, float32, 2 threads, `logits_to_keep=1`, no capture).
"""

import tempfile
from pathlib import Path

import torch
from _pairs import THREADS, arguments, finish, median_ratio
from transformers.cache_utils import DynamicCache

from analysis.experiments.contexts import texts, tokenised
from analysis.experiments.machine import load_model
from analysis.experiments.run import validate
from analysis.settings import ValidationSettings
from hooks.forward import forward


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(THREADS)
    settings = ValidationSettings(passages=4, ablations=(), leave_one_out=0, others=False)
    loaded = load_model(settings)
    contexts = [tokenised(text, loaded.tokenizer, settings, None) for text in texts(settings)]

    @torch.inference_mode()
    def prefills() -> None:
        for context in contexts:
            forward(loaded.model, context.tokens, DynamicCache(config=loaded.model.config), last_logits=1)

    def validation() -> None:
        with tempfile.TemporaryDirectory() as folder:
            validate(settings, Path(folder) / "run", loaded=loaded)

    ratio = median_ratio(validation, prefills, options.pairs, options.json)
    finish(
        {
            "validate_over_prefill": ratio["median"],
            "low": ratio["low"],
            "high": ratio["high"],
            "validate_s": ratio["measured_s"],
            "prefills_s": ratio["base_s"],
            "pairs": options.pairs,
            "threads": THREADS,
        }
    )


if __name__ == "__main__":
    main()
