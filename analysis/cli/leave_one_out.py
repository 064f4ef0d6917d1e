"""`criticalkv leave-one-out`: the exact KL of every entry's removal, and how near the estimates come to it."""

from math import isnan
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from analysis.cli.options import AsJson, say
from analysis.cli.progress import progress_bar
from analysis.cli.tables import table
from analysis.errors import InputError
from analysis.settings import DTYPES, REFERENCE, ValidationSettings


def leave_one_out(
    model: Annotated[str, typer.Option(help="A Hugging Face id, a folder, or the reference model.")] = REFERENCE,
    context: Annotated[Path | None, typer.Option(help="A text file; default: a passage of Python's documentation.")] = None,
    context_length: Annotated[int, typer.Option(help="Tokens of the context, from its start.")] = 256,
    every: Annotated[int, typer.Option(help="Measure every so many layers.")] = 3,
    signs: Annotated[int, typer.Option(help="Draws of signs of the estimates.")] = 8,
    seed: Annotated[int, typer.Option(help="Chooses the passage.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help=f"Of the model: one of {', '.join(DTYPES)}; most KLs drown in float32.")
    ] = "float64",
    out: Annotated[Path, typer.Option(help="The table to write: one row for each entry, in Parquet.")] = Path(
        "leave-one-out.parquet"
    ),
    as_json: AsJson = False,
) -> None:
    """Measure what removing each cache entry does to the next token, exactly, and hold the estimates against it.

    Example: [bold]criticalkv leave-one-out --context paper.txt --context-length 512 --every 3[/]

    A run that was stopped goes on: what was measured lies beside the table, in a file that ends in .safetensors.
    """
    for name, value, least in (("--every", every, 1), ("--signs", signs, 1), ("--context-length", context_length, 3)):
        if value < least:
            raise InputError(f"{name} must be at least {least}, not {value}")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    files = () if context is None else (context,)
    settings = ValidationSettings(
        model=model,
        context_files=files,
        passages=1,
        context_length=context_length,
        window=1,
        budgets=(1.0,),
        seed=seed,
        device=device,
        dtype=dtype,
    )
    from transformers.utils import logging

    from analysis.experiments.behaviour import by_entry, judged
    from analysis.experiments.contexts import texts, tokenised
    from analysis.experiments.machine import load_model
    from hooks.layers import decoder_layers

    (text,) = texts(settings)
    logging.disable_progress_bar()
    loaded = load_model(settings)
    tokens = tokenised(text, loaded.tokenizer, settings, getattr(loaded.model.config, "max_position_embeddings", None)).tokens
    layers = [layer.index for layer in decoder_layers(loaded.model)[0]][::every]
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("removals", total=None)
        try:
            rows = by_entry(
                loaded.model,
                tokens.to(loaded.model.device),
                layers,
                signs=signs,
                save=out.with_name(f"{out.name}.safetensors"),
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        except ValueError as error:  # the file holds another run
            raise InputError(str(error)) from error
    rows.to_parquet(out, index=False)
    found = judged(rows).groupby("estimate", sort=False)[["spearman", "recall20", "nats"]].mean()
    if as_json:
        about = {
            "model": loaded.label,
            "context": text.name,
            "tokens": tokens.shape[1],
            "layers": layers,
            "removals": len(rows),
        }
        say({**about, "estimates": found.reset_index(), "written": out})
        return
    rows_shown = [
        (estimate, f"{row['spearman']:.3f}", f"{row['recall20']:.3f}", "" if isnan(row["nats"]) else f"{row['nats']:.2f}")
        for estimate, row in found.iterrows()
    ]
    shown = Console()
    shown.print(loaded.label, markup=False, style="bold")
    shown.print(
        f"{text.name}, {tokens.shape[1]} tokens, the last one's next token; {len(layers)} layers, means over them", markup=False
    )
    shown.print(table(("estimate", "rank correlation", "recall of the top 20 %", "nats over exact"), rows_shown))
    shown.print(f"Written: {out}", markup=False)
