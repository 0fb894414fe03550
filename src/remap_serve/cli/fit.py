# SPDX-License-Identifier: Apache-2.0
"""`remap fit`: makes a machine's table entry from measurements of it (`remap_serve.sim.fit`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from remap.cli.errors import exit_on_error, needed, writable
from remap.cli.options import Json, print_json
from remap.errors import InvalidArgument

__all__ = ["fit_command"]


def fit_command(
    measurements: Annotated[Path, typer.Argument(help="The file that `python -m bench.lab machine` wrote.")],
    name: Annotated[str, typer.Option(help="Name of the machine, for --machine.")],
    out: Annotated[Path, typer.Option(help="JSON file for the machine's table entry.")],
    like: Annotated[
        str | None, typer.Option(help="A known machine, for constants that were not measured.", show_default="none")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a machine's constants to measurements of it, and write a table for `remap plan --tables`."""
    from remap_serve.sim.fit import POOR_MISFIT, fit

    console = Console(soft_wrap=True)
    with exit_on_error():
        writable(out)
        needed("scipy", "sim", "`remap fit`")
        found = fit(_read(measurements), name, like)
        _write(out, found.document())
    if as_json:
        print_json({**found.document(), "errors": found.errors, "points": found.points, "poor": found.poor})
        return
    for group, off in found.errors.items():
        text = f"{group.replace('_', ' '):18} {found.points[group]:4} points, off by {off:.1%} on average"
        console.print(text, markup=False, highlight=False)
    for group, off in found.poor.items():
        text = (
            f"warning: {group.replace('_', ' ')} is off by {off:.1%}, more than {POOR_MISFIT:.0%}: plans for this "
            "machine may be off as much; measure again on a quiet machine"
        )
        Console(stderr=True, soft_wrap=True).print(text, style="yellow", markup=False, highlight=False)
    figures, roofline = found.entry["figures"], found.entry["roofline"]
    console.print(
        f"link {figures['h2d_bytes_per_s']['value'] / 1e9:.1f} GB/s to the device, memory "
        f"{figures['hbm_bytes_per_s']['value'] / 1e9:.1f} GB/s x {roofline['eff_bw']:.2f}, "
        f"{figures['flops']['value'] / 1e12:.3g} TFLOP/s x {roofline['eff_flops']:.2f}, p {roofline['p']:.2f}, "
        f"{roofline['op_overhead_s'] * 1e6:.1f} us an operator",
        markup=False,
        highlight=False,
    )
    console.print(f"written to {out}; next: remap plan --machine {name} --tables {out} --model ...", markup=False)


def _write(path: Path, document: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(
            f"out: {path} cannot be written ({error.strerror}); name another file", field="out", value=str(path)
        ) from error


def _read(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(
            f"measurements: {path} cannot be read ({error.strerror}); nothing was fitted; correct the path",
            field="measurements",
            value=str(path),
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"measurements: {path} is not JSON ({error}); nothing was fitted; measure again",
            field="measurements",
            value=str(path),
        ) from error
    return found
