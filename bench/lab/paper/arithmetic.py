"""Oneiros, Fig 4b: how many layers a decoding pass hides. Arithmetic of the roofline; nothing is served."""

from __future__ import annotations

import math

from remap.policy.hardware import Machine, model
from remap_serve.sim.roofline import Roofline

__all__ = ["arithmetic"]


def arithmetic(machine: Machine, name: str = "OPT-13b", context: int = 512) -> list[dict[str, float]]:
    """For decoding batches of 1 to 256 the seconds of a layer, of a pass, of loading a layer and of swapping its KV in,
    and how many layers can be loaded within a pass through two buffers ((alpha + 2) loads <= the pass, Eq. 5)."""
    found = []
    chosen = model(name)
    roofline = Roofline(machine, chosen)
    load_s = machine.copy_setup_s + chosen.layer_bytes / machine.h2d_bytes_per_s
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        layer_s = roofline.layer_s(0, 0, batch, batch * context)
        pass_s = chosen.layers * layer_s + roofline.ends_s(batch, batch)
        found.append(
            {
                "batch": batch,
                "layer_s": _five(layer_s),
                "pass_s": _five(pass_s),
                "load_s": _five(load_s),
                "kv_layer_s": _five(
                    machine.copy_setup_s + batch * context * chosen.kv_bytes_per_token_layer / machine.h2d_bytes_per_s
                ),
                "hidden": max(0, min(chosen.layers - 2, math.floor(pass_s / load_s) - 2)),
            }
        )
    return found


def _five(value: float) -> float:
    return float(f"{value:.5g}")
