"""`criticalkv generate`: a model answers on a cache that a policy evicts from, as it goes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from analysis.cli.options import AsJson, say
from analysis.errors import InputError
from analysis.grid import literal
from analysis.settings import DTYPES, REFERENCE, ValidationSettings
from analysis.texts import read_text

if TYPE_CHECKING:
    from eviction import Eviction, Moments, Policy


def generate(
    prompt: Annotated[str, typer.Argument(help="What the model is told; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="A Hugging Face id, a folder, or the reference model.")] = REFERENCE,
    context: Annotated[
        list[Path] | None, typer.Option(help="A text file that goes before the prompt; repeat for more.")
    ] = None,
    policy: Annotated[str, typer.Option(help="What is kept; `criticalkv policies` lists them.")] = "adakv+two-stage",
    budget: Annotated[
        str, typer.Option(help="Entries per KV head (512), or a share of them (0.2); 1.0 evicts nothing.")
    ] = "0.2",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the policy, such as window=16; repeat for more.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Run the prompt in chunks of so many tokens, and evict after each.")] = None,
    every: Annotated[int | None, typer.Option(help="Evict while decoding too, after every so many tokens.")] = None,
    target: Annotated[str | None, typer.Option(help="The budget while decoding; default: the same.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the answer, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the model's chat template.")] = False,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"Of the model's weights: one of {', '.join(DTYPES)}.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Let a model answer on a cache that a policy evicts from: after the prompt, after each chunk of it, while decoding.

    Example: [bold]criticalkv generate "What is it about?" --context paper.txt --policy adakv+two-stage --budget 0.2 --chunk 512 --every 32[/]

    The answer goes to standard output as it comes, what was kept to standard error.
    """
    settings = ValidationSettings(model=model, seed=seed, device=device, dtype=dtype)
    text = _text(prompt, context or [])
    for name, value, least in (
        ("--max-new-tokens", max_new_tokens, 1),
        ("--chunk", 1 if chunk is None else chunk, 1),
    ):
        if value < least:
            raise InputError(f"{name} must be at least {least}, not {value}")
    if not 0 <= temperature < float("inf"):
        raise InputError(f"--temperature must be a finite number of at least 0, not {temperature:g}")
    share = _budget("--budget", budget)
    chosen, when = _composed(policy, setting or [], share, every, None if target is None else _budget("--target", target))
    import torch
    from transformers import TextStreamer
    from transformers.utils import logging

    from analysis.experiments.machine import load_model
    from eviction import evicting

    logging.disable_progress_bar()
    loaded = load_model(settings)
    tokens = _tokens(loaded.tokenizer, text, raw).to(loaded.model.device)
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if limit is not None and tokens.shape[1] + max_new_tokens > limit:
        raise InputError(
            f"the prompt has {tokens.shape[1]} tokens; with {max_new_tokens} new ones that is more than the {limit} positions of {loaded.label}"
        )
    last: list[Eviction] = []
    times = 0

    def note(event: Any) -> None:
        nonlocal times
        last[:], times = [event], times + 1

    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    console = Console(stderr=True)
    try:
        with evicting(loaded.model, chosen, share, when, watch=note):
            answer = loaded.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                prefill_chunk_size=chunk,
                streamer=None if as_json else TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
                **sampling,
            )
    except KeyboardInterrupt:
        console.print("\nstopped", style="dim")
        raise typer.Exit(130) from None
    found = {
        "policy": chosen.name,
        "prompt_tokens": tokens.shape[1],
        "answer_tokens": answer.shape[1] - tokens.shape[1],
        "evictions": times,
        **(_held(last[-1]) if last else {}),
    }
    if as_json:
        text = loaded.tokenizer.decode(answer[0, tokens.shape[1] :], skip_special_tokens=True)
        say({"model": loaded.label, "answer": text, **found})
    else:
        console.print(_told(found), style="dim", markup=False)


def _text(prompt: str, context: list[Path]) -> str:
    parts = [read_text("--context", path) for path in context]
    text = "\n\n".join([*parts, sys.stdin.read() if prompt == "-" else prompt])
    if not text.strip():
        raise InputError("the prompt is empty; give some text, or - and text on standard input")
    return text


def _budget(option: str, text: str) -> int | float:
    """512 is a number of entries, 0.2 a share."""
    try:
        value = int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        value = 0
    if not ((isinstance(value, int) and value >= 1) or (isinstance(value, float) and 0 < value <= 1)):
        raise InputError(f"{option} is a number of entries, such as 512, or a share in (0, 1], such as 0.2; not {text!r}")
    return value


def _composed(
    name: str, given: list[str], budget: int | float, every: int | None, target: int | float | None
) -> tuple["Policy", "Moments"]:
    settings: dict[str, Any] = {}
    for part in given:
        key, joined, value = part.partition("=")
        if not joined:
            raise InputError(f"--set takes a parameter and its value, such as window=16; not {part!r}")
        settings[key.strip()] = literal(value)
    from analysis.experiments.study import composed
    from eviction import Moments

    try:
        return composed(name, settings), Moments(every=every, target=target)
    except (ValueError, TypeError, OSError) as error:
        raise InputError(str(error)) from error


def _tokens(tokenizer: Any, text: str, raw: bool) -> Any:
    if raw or not getattr(tokenizer, "chat_template", None):
        return tokenizer(text, return_tensors="pt").input_ids
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]


def _held(event: "Eviction") -> dict[str, float]:
    """What the cache holds after its last eviction, and what it would hold without any."""
    from eviction import EvictedCache, cache_bytes
    from eviction.cache.evicted import full_bytes

    cache = EvictedCache(event.cache.layers)
    cache.forget()  # the queries carried along are of no use any more
    return {"entries_per_head": cache.entries, "bytes": cache_bytes(cache), "full_bytes": full_bytes(cache)}


def _told(found: dict[str, Any]) -> str:
    said = f"{found['policy']}: {found['prompt_tokens']} tokens of prompt and {found['answer_tokens']} of answer"
    if not found["evictions"]:
        return f"{said}; nothing was evicted"
    return (
        f"{said}; {found['entries_per_head']:.0f} entries a head held at the end, {_size(found['bytes'])} where the full cache has "
        f"{_size(found['full_bytes'])} ({found['bytes'] / found['full_bytes']:.1%}); it chose {found['evictions']} times"
    )


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
