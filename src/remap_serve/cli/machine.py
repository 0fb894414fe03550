# SPDX-License-Identifier: Apache-2.0
"""The facts about the machine that measured numbers depend on. They contain no names of hosts or folders."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import remap
from remap.sizes import show_size

__all__ = ["machine_info", "machine_now"]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _field(rows: list[str], name: str, separator: str) -> str:
    values = (row.split(separator, 1)[1] for row in rows if row.startswith(name) and separator in row)
    return next(values, "unknown").strip().strip('"')


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine_info() -> dict[str, Any]:
    """The facts that do not change while the machine runs: processor, memory, system, versions."""
    memory = _field(_lines("/proc/meminfo"), "MemTotal", ":").split()
    return {
        "cpu": _field(_lines("/proc/cpuinfo"), "model name", ":"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": show_size(int(memory[0]) * 1024) if memory[0].isdigit() else "unknown",
        "os": _field(_lines("/etc/os-release"), "PRETTY_NAME", "="),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "remap": remap.__version__,
    }


def machine_now() -> dict[str, Any]:
    """`machine_info`, and facts that may change: the load of the last minute, and huge pages for shared memory."""
    huge = _lines("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        **machine_info(),
        "shmem_huge_pages": huge[0] if huge else "unknown",
        "load_1min": round(os.getloadavg()[0], 2),
    }
