"""What a machine's table entry needs, measured; `remap fit` makes the entry of it (`remap_serve.sim.fit`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remap.cli.errors import Missing
from remap.errors import InvalidArgument
from remap.extras import install

from .operators import Operators, Sizes, flops_of

__all__ = ["measure", "need_torch", "write"]

MIB = 1 << 20
CPU_QUICK = Sizes(
    shapes=((512, 512), (1024, 3072), (4096, 4096)),
    tokens=(1, 4, 16, 64, 256),
    decode=((1, 512), (4, 512), (8, 1024)),
    prefill=(256, 512),
    other=(1, 64, 256),
    heads=16,
    head_dim=64,
    cache_bytes=96 * MIB,
    stream_bytes=128 * MIB,
    least_s=0.1,
)
CPU_FULL = Sizes(
    shapes=((512, 512), (1024, 3072), (2048, 2048), (4096, 1024), (2048, 8192), (8192, 4096)),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    decode=((1, 512), (4, 512), (16, 512), (8, 1024), (16, 2048)),
    prefill=(256, 512, 1024),
    other=(1, 16, 64, 256, 512),
    heads=16,
    head_dim=64,
    cache_bytes=192 * MIB,
    stream_bytes=256 * MIB,
    least_s=0.5,
)
CUDA_QUICK = Sizes(
    shapes=((4096, 6144), (4096, 4096), (14336, 4096)),
    tokens=(1, 8, 32, 64, 128, 256, 512, 1024, 4096),
    decode=((1, 512), (16, 512), (16, 2048), (64, 2048)),
    prefill=(512, 2048),
    other=(1, 64, 512, 2048),
    heads=32,
    head_dim=128,
    cache_bytes=512 * MIB,
    stream_bytes=1024 * MIB,
    least_s=0.03,
)
CUDA_FULL = Sizes(
    shapes=((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (5120, 15360), (5120, 20480), (20480, 5120)),
    tokens=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096),
    decode=((1, 512), (4, 512), (16, 512), (64, 512), (16, 2048), (64, 2048), (128, 2048)),
    prefill=(256, 512, 1024, 2048, 4096),
    other=(1, 16, 64, 256, 512, 1024, 2048, 4096),
    heads=32,
    head_dim=128,
    cache_bytes=1024 * MIB,
    stream_bytes=4096 * MIB,
    least_s=0.1,
)
COPY_SIZES = {True: (1, 4, 16, 64), False: (1, 2, 4, 8, 16, 32, 64, 128, 256)}  # MiB, by --quick


def measure(
    device: str, *, quick: bool, dtype: str | None = None, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measurements of this machine in the form that `remap_serve.sim.fit` takes. device: "cpu" or "cuda:N"; dtype: a name of
    torch's, by default bfloat16 on CUDA and float32 on the CPU.

    Raises InvalidArgument (field) for a bad device or dtype, Missing without torch or its CUDA, DriverError where a
    result is wrong or a device does not answer.
    """
    from remap.memory import device as devices

    name = devices.parse(device)
    torch = need_torch(name.kind == "cuda")
    chosen = dtype or ("bfloat16" if name.kind == "cuda" else "float32")
    if chosen not in ("float32", "bfloat16", "float16"):
        raise InvalidArgument(
            f"dtype must be float32, bfloat16 or float16, got {chosen!r}; nothing was measured",
            field="dtype",
            value=chosen,
        )
    tell = say or (lambda _: None)
    from .copies import backend_of, measure_copies, measure_pages

    cuda = name.kind == "cuda"
    sizes = (CUDA_QUICK if quick else CUDA_FULL) if cuda else (CPU_QUICK if quick else CPU_FULL)
    about = _about(torch, str(name), cuda)
    tell(f"{about['device']}, {chosen}, {'quick' if quick else 'full'}")
    found: dict[str, Any] = {"kind": "remap machine", "version": 1, "about": about, "dtype": chosen}
    with torch.inference_mode():
        operators = Operators(str(name), chosen, sizes)
        found["dtype_bytes"] = operators.element
        found["memory_bytes"] = about.pop("memory_bytes")
        found["link"] = "memory of the host" if not cuda else f"{about['device']}'s link to its host"
        found["memory_bytes_per_s"] = operators.stream_bytes_per_s()
        tell(f"memory {found['memory_bytes_per_s'] / 1e9:.1f} GB/s, read and written")
        found["linear"] = operators.linear()
        found["flops"] = flops_of(found["linear"])
        tell(f"{len(found['linear'])} linear operators, up to {found['flops'] / 1e12:.3g} TFLOP/s")
        for group in ("decode_attention", "prefill_attention", "other_ops"):
            found[group] = getattr(operators, group)()
            tell(f"{len(found[group])} of {group.replace('_', ' ')}")
    pages = 16 if quick else 64
    backend = backend_of(str(name), 2 * MIB * max(max(COPY_SIZES[quick]), pages))
    found |= measure_copies(backend, [size * MIB for size in COPY_SIZES[quick]], repeats=5 if quick else 15)
    for way in ("h2d", "d2h"):
        last = found[way][-1]
        tell(f"{way} {last['bytes'] / last['seconds'] / 1e9:.1f} GB/s with {last['bytes'] // MIB} MiB")
    found["pages"] = measure_pages(backend, pages)
    return found


def need_torch(cuda: bool) -> Any:
    """torch. Raises Missing where it is not installed, or does not reach the GPU that is asked for."""
    try:
        import torch
    except ImportError as error:
        raise Missing(
            "`bench.lab machine` measures with torch, which is not installed; nothing was measured; " + install("torch")
        ) from error
    if cuda and not torch.cuda.is_available():
        raise Missing(
            "this torch reaches no GPU; nothing was measured; install torch for CUDA, or measure with --device cpu"
        )
    return torch


def _about(torch: Any, device: str, cuda: bool) -> dict[str, Any]:
    from remap_serve.cli.machine import machine_now

    found = machine_now()
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "memory_bytes": int(properties.total_memory), "cuda": torch.version.cuda}
    else:
        import os

        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found |= {
            "device": f"{found['cpu']}, {torch.get_num_threads()} threads",
            "memory_bytes": int(memory),
        }
    return {**found, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def write(path: Path, document: Any) -> None:
    """As JSON, into a folder that is made. Raises InvalidArgument (field out) where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(
            f"out: {path} cannot be written ({error.strerror}); name another file", field="out", value=str(path)
        ) from error
