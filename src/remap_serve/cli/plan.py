# SPDX-License-Identifier: Apache-2.0
"""`remap plan`: the effect of remapping for a model on a machine, with the arithmetic.

`remap_serve.sim.planning` computes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from remap.cli.errors import exit_on_error
from remap.cli.options import MEMORY, Json, MachineName, MaxNumSeqs, Tables, print_json, print_whole
from remap.policy.hardware import Model, namesakes
from remap.policy.hardware import machine as machine_of
from remap.sizes import show_size
from remap_serve.sim.hf_config import find_model
from remap_serve.sim.planning import MAX_REQUESTS, MachinePlan, memory_of
from remap_serve.sim.planning import plan as make_plan
from remap_serve.sim.planning_numbers import IdleDonor, Reload

__all__ = ["plan", "show"]


def plan(
    machine: MachineName,
    model: Annotated[
        str,
        typer.Option(help="Such as llama-3-8b, Qwen3-32B, or the path of a checkpoint's config.json or its folder."),
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            help=f"{MEMORY} Of one device.",
            show_default="90%, less the donors' weights",
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that a decoding request has on average.")] = 512,
    batch: Annotated[int | None, typer.Option(min=1, help="Show this many requests at once, too.")] = None,
    donors: Annotated[
        str,
        typer.Option(help="Idle models on the same machine, as OPT-13b,Llama-3-8b; paths, too.", show_default="none"),
    ] = "",
    max_num_seqs: MaxNumSeqs = MAX_REQUESTS,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp16, fp32, fp8 or mxfp4.", show_default="the model's")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Devices that share every layer; the plan is one device's.")] = 1,
    tables: Tables = None,
    as_json: Json = False,
) -> None:
    """Show how much KV cache a model would gain on a machine, which layers are hidden, and which settings to use."""
    with exit_on_error():
        on, assumed = machine_of(machine, tables), []
        if others := namesakes(machine, tables):
            assumed.append(f"{machine} is {on.name}; {' or '.join(others)} is another machine: give the full name")
        found = make_plan(
            on,
            _model(model, tables, dtype, assumed),
            memory_bytes=None if memory is None else memory_of(memory, on),
            context=context,
            batch=batch,
            donors=[_model(name.strip(), tables, None, assumed) for name in donors.split(",") if name.strip()],
            max_requests=max_num_seqs,
            tp=tp,
            assumed=assumed,
        )
    if as_json:
        print_json(found.as_dict())
    else:
        show(found, Console(soft_wrap=True, emoji=False))


def _model(name: str, tables: Path | None, dtype: str | None, assumed: list[str]) -> Model:
    found, notes = find_model(name, tables, dtype)
    assumed.extend(notes)
    return found


def show(found: MachinePlan, console: Console) -> None:
    """Print the plan: first the answer, then the tables, then the arithmetic and the sources."""

    def say(text: str = "", style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    share = f", one of {found.tp} devices" if found.tp > 1 else ""
    say(
        f"{found.model.name} on {found.machine.name}{share}, {show_size(found.memory_bytes)} for weights and KV cache, "
        f"{found.context} tokens a request",
        style="bold",
    )
    say(
        f"KV cache {found.kv_tokens:,} tokens, {found.balance.rows_before} requests at once. Each remapped layer adds "
        f"{found.tokens_per_layer:,.0f} tokens."
    )
    for text in found.advice.why:
        say(text)
    for text in found.assumed:
        say(f"Assumed: {text}.", style="yellow")
    say()
    print_whole(console, _limits(found))
    say()
    print_whole(console, _what_if(found))
    say()
    print_whole(console, _reloads([found.reload, *(donor.reload for donor in found.donors)]))
    if found.donors:
        say()
        print_whole(console, _donors(found.donors))
    say()
    say(
        "What to set, for the engines' process" if found.donors else "What to set, for the engine's process",
        style="bold",
    )
    reasons = {setting.variable: setting.reason for setting in found.advice.settings} | {
        "REMAP_ARENA": "the models' engines share this arena, in one process; give each of them the same lines",
        "REMAP_CAPACITY": "the memory of all weights and KV together, less activations"
        if found.donors
        else "the memory less activations",
        "REMAP_LINK": "bytes/s from the host, until copies have been measured",
    }
    for name, value in found.environment().items():
        say(f"  {name}={value}" + (f"  # {reasons[name]}" if name in reasons else ""))
    say("  In Python: remap.advanced.Knobs(" + ", ".join(f"{s.name}={s.value!r}" for s in found.advice.settings) + ")")
    say()
    say("The arithmetic", style="bold")
    for step in found.steps:
        say(f"  {step.what}: {step.formula}")
        say(f"      {step.numbers}")
    say()
    say(
        "Figures of the machine, by grade (P paper, S public page, L measured, D data sheet, V fitted, A assumed)",
        style="bold",
    )
    shown: dict[str, list[str]] = {}
    for name, source in found.machine.sources.items():
        shown.setdefault(source, []).append(name.removeprefix("roofline."))
    for source, names in shown.items():
        say(f"  {', '.join(names)}: {source}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _limits(found: MachinePlan) -> Table:
    table = _table(
        f"Layers hidden by a decode pass; copying one takes {found.limits[0].copy_s * 1e3:.3f} ms",
        *("tokens", "batch", "layer ms", "whole", "by", "slices", "Eq. 5", "fits"),
    )
    for each in found.limits:
        mark = "bold" if each.rows == found.batch and each.context == found.context else None
        table.add_row(
            str(each.context),
            str(each.rows),
            f"{each.layer_s * 1e3:.3f}",
            f"{each.remapped} ({each.remapped / found.model.layers:.0%})",
            f"{each.selection} {each.buffers}" if each.remapped else "",
            f"{each.slices:.2f}",
            str(each.paper),
            "yes" if each.fits else "no",
            style=mark,
        )
    return table


def _what_if(found: MachinePlan) -> Table:
    table = _table(
        "With N layers remapped and the KV cache full", "layers", "requests", "ms a token", "stall ms", "tokens/s"
    )
    for each in found.what_if:
        table.add_row(
            str(each.remapped),
            str(each.rows),
            f"{each.iteration_s * 1e3:.1f}",
            f"{each.stall_s * 1e3:.1f}",
            f"{each.speedup:.2f}x" if math.isfinite(each.speedup) else "-",
        )
    return table


def _reloads(reloads: Sequence[Reload]) -> Table:
    sizes = [str(tokens) for tokens, _ in reloads[0].hidden]
    title = f"Loading back: layers hidden by a prefill of {' or '.join(sizes)} tokens; how late it is if half are away"
    columns = [column for size in sizes for column in (size, "late ms")]
    table = _table(title, "model", "of", "layer ms", "all ms", *columns)
    for each in reloads:
        cells = [
            cell
            for (_, hidden), (_, late) in zip(each.hidden, each.late_s, strict=True)
            for cell in (f"{hidden} ({hidden / each.layers:.0%})", f"{late * 1e3:.3g}")
        ]
        table.add_row(each.model, str(each.layers), f"{each.layer_s * 1e3:.2f}", f"{each.all_s * 1e3:.0f}", *cells)
    return table


def _donors(donors: Sequence[IdleDonor]) -> Table:
    table = _table(
        "Idle models give: the layers whose reload a prefill of 512 tokens hides, and half",
        *("donor", "layers", "KV tokens", "half", "KV tokens"),
    )
    for each in donors:
        table.add_row(
            each.model,
            str(each.layers_free),
            f"{each.tokens_free:,}",
            str(each.layers_half),
            f"{each.tokens_half:,}",
        )
    return table
