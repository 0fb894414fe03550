# SPDX-License-Identifier: Apache-2.0
"""The checks of `remap doctor`: of the host backend and its speed, the GPU, and the packages and model of the demo."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from remap.errors import Error, InvalidArgument
from remap.extras import install
from remap.sizes import show_size

from . import doctor_cuda, smollm2
from .check import Check, read_text

__all__ = ["Check", "checks", "report"]

PAGE_BYTES = 2 << 20


def checks(seen: doctor_cuda.DriverAnswers) -> Iterator[Check]:
    """All checks, the host's first.

    Opens a small arena for a moment; changes nothing. seen: the state of CUDA (`look`).
    """
    yield Check("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield _arena()
    yield mappings(read_text("/proc/sys/vm/max_map_count"), read_text("/proc/meminfo"))
    yield huge_pages(read_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    yield memlock(*resource.getrlimit(resource.RLIMIT_MEMLOCK))
    yield _cores()
    yield from doctor_cuda.checks(seen)
    yield from _packages(gpu=seen.has_gpu)
    yield _model()


def report(seen: doctor_cuda.DriverAnswers, found: list[Check]) -> dict[str, Any]:
    """The report of `remap doctor --json`: {"remap", "ok", "checks": [{level, what, found, fix}], "cuda"}, where "cuda"
    has the probe as it came and the measured links, in bytes and seconds."""
    import remap

    return {
        "remap": remap.__version__,
        "ok": all(check.level != "bad" for check in found),
        "checks": [{"level": f.level, "what": f.what, "found": f.found, "fix": f.fix} for f in found],
        "cuda": seen.as_dict(),
    }


def _arena() -> Check:
    import remap

    try:
        with remap.Session(capacity="16MiB", device="cpu") as session:
            pages = session.snapshot().pages.total
    except (Error, ImportError) as error:
        return Check("bad", "host arena", f"{type(error).__name__}: {error}")
    return Check("ok", "host arena", f"opened 16 MiB in {pages} pages")


def mappings(limit: str | None, meminfo: str | None) -> Check:
    """limit: text of /proc/sys/vm/max_map_count. A page of a host arena (or of the emulated driver) that is mapped on
    its own takes one kernel mapping, and every page has two views; a GPU's driver maps pages in the device's own
    tables."""
    what = "vm.max_map_count"
    if limit is None:
        return Check("note", what, "not readable; a large host arena may meet a limit")
    reach = int(limit) // 2 * PAGE_BYTES
    found = f"{limit}: host arenas up to about {show_size(reach >> 30 << 30)} in {show_size(PAGE_BYTES)} pages"
    rows = [row.split() for row in (meminfo or "").splitlines()]
    memory = next((int(row[1]) * 1024 for row in rows if row[:1] == ["MemTotal:"] and len(row) > 1), 0)
    if memory > reach:
        needed = -(-memory // PAGE_BYTES) * 2
        fix = (
            f"for an arena of {show_size(memory)}: as root, `sysctl -w vm.max_map_count={needed}`; or larger page_bytes"
        )
        return Check("note", what, found, fix)
    return Check("ok", what, found)


def huge_pages(setting: str | None) -> Check:
    """setting: the kernel's line such as "always within_size advise [never] deny force"."""
    what = "huge pages for shared memory"
    if setting is None:
        return Check("note", what, "not offered by this kernel; host arenas use 4 KiB pages")
    chosen = setting[setting.find("[") + 1 : setting.find("]")]
    if chosen in ("always", "within_size", "advise", "force"):
        return Check("ok", what, chosen)
    advice = "as root, `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled` makes mapping cheaper"
    return Check("note", what, chosen, advice)


def memlock(soft: int, hard: int) -> Check:
    """soft, hard: RLIMIT_MEMLOCK in bytes, or resource.RLIM_INFINITY."""
    if soft == resource.RLIM_INFINITY:
        return Check("ok", "memlock", "unlimited")
    most = "unlimited" if hard == resource.RLIM_INFINITY else show_size(hard)
    return Check(
        "ok",
        "memlock",
        f"{show_size(soft)} (at most {most}); page-locking goes through the GPU's driver, which does not count against "
        "it",
        "a NIC's own registrations (RDMA) do count: for those, `ulimit -l unlimited` before the process starts",
    )


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Check("note", "cores", "1: on the CPU, copies take their time from the computation")
    return Check("ok", "cores", str(cores))


def _packages(gpu: bool) -> Iterator[Check]:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            fix = f"the engine and the demo need it: {install('torch' if name == 'torch' else 'demo')}"
            yield Check("note", name, "not installed", fix)
        elif name == "torch" and gpu:
            import torch  # takes seconds, so only here: the version alone does not say whether it was built for CUDA

            yield torch_build(torch.__version__, torch.version.cuda)
        else:
            yield Check("ok", name, metadata.version(name))


def torch_build(version: str, cuda: str | None) -> Check:
    """torch beside a GPU. version, cuda: `torch.__version__` and `torch.version.cuda`, None in a build without CUDA."""
    if cuda is None:
        fix = "models on a GPU need a build with CUDA (https://pytorch.org/get-started); attach_bytes needs no torch"
        return Check("note", "torch", f"{version}, built without CUDA", fix)
    return Check("ok", "torch", f"{version}, built for CUDA {cuda}")


def _model() -> Check:
    try:
        gguf = smollm2.find_gguf()
    except InvalidArgument as error:
        return Check("note", "demo model", str(error))
    ready = [dtype for dtype in smollm2.DTYPES if smollm2.cached_folder(gguf, dtype).is_dir()]
    state = f"converted: {', '.join(ready)}" if ready else "not converted yet"
    return Check("ok", "demo model", f"{gguf.name} ({state}; cache {smollm2.cache_root()})")
