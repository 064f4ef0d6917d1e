"""`criticalkv head-scores`: what HeadKV's budgets follow, measured on a model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from analysis.cli.options import AsJson, say
from analysis.cli.progress import progress_bar
from analysis.cli.tables import table
from analysis.errors import InputError
from analysis.settings import DTYPES, REFERENCE, ValidationSettings

MEASURES = ("headkv", "copy")


def head_scores(
    model: Annotated[str, typer.Option(help="A Hugging Face id, a folder, or the reference model.")] = REFERENCE,
    measure: Annotated[
        str, typer.Option(help="headkv: attention to the needle; copy: the needle's token looked at most as it is said.")
    ] = "headkv",
    contexts: Annotated[int, typer.Option(help="Needle contexts, at depths from the start to the end.")] = 12,
    context_length: Annotated[int, typer.Option(help="Tokens of each context.")] = 1024,
    seed: Annotated[int, typer.Option(help="Chooses texts and needles.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"Of the model's weights: one of {', '.join(DTYPES)}.")] = "float32",
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("head-scores.json"),
    as_json: AsJson = False,
) -> None:
    """Score each query head by what it does while the model repeats a needle that was hidden in a long context.

    Example: [bold]criticalkv head-scores --measure copy --out smollm2.json[/]

    In Python: policy("headkv+two-stage", scores=HeadScores.load("smollm2.json").scores)
    """
    if measure not in MEASURES:
        raise InputError(f"--measure is one of {', '.join(MEASURES)}, not {measure!r}")
    if contexts < 1:
        raise InputError(f"--contexts must be at least 1, not {contexts}")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    settings = ValidationSettings(model=model, context_length=context_length, seed=seed, device=device, dtype=dtype)
    from transformers.utils import logging

    from analysis.experiments.machine import load_model
    from analysis.experiments.needles import measure_heads

    logging.disable_progress_bar()
    loaded = load_model(settings)
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("needle contexts", total=contexts)
        found = measure_heads(
            loaded,
            contexts=contexts,
            context_length=context_length,
            measure=measure,  # type: ignore[arg-type]
            seed=seed,
            report=lambda done, total: progress.update(task, completed=done, total=total),
        )
    found.save(out)
    if as_json:
        say({"model": loaded.label, "measure": measure, "scores": found.scores, "answered": found.answered, "written": out})
        return
    ranked = sorted(
        ((score, layer, head) for layer, row in enumerate(found.scores) for head, score in enumerate(row)), reverse=True
    )
    shown = Console()
    shown.print(loaded.label, markup=False, style="bold")
    shown.print(f"The heads that look at the needle most ({measure})")
    shown.print(
        table(("layer", "head", "score"), [(layer, head, f"{score:.3f}") for score, layer, head in ranked[:10]], left=0)
    )
    shown.print(f"The model said {found.answered:.0%} of the needles' tokens by itself. Written: {out}", markup=False)
