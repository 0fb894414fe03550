"""What cannot be served is refused with a typed error and numbers, and the next engine of the process starts all the same."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Vllm
from test_tokens import BURST, LITTLE, answers, assert_remapped, remap, stock


def refused(name: str, *, settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    run = {**remap(name, []), "refused": True, **more}
    run["engine"] = {**LITTLE, **more.get("engine", {})}
    return {**run, "settings": settings or {}}


@pytest.fixture(scope="module")
def tried(vllm: Vllm) -> Any:
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(vllm.folder / "kv")}  # type: ignore[assignment]
    return vllm.serve(
        [
            stock("plenty", [BURST]),
            refused("version", version="0.11.1"),
            refused("capacity", settings={"capacity": "20MiB"}),
            refused("slowdown", settings={"slowdown": "fast"}),
            refused("arena", settings={"arena": "two", "capacity": "60MiB", "page_bytes": "16MiB"}),
            refused("scheduler", engine={"scheduler_cls": None}),
            refused("connector", engine={"kv_transfer_config": connector}),
            refused("offload", engine={"cpu_offload_gb": 1}),
            refused("groups", engine={"offload_group_size": 2}),
            refused("override", engine={"num_gpu_blocks_override": 600}),
            {**remap("remap", [BURST]), "version": "0.99.1"},  # newer than known: with a warning
        ]
    )


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("version", "InvalidState", ["0.11.1", "0.32", "nothing was changed"]),
        ("capacity", "InvalidArgument", [str(20 << 20), "REMAP_CAPACITY", "not started"]),
        ("slowdown", "InvalidArgument", ["REMAP_SLOWDOWN", "'fast'"]),
        ("scheduler", "InvalidState", ["--scheduler-cls", "vllm.v1.core", "not started"]),
        ("connector", "InvalidState", ["a KV connector", "not started"]),
    ],
)
def test_refused(tried: Any, name: str, error: str, words: list[str]):
    found = tried[name]
    assert found.get("error") == error, found.get("trace")
    for word in words:
        assert word in found["text"]


def test_an_arena_in_which_nothing_could_move_is_refused(tried: Any):
    assert tried["arena"]["error"] in ("InvalidArgument", "InvalidState", "OutOfMemory"), tried["arena"]["trace"]


def test_the_next_engine_starts_all_the_same(tried: Any):
    assert_remapped(tried["remap"])
    assert answers(tried["remap"]) == answers(tried["plenty"])


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        ("offload", "--cpu-offload-gb", 1.0),
        ("groups", "--offload-group-size", 2),
    ],
)
def test_what_vllm_was_told_and_remap_would_not_do_is_refused(tried: Any, name: str, what: str, value: object):
    assert tried[name].get("error") == "InvalidState", tried[name].get("trace")
    assert tried[name]["fields"] == {"unserved": str((what,)), "found": str((value,))}


def test_pipeline_parallelism_is_refused_in_front_of_the_workers(vllm: Vllm):
    """The process that the user started raises the error itself: no line of a worker's log comes after it."""
    run = refused("pipeline", engine={"pipeline_parallel_size": 2})
    found = vllm.serve([run], VLLM_ENABLE_V1_MULTIPROCESSING="1", REMAP_ENABLE="1")["pipeline"]
    assert found["error"] == "InvalidState", found["trace"]
    assert found["fields"]["unserved"] == str(("pipeline parallelism",))
