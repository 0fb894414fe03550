# SPDX-License-Identifier: Apache-2.0
"""The features that are not served, found in vLLM's configuration: before any worker starts, and again in each worker.

In front of the workers the error is the last line that a user sees; a worker's is far up in the log. The check needs
nothing of vLLM's but the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from remap.errors import InvalidState

__all__ = ["HOST_KV", "UNSERVED", "refuse_unserved"]

HOST_KV = ("remap.adapters.vllm.host_kv", "HostKV")
"""The module and the name of the only offloading spec that is served, see `host_kv`."""


class Unserved(NamedTuple):
    """what: its name. found: the configuration's value if it is used, else None or False. why: a half sentence."""

    what: str
    found: Callable[[Any], Any]
    why: str


def _other(cache: Any) -> str | None:
    """A kind of KV cache that has more than a number for each element."""
    plain = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    return None if cache.cache_dtype in plain else str(cache.cache_dtype)


def _connector(config: Any) -> Any:
    """The KV connector, unless it is vLLM's OffloadingConnector with HOST_KV, or `_between_servers` has it."""
    transfer, size = config.kv_transfer_config, config.cache_config.kv_offloading_size
    if transfer is None:
        return size
    spec = tuple(transfer.kv_connector_extra_config.get(name) for name in ("spec_module_path", "spec_name"))
    ours = transfer.kv_connector == "OffloadingConnector" and spec == HOST_KV
    return None if ours or _between_servers(config) else transfer.kv_connector


def _between_servers(config: Any) -> str | None:
    """A connector over which another server reads or writes this one's blocks (prefill and decode apart)."""
    name = getattr(config.kv_transfer_config, "kv_connector", None) or ""
    return name if name.startswith(("Nixl", "MooncakeConnector", "MoRIIO")) else None


def _drafter(config: Any) -> str | None:
    """The way of speculation, unless it was tried."""
    found = config.speculative_config
    return None if found is None or found.method in DRAFTERS else str(found.method)


DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Ways of speculation that were tried. The drafter's own layers stay where they are."""
UNSERVED = (
    Unserved(
        "pipeline parallelism",
        lambda c: c.parallel_config.pipeline_parallel_size > 1 and c.parallel_config.pipeline_parallel_size,
        "a stage has only some of the layers, and several batches are under way when the scheduler changes the blocks",
    ),
    Unserved(
        "speculative decoding",
        _drafter,
        f"it was not tried; served are {', '.join(DRAFTERS)}",
    ),
    Unserved(
        "prefill and decode on different servers",
        _between_servers,
        "the connector registers the KV cache's memory with the network once, and the other server reads blocks by ids that "
        "it was told; needed are memory registered page by page as layers leave and come home, and blocks that neither move "
        "nor leave until the other server has read them",
    ),
    Unserved(
        "a KV connector",
        _connector,
        "it copies blocks by addresses and ids that it keeps; only OffloadingConnector is served, with spec_module_path "
        f"{HOST_KV[0]} and spec_name {HOST_KV[1]}",
    ),
    Unserved(
        "--cpu-offload-gb",
        lambda c: c.offload_config.uva.cpu_offload_gb,
        "vLLM's own offloader would move the same weights, and remap takes its place; REMAP_CAPACITY says how much memory "
        "weights and KV cache may take",
    ),
    Unserved(
        "--offload-group-size",
        lambda c: c.offload_config.prefetch.offload_group_size,
        "vLLM's own offloader would stream the same layers, and remap takes its place; REMAP_CAPACITY says how much memory "
        "weights and KV cache may take",
    ),
    Unserved(
        "--kv-cache-dtype",
        lambda c: _other(c.cache_config),
        "it has scales beside its numbers; auto, float16, bfloat16, fp8, fp8_e4m3 and fp8_e5m2 are served",
    ),
    Unserved(
        "--enable-eplb", lambda c: c.parallel_config.enable_eplb, "it moves experts' weights past their master copies"
    ),
    Unserved(
        "--enable-elastic-ep",
        lambda c: c.parallel_config.enable_elastic_ep,
        "it moves experts' weights past their master copies",
    ),
    Unserved(
        "dual-batch overlap", lambda c: c.parallel_config.use_ubatching, "two halves of a batch run at different layers"
    ),
    Unserved(
        "--enable-sleep-mode", lambda c: c.model_config.enable_sleep_mode, "it unmaps the memory that layers lie in"
    ),
    Unserved(
        "a model that answers by diffusion",
        lambda c: c.diffusion_config is not None,
        "vLLM has a scheduler of its own for it, and remap takes the scheduler's place",
    ),
)


def refuse_unserved(vllm_config: Any, platform: Any) -> None:
    """Raises InvalidState (fields unserved: names, found: their values) for a configuration that is not served.

    platform: vLLM's `current_platform`.
    """
    found = [(each, value) for each in UNSERVED if (value := each.found(vllm_config))]
    names = [(each.what if value is True else f"{each.what} ({value})", each.why) for each, value in found]
    if not (platform.is_cpu() or platform.is_cuda()):
        device = str(platform.device_name)
        found.append((Unserved(device, lambda c: True, ""), device))
        names.append((f"vLLM on {device}", "the arena has a backend for NVIDIA GPUs and one for processors"))
    if found:
        raise InvalidState(
            f"remap's vLLM adapter does not serve {'; nor '.join(f'{name}: {why}' for name, why in names)}; the engine was "
            "not started; start it without, or unset REMAP_ENABLE",
            unserved=tuple(each.what for each, _ in found),
            found=tuple(value for _, value in found),
        )
