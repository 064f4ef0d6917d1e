"""Eviction by behaviour on the reference model: the KL score against exact leave-one-out, and what it keeps against what others keep.

One configuration throughout, the default of `fisher`: window 32, 8 draws of signs. Every figure has a 95 % bootstrap interval over contexts
(`…_low`, `…_high`).

`spearman`, `recall20`: rank correlation, and recall of the top 20 %, of the estimate for the last query with the exact leave-one-out KL in
float64, over all entries of a layer; mean over every third layer and over contexts of 160 to 512 tokens (targets: 0.98, 0.93). With a suffix
those of attention, A‖V W_O‖, single-eviction error, straight-through; `worst_layer` has the lowest mean Spearman.
`kl_ratio_05` to `_40`: mean KL(full ‖ evicted) of the 64 teacher-forced tokens after contexts of 2,048, `fisher` over SnapKV + two-stage at
its better pooling, at 5, 10, 20 and 40 % cache (targets: 0.8, 0.6, 0.6, 0.6); `kl_best_rival_05`: over the best of all rivals at 5 % (target:
0.85). `kl_ratio_768_05` to `_40`: the same on contexts of 768. `…_repeats`: on text that says things twice.
`score_over_prefill`: scoring every entry of 4,096 tokens by `fisher` over a prefill of them (target: 0.25); `…_8000`: of 8,000.
`evicting_over_prefill`: a prefill of 4,096 tokens with capture, scoring, choice and compaction over one without, less 1.

`--quick` runs a tenth. `--out FOLDER` keeps every row as CSV, and goes on from those that are there.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch
from _pairs import THREADS, finish, median_ratio
from rich.console import Console
from transformers.cache_utils import DynamicCache

from analysis.cli.progress import progress_bar
from analysis.experiments.behaviour import (
    RIVALS,
    by_entry,
    judged,
    passages,
    rivals,
    what_follows,
)
from analysis.statistics import mean, ratio_of_means
from eviction import look, policy, prefill
from hooks import load
from hooks.forward import forward

BUDGETS = (0.05, 0.1, 0.2, 0.4)
LATER = 64
OURS = ("fisher", "fisher-uniform", "fisher-adakv", "fisher+greedy", "straight-through", "straight-through+greedy")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs for the cost")
    parser.add_argument("--out", type=Path, help="a folder for the rows")
    return parser.parse_args()


class Kept:
    """Rows of one context after the other, in CSV files where there is a folder for them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, work) -> pd.DataFrame:
        """The rows of that name, computed if they are not there."""
        path = None if self.folder is None else self.folder / f"{name}.csv"
        if path is not None and path.exists():
            return pd.read_csv(path)
        rows = work()
        if path is not None:
            scratch = path.with_suffix(".part")
            rows.to_csv(scratch, index=False)
            scratch.replace(path)
        return rows


def truth(options, kept: Kept, bar) -> dict[str, object]:
    """Estimates against exact leave-one-out."""
    loaded = load(dtype=torch.float64)
    layers = range(0, loaded.model.config.num_hidden_layers, 15 if options.quick else 3)
    lengths = (160,) if options.quick else (160, 256, 384, 512)
    texts = passages(loaded.tokenizer, len(lengths), max(lengths))
    parts = []
    for number, (length, passage) in enumerate(zip(lengths, texts, strict=True)):
        task = bar.add_task(f"leave-one-out, {length} tokens", total=None)

        def work(number=number, length=length, passage=passage, task=task) -> pd.DataFrame:
            save = None if options.out is None else options.out / f"exact-{number}.safetensors"
            rows = by_entry(
                loaded.model,
                passage[:, :length],
                list(layers),
                save=save,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
            return judged(rows)

        parts.append(kept(f"estimates-{number}", work).assign(context=number, tokens=length))
        bar.remove_task(task)
    rows = pd.concat(parts)
    by_context = rows.groupby(["estimate", "context"])[["spearman", "recall20"]].mean()
    figures: dict[str, object] = {}
    for estimate in ("fisher", *RIVALS):
        for column in ("spearman", "recall20"):
            name = column if estimate == "fisher" else f"{column}_{estimate}"
            value, low, high = mean(by_context.loc[estimate, column])
            figures |= {name: value, f"{name}_low": low, f"{name}_high": high}
    ours = rows[rows["estimate"] == "fisher"].groupby("layer")[["spearman", "recall20", "nats"]].mean()
    worst = ours["spearman"].idxmin()
    figures |= {"worst_layer": int(worst), "worst_layer_spearman": float(ours["spearman"][worst])}
    return {
        **figures,
        "nats_low": float(ours["nats"].min()),
        "nats_high": float(ours["nats"].max()),
        "exact_contexts": len(lengths),
    }


def choices(loaded, options, kept: Kept, bar, kind: str, count: int, length: int) -> pd.DataFrame:
    """KL of what follows, for every context, policy and budget."""
    chosen = {**{name: policy(name) for name in OURS}, **rivals()}
    parts = []
    task = bar.add_task(f"{kind} contexts of {length}", total=count * len(chosen) * len(BUDGETS))
    for number, passage in enumerate(passages(loaded.tokenizer, count, length + LATER, repeats=kind == "repeats")):

        def work(passage=passage) -> pd.DataFrame:
            before, after = passage[:, :length], passage[:, length:]
            return what_follows(loaded.model, before, after, chosen, BUDGETS, lambda: bar.advance(task))

        parts.append(kept(f"{kind}-{length}-{count}-{number}", work).assign(context=number))
        bar.update(task, completed=(number + 1) * len(chosen) * len(BUDGETS))
    bar.remove_task(task)
    return pd.concat(parts)


def compared(rows: pd.DataFrame, suffix: str, quiet: bool) -> dict[str, object]:
    """Ratios of mean KL."""
    table = rows.pivot_table(index="context", columns=["budget", "policy"], values="kl")
    if not quiet:
        print(rows.groupby(["policy", "budget"], sort=False)["kl"].mean().unstack().round(4).to_string(), file=sys.stderr)
    figures: dict[str, object] = {}

    def add(name: str, above: pd.Series, below: pd.Series) -> None:
        ratio, low, high = ratio_of_means(above, below)
        figures.update({name: ratio, f"{name}_low": low, f"{name}_high": high})

    for budget in BUDGETS:
        at, percent = table[budget], f"{round(100 * budget):02d}"
        two_stage = min(("two-stage-max", "two-stage-none"), key=lambda name: at[name].mean())
        best = min(rivals(), key=lambda name: at[name].mean())
        add(f"kl_ratio{suffix}_{percent}", at["fisher"], at[two_stage])
        add(f"kl_best_rival{suffix}_{percent}", at["fisher"], at[best])
        figures[f"best_rival{suffix}_{percent}"] = best
        for name in OURS:
            figures[f"kl_{name.replace('-', '_').replace('+', '_')}{suffix}_{percent}"] = float(at[name].mean())
        figures[f"kl_two_stage{suffix}_{percent}"] = float(at[two_stage].mean())
    return figures


@torch.inference_mode()
def cost(loaded, options, tokens: int) -> tuple[dict[str, float], dict[str, float]]:
    """Scoring over a prefill, and a prefill that is evicted from over one that is not."""
    (prompt,) = passages(loaded.tokenizer, 1, tokens)
    fisher, pairs = policy("fisher"), 1 if options.quick else options.pairs
    looked = look(loaded.model, prompt, window=fisher.window)

    def plain() -> None:
        forward(loaded.model, prompt, DynamicCache(config=loaded.model.config), last_logits=1)

    def scoring() -> None:
        looked.forget()
        for seen in looked.seen_by(fisher):
            fisher.score(seen, 0.2)

    scored = median_ratio(scoring, plain, pairs, options.json)
    return scored, median_ratio(lambda: prefill(loaded.model, prompt, fisher, 0.2), plain, pairs, options.json)


def main() -> None:
    options = arguments()
    torch.set_num_threads(THREADS)
    kept, quiet = Kept(options.out), options.json
    share = 10 if options.quick else 1
    with progress_bar(Console(stderr=True, quiet=quiet)) as bar:
        figures = truth(options, kept, bar)
        loaded = load()
        for kind, count, length, suffix in (
            ("distinct", 20 // share, 2048, ""),
            ("distinct", 20 // share, 768, "_768"),
            ("repeats", max(5 // share, 2), 2048, "_repeats"),
        ):
            figures |= compared(choices(loaded, options, kept, bar, kind, count, length), suffix, quiet)
    for tokens, suffix in ((4096, ""),) if options.quick else ((4096, ""), (8000, "_8000")):
        scored, whole = cost(loaded, options, tokens)
        name = f"score_over_prefill{suffix}"
        figures |= {name: scored["median"], f"{name}_low": scored["low"], f"{name}_high": scored["high"]}
        figures |= {f"evicting_over_prefill{suffix}": whole["median"] - 1}
    finish({**figures, "contexts": 20 // share, "threads": THREADS})


if __name__ == "__main__":
    main()
