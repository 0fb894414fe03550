"""Processes that share a GPU's pages: what joining costs, and a step that gets pages from the broker, over one that has them.

The broker is a process of its own (`remap.broker.server`), which makes the pages; this one imports them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, count, seconds
from bench.gpu.timing import timed

import remap

PROGRAM = (
    "import sys; from remap.broker.server import Broker; Broker(sys.argv[1], *map(int, sys.argv[2:4]), 'cuda:0').wait()"
)
LAYERS, GRANT = 2, 64
STARTED_S = 60.0


@contextmanager
def _broker(pages: int, page_bytes: int) -> Iterator[str]:
    """The socket of a broker in a process of its own, until the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "s"
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), str(pages * page_bytes), str(page_bytes)])
        stack.callback(process.wait)
        stack.callback(process.kill)
        end = time.monotonic() + STARTED_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise Wrong(f"the broker of {pages} pages did not start")
            time.sleep(0.01)
        yield str(path)


def _grow(session: remap.Session, blocks: int) -> float:
    """Seconds of a step that gets so many blocks more, and has them at once."""
    tenant = session.tenants["m"]
    held = tenant.kv.allocate(tenant.kv.free_blocks)
    taken = timed(lambda: session.step({"m": remap.Demand(blocks=blocks)}))
    if tenant.kv.free_blocks < blocks:
        raise Wrong(f"{tenant.kv.free_blocks} blocks came, {blocks} were wanted")
    tenant.kv.free(held)
    return taken


@measure("processes that share a GPU", needs=("driver", "msgspec"), full_s=30, quick_s=10, emulated_s=6)
def sharing_processes(ctx: Context) -> Iterator[Figure]:
    """Opening a session on a broker's pages; growth by 64 pages that the broker has free, and by as many of one's own."""
    page = 2 * MIB
    block_tokens, heads, dim = 16, 8, 128
    spec = remap.KVSpec(
        layers=LAYERS,
        kv_heads=heads,
        head_dim=dim,
        block_tokens=block_tokens,
        dtype="float16",
        min_blocks=1,
        max_blocks=1 << 16,
    )
    config = remap.advanced.Knobs(reserve_blocks=0, max_layers=0)
    masters = [bytes(page)] * LAYERS
    for pages in ctx.pick((1024, 8192), (1024,), (192,)):
        pages = ctx.fit(pages * page, unit=192 * page) // page
        blocks = (GRANT * page) // spec.block_bytes
        joining: list[float] = []
        granted: list[float] = []
        own: list[float] = []
        with _broker(pages, page) as path:
            for _ in ctx.rounds(ctx.pick(5, 3, 3), share=0.5):
                begun = time.monotonic()
                session = remap.Session(device=f"unix:{path}")
                joining.append(time.monotonic() - begun)
                with session:
                    session.attach_bytes(masters, name="m", kv=spec, config=config)
                    granted.append(_grow(session, blocks))
                with remap.Session(pages // 2 * page, device="cuda:0", page_bytes=page) as alone:
                    alone.attach_bytes(masters, name="m", kv=spec, config=config)
                    own.append(_grow(alone, blocks))
        title = f"of {pages} pages of {page // MIB} MiB"
        yield seconds(f"joining a broker {title}", joining, per_page_us=min(joining) / pages * 1e6)
        yield seconds(f"growth by {GRANT} pages that the broker has free, {title}", granted, shown=False)
        yield seconds(f"growth by {GRANT} free pages of one's own, {title}", own, shown=False)
        yield count(f"pages that were granted, {title}", GRANT * len(granted), "pages", n=len(granted))
