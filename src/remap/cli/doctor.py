"""What `remap doctor` looks at: what the host backend needs, what makes it faster, what the demo needs."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from remap.errors import Error, InvalidArgument

from . import smollm2

__all__ = ["Finding", "findings"]


@dataclass(frozen=True)
class Finding:
    """level: "ok", "note" (works, could be better) or "bad" (does not work). found: what was seen, and what to do."""

    level: str
    what: str
    found: str


def findings() -> Iterator[Finding]:
    """All findings, cheap ones first. Opens a small arena for a moment; changes nothing."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield _arena()
    yield _mappings()
    yield _huge_pages()
    yield _cores()
    for package in ("torch", "transformers"):
        yield _package(package)
    yield _model()


def _arena() -> Finding:
    import remap

    try:
        with remap.Session(capacity="16MiB", device="cpu") as session:
            pages = session.snapshot().pages.total
    except (Error, ImportError) as error:
        return Finding("bad", "host arena", f"{type(error).__name__}: {error}")
    return Finding("ok", "host arena", f"opened 16 MiB in {pages} pages")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _mappings() -> Finding:
    limit = _read("/proc/sys/vm/max_map_count")
    if limit is None:
        return Finding("note", "vm.max_map_count", "not readable; a large arena may meet a limit")
    # A page that is mapped on its own takes a mapping; two views of each, in pages of 2 MiB.
    reach = int(limit) * 2 // 2 // 1024
    return Finding("ok", "vm.max_map_count", f"{limit}: arenas up to about {reach} GiB in 2 MiB pages")


def _huge_pages() -> Finding:
    setting = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if setting is None:
        return Finding("note", "huge pages for shared memory", "not offered by this kernel; 4 KiB pages are used")
    chosen = setting[setting.find("[") + 1 : setting.find("]")]
    if chosen in ("always", "within_size", "advise", "force"):
        return Finding("ok", "huge pages for shared memory", chosen)
    advice = "as root, `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled` makes mapping cheaper"
    return Finding("note", "huge pages for shared memory", f"{chosen}; {advice}")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("note", "cores", "1: copies take their time from the computation")
    return Finding("ok", "cores", str(cores))


def _package(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding("note", name, "not installed; the engine and the demo need it: pip install 'remap[torch,demo]'")
    return Finding("ok", name, metadata.version(name))


def _model() -> Finding:
    try:
        gguf = smollm2.find_gguf()
    except InvalidArgument as error:
        return Finding("note", "demo model", str(error))
    ready = [dtype for dtype in smollm2.DTYPES if smollm2.cached_folder(gguf, dtype).is_dir()]
    state = f"converted: {', '.join(ready)}" if ready else "not converted yet"
    return Finding("ok", "demo model", f"{gguf.name} ({state}; cache {smollm2.cache_root()})")
