"""What the figures depend on: GPU, driver, clocks, link, processor, versions. No names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["ENGINES", "describe", "engines", "gpu_state", "slug", "versions"]

PACKAGES = (
    "torch", "triton", "transformers", "accelerate", "diffusers", "flashinfer-python", "vllm", "sglang", "cuda-bindings",
    "cuda-core", "numpy", "pybind11",
)  # fmt: skip

# What a run may find and use, by the name that is imported; each run says which of them it found, and what it ran of them.
ENGINES = ("torch", "triton", "transformers", "flashinfer", "vllm", "sglang", "accelerate", "diffusers")

# What nvidia-smi is asked, and the name under which the answer is kept. Units as nvidia-smi gives them with `nounits`.
_QUERY = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory_total_mib",
    "memory.used": "memory_used_mib",
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.mem": "memory_mhz",
    "clocks_event_reasons.active": "clocks_event_reasons",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "utilization.gpu": "utilization_percent",
    "pcie.link.gen.current": "pcie_generation",
    "pcie.link.gen.max": "pcie_generation_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
    "persistence_mode": "persistence_mode",
    "ecc.mode.current": "ecc",
    "mig.mode.current": "mig",
}


def gpu_state(pcie: tuple[int, int, int] | None = None) -> dict[str, Any]:
    """nvidia-smi's view of one GPU now; {"unavailable": why} where it cannot be had.

    pcie: (domain, bus, device), so that CUDA_VISIBLE_DEVICES and nvidia-smi's own order do not matter; None: the first GPU.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"unavailable": "there is no nvidia-smi"}
    which = "0" if pcie is None else f"{pcie[0]:08X}:{pcie[1]:02X}:{pcie[2]:02X}.0"
    state: dict[str, Any] = {}
    keys = list(_QUERY)
    answer = _ask(tool, which, keys)
    if answer is None:  # an older nvidia-smi refuses the whole query for one unknown key
        for key in keys:
            one = _ask(tool, which, [key])
            if one is not None:
                state[_QUERY[key]] = one[0]
    else:
        state = {_QUERY[key]: value for key, value in zip(keys, answer)}
    return {name: _number(value) for name, value in state.items()} or {"unavailable": "nvidia-smi answered nothing"}


def _ask(tool: str, which: str, keys: list[str]) -> list[str] | None:
    command = [tool, "-i", which, f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
    return values if done.returncode == 0 and len(values) == len(keys) else None


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter here; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def engines() -> dict[str, str | None]:
    """The version of each of ENGINES; None where it is not installed."""
    known = versions()
    return {name: known.get("flashinfer-python" if name == "flashinfer" else name) for name in ENGINES}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _after_colon(lines: list[str], key: str) -> str | None:
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def describe() -> dict[str, Any]:
    """The host's side. Sizes in bytes."""
    limit = next(iter(_lines("/sys/fs/cgroup/memory.max")), "")
    return {
        "cpu": _after_colon(_lines("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cgroup_memory_bytes": int(limit) if limit.isdigit() else None,
        "kernel": platform.release(),
        "max_map_count": next(iter(_lines("/proc/sys/vm/max_map_count")), None),
        "transparent_huge_pages": next(iter(_lines("/sys/kernel/mm/transparent_hugepage/enabled")), None),
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": versions(),
    }


def slug(name: str) -> str:
    """A name that can be part of a file's name: "A GPU, 80GB" -> "a-gpu-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"
