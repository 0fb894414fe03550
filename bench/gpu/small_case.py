"""A small session that uses everything that touches device memory: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python -m bench.gpu.small_case

Kernels of torch read the layers and write KV blocks, if torch is there; otherwise the driver's own copies and fills do.
"""

from __future__ import annotations

import sys

import remap

from .context import MIB, Context
from .registry import Wrong, missing
from .tenants import DeviceTenant, device_tenant

__all__ = ["main"]

LAYERS = 4


def main() -> int:
    """Exit status 0 if all bytes were right."""
    ctx = Context(quick=True, emulated=False)
    with device_tenant(ctx, LAYERS, 4 * MIB) as (raw, marks):
        kernels = missing("torch-cuda", emulated=False) is None
        for alpha, buffers in ((0, 1), (1, 1), (2, 2), (3, 1), (0, 1)):
            remap.advanced.remap(raw.session, "raw", alpha, buffers)
            blocks = raw.tenant.kv.allocate(raw.tenant.kv.free_blocks)
            if kernels:
                _with_torch(raw, blocks)
            raw.run()
            marks.wait(marks.mark(raw.handle))
            marks.reset()
            raw.tenant.kv.free(blocks)
            raw.verify(marks)
        raw.session.step({"raw": remap.Demand(blocks=1)})
        raw.verify(marks)
    return 0


def _with_torch(raw: DeviceTenant, blocks: list[int]) -> None:
    """A pass whose kernels sum up the layers' bytes and fill KV blocks, which must then hold what was written."""
    import torch

    session = raw.session
    stream = torch.cuda.ExternalStream(raw.stream)
    total = torch.zeros(1, device="cuda")
    torch.cuda.current_stream().synchronize()
    tensors = raw.tenant.kv.tensors
    ids = torch.tensor(blocks, device="cuda")
    torch.cuda.current_stream().synchronize()

    def layer(index: int) -> None:
        weights = session._memory(remap.advanced.layer_address(session, "raw", index), raw.layer_bytes)
        total.add_(weights.sum())
        tensors[index][:, ids] = float(index)

    with torch.cuda.stream(stream):
        raw.run(layer)
    stream.synchronize()
    for index, tensor in enumerate(tensors):
        if not bool((tensor[:, ids] == index).all()):
            raise Wrong(f"layer {index}: KV blocks do not hold what was written")


if __name__ == "__main__":
    sys.exit(main())
