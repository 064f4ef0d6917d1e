"""`criticalkv sweep`, `status`, `compare` and `merge`: studies that take days, on one machine or many."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from analysis.cli import options
from analysis.cli.evaluate import asked, imported, run
from analysis.cli.tables import table
from analysis.errors import InputError
from analysis.grid import from_toml, made, parted
from analysis.wording import cache_size

if TYPE_CHECKING:
    from analysis.experiments.status import Status

ENGINES = ("local", "ray")


def sweep(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file that declares the grid; options take the place of its settings.")
    ] = None,
    models: Annotated[
        str | None, typer.Option(help="Hugging Face ids, folders or the reference model, separated by commas.")
    ] = None,
    task: options.Task = None,
    context_length: options.Lengths = None,
    samples: options.Samples = None,
    policies: options.Policies = None,
    budget: options.Budgets = None,
    seed: options.Seeds = None,
    aware: options.Aware = None,
    data: options.Data = None,
    haystack: options.Haystack = None,
    depths: options.Depths = None,
    metric: options.Metric = None,
    max_new_tokens: options.MaxNewTokens = None,
    judge: options.Judge = None,
    raw: options.Raw = None,
    use: options.Use = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: Annotated[
        str | None, typer.Option(help="Lay a model that is too large for one GPU over several: auto, balanced, …")
    ] = None,
    engine: Annotated[str, typer.Option(help="Where cells are computed: local (this process), or ray.")] = "local",
    workers: Annotated[int, typer.Option(help="Ray workers, a model in each.")] = 2,
    cpus: Annotated[int, typer.Option(help="Threads of each Ray worker.")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of each Ray worker; a fraction shares one.")] = 0,
    memory: Annotated[float | None, typer.Option(help="GiB that Ray sets aside for each worker.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A running cluster: auto, or ray://host:10001; else Ray is started on this machine.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder; what it holds is not computed again.")] = Path("runs/sweep"),
    as_json: options.AsJson = False,
) -> None:
    """Compute every cell of a grid: models × tasks × lengths × seeds × policies × budgets. Stop it at any moment; the same command goes on.

    Example: [bold]criticalkv sweep grid.toml --out runs/mine[/], with in grid.toml

        tasks = ["niah_single_2", "vt"]
        lengths = [1024, 2048]
        policies = ["snapkv", "adakv+two-stage"]
        budgets = [0.1, 0.2, 0.4]
        samples = 20

    One prefill serves all policies and budgets of a context. [bold]criticalkv status runs/mine[/] tells from elsewhere how far it is.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine is one of {', '.join(ENGINES)}, not {engine!r}")
    own = None if use is None else imported(use)
    given: dict[str, Any] = {
        "models": None if models is None else parted(models, "--models"),
        **asked(task, context_length, policies, budget, seed),
        "samples": samples,
        "aware": aware,
        "raw": raw,
        "max_new_tokens": max_new_tokens,
        "metric": metric,
        "data": data,
        "depths": depths,
        "haystack": haystack,
        "judge": judge,
        "device": device,
        "dtype": dtype,
        "device_map": device_map,
    }
    grid = made(**given) if config is None else from_toml(config, **given)
    if engine == "local":
        run(grid, out, as_json=as_json)
        return
    if gpus > 0 and grid.device == "cpu" and grid.device_map is None:
        raise InputError(
            f"--gpus {gpus:g} sets GPUs aside that nothing would use; give --device cuda too, or --device-map auto"
        )
    from analysis.experiments.engines import Ray, carried

    if own is not None:
        carried(own)
    size = None if memory is None else int(memory * 2**30)
    run(grid, out, Ray(ray_address, workers=workers, cpus=cpus, gpus=gpus, memory=size), as_json=as_json)


def status(
    folder: Annotated[Path, typer.Argument(help="The folder of an evaluation or a sweep.")],
    watch: Annotated[bool, typer.Option("--watch", help="Go on telling, once a second, until the run ends.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Say how far a run is, from outside: cells done and failed, what is under way, time left.

    Example: [bold]criticalkv status runs/mine --watch[/]
    """
    from analysis.experiments.status import status as look

    found = look(folder)
    if as_json:
        options.say(asdict(found))
        return
    console = Console()
    if not watch:
        console.print(_told(found))
        return
    with Live(_told(found), console=console, auto_refresh=False) as live:
        while found.running:
            time.sleep(1)
            found = look(folder)
            live.update(_told(found), refresh=True)


def _told(found: "Status") -> Text:
    failed = sum(found.failures.values())
    share = found.done / found.total if found.total else 1.0
    lines = [f"{found.done} of {found.total} cells ({share:.0%})" + (f", {failed} failed" if failed else "")]
    if found.running:
        left = "" if found.seconds_left is None else f"; about {_duration(found.seconds_left)} left"
        lines.append(f"running: {found.what}{left}")
    elif found.done + failed < found.total:
        when = "" if found.last is None else f", last row {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found.last))}"
        lines.append(f"stopped{when}; the same command goes on")
    else:
        lines.append("finished")
    lines += [f"  {count} × {reason}" for reason, count in found.failures.items()]
    if found.settings.get("command"):
        lines.append(f"command: {found.settings['command']}")
    return Text("\n".join(lines))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def compare(
    first: Annotated[Path, typer.Argument(help="A run's folder.")],
    second: Annotated[Path, typer.Argument(help="Another's, with the same samples.")],
    measure: Annotated[
        str, typer.Option(help="What is shown: score, kl, agreement, perturbation, bytes; --json has all.")
    ] = "score",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array of all measures, nothing else.")] = False,
) -> None:
    """Hold two runs against each other, sample by sample: second − first with its interval, under each policy and budget.

    Example: [bold]criticalkv compare runs/before runs/after[/]

    Models may differ (then rows are paired across them), or versions, or how answers were made; samples, policies and budgets must agree.
    """
    from analysis.comparison import MEASURES, compared, read_run

    if measure not in MEASURES:
        raise InputError(f"--measure is one of {', '.join(MEASURES)}, not {measure!r}")
    found = compared(read_run(first), read_run(second))
    if as_json:
        typer.echo(found.to_json(orient="records"))
        return
    chosen = found[found["measure"] == measure]
    rows = []
    for row in chosen.to_dict("records"):
        length = f", {row['length']}" if row["length"] else ""
        ends = "" if row["low"] != row["low"] else f"{row['low']:+.3g} to {row['high']:+.3g}"
        rows.append(
            (
                f"{row['task']}{length}, {row['question']}",
                row["policy"],
                cache_size(row["budget"]),
                row["pairs"],
                f"{row['first']:.3g}",
                f"{row['second']:.3g}",
                f"{row['difference']:+.3g}",
                ends,
                f"{row['p_adjusted']:.2g}",
            )
        )
    console = Console()
    columns = ("task", "policy", "cache", "pairs", "first", "second", "difference", "interval", "p adjusted")
    console.print(table(columns, rows, f"{measure}: {second} − {first}", left=2, fold=("task",)))
    console.print(
        "intervals: 95 %, bootstrap over pairs; p: Wilcoxon, adjusted by Benjamini-Hochberg over all measures", style="dim"
    )


def merge(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="A new folder for all of them.")],
    as_json: options.AsJson = False,
) -> None:
    """Make one run of several: all rows side by side, and tables of all.

    Example: [bold]criticalkv merge runs/machine-a runs/machine-b --out runs/all[/]
    """
    from analysis.experiments.merging import merge as join

    samples = join(runs, out)
    if as_json:
        options.say({"folder": out, "rows": len(samples), "samples": out / "samples.parquet"})
        return
    Console().print(f"{len(samples)} rows: {out / 'samples.parquet'}", soft_wrap=True, markup=False)
