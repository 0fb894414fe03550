"""Processes of `test_broker_grants.py`: `python broker_processes.py serve PATH`, or `donor PATH`, told a line at a time."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np

import remap
from remap.broker.server import Broker

PAGE, LAYERS, LAYER_PAGES = 256 << 10, 12, 8
OWN = 8  # layers of the taker
FIRST_BLOCKS = 8
PAGES = (LAYERS + OWN) * LAYER_PAGES + 3
"""Both tenants' weights and first blocks, and nothing more: what one gets the other gives."""


def spec(layers: int) -> remap.KVSpec:
    """A block is an eighth of a page for 8 layers."""
    return remap.KVSpec(
        layers=layers, kv_heads=1, head_dim=64, block_tokens=16, min_blocks=FIRST_BLOCKS, max_blocks=4096
    )


class Donor:
    """A session whose tenant has weights to lend."""

    def __init__(self, path: str) -> None:
        rng = np.random.default_rng(1)
        self.masters = [rng.integers(0, 256, LAYER_PAGES * PAGE, dtype=np.uint8) for _ in range(LAYERS)]
        self.session = remap.Session(device=f"unix:{path}")
        knobs = remap.advanced.Knobs(reserve_blocks=0, min_idle=0.0)
        self.tenant = self.session.attach_bytes(self.masters, name="donor", kv=spec(LAYERS), config=knobs)
        self.verify()

    def verify(self) -> str:
        """A pass, all of whose bytes are compared."""
        with self.tenant.forward():
            for layer, master in enumerate(self.masters):
                self.tenant.wait(layer)
                address = remap.advanced.layer_address(self.session, "donor", layer)
                found = np.frombuffer((ctypes.c_uint8 * master.size).from_address(address), np.uint8)
                if not np.array_equal(found, master):
                    return f"layer {layer} has other bytes"
                self.tenant.done(layer)
        return "right"

    def sleep(self) -> str:
        """Serve nothing from now on."""
        self.session.deactivate("donor")
        return "asleep"

    def wake(self) -> str:
        """Serve again, until all layers are home."""
        self.session.activate("donor")
        while self.session.snapshot().tenants["donor"].streamed:
            self.verify()
        return "home"


class Process:
    """This file in a process of its own; `(...)` says a line and returns the answer."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"

    def __call__(self, verb: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(verb + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


def main(role: str, path: str) -> None:
    made: Any = Broker(path, PAGES * PAGE, PAGE) if role == "serve" else Donor(path)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(getattr(made, line.strip())() + "\n")
        sys.stdout.flush()
    if role == "serve":
        made.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
