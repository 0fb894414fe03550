"""Master copies that find no room in page-locked memory lie in ordinary memory, or are the weights files, and are staged.

On the emulated CUDA driver, which counts the copies of memory that is not page-locked: there must be none.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec

import remap
from remap import _core
from remap.errors import InvalidState, OutOfMemory
from remap.internals import internals
from remap.memory import host_memory

SIZES = [2, 3, 2, 2]
BUDGET = 4 * PAGE  # of page-locked memory: no model here fits


@pytest.fixture
def opened(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens a session on the emulated driver. At the end nothing is left, and no copy was of memory that is not page-locked."""
    emulated.configure(granularity=PAGE, memory=256 << 20, jitter_us=20)
    monkeypatch.setenv("REMAP_LIBCUDA", emulated.path)
    sessions: list[remap.Session] = []

    def build(pages: int = 60, **options: Any) -> remap.Session:
        options = {"host_budget": BUDGET, **options}
        sessions.append(remap.Session(pages * PAGE, page_bytes=PAGE, device="cuda:0", **options))
        return sessions[-1]

    yield build
    for session in sessions:
        session.close()
        assert set(session._backend.usage().values()) == {0}
    sessions.clear()
    assert emulated.pageable() == 0 and emulated.violations() == []


def staged(tenant: remap.Tenant) -> int:
    """Bytes of its master copies that are not page-locked."""
    return sum(nbytes for _, nbytes in internals(tenant)._state.host._staged)


def attach_bytes(session: remap.Session, name: str, tag: int, **options: Any) -> tuple[remap.Tenant, list[bytes]]:
    layers, kv = make_layers(SIZES, tag), make_spec(len(SIZES), max_blocks=600)
    return session.attach_bytes(layers, name=name, kv=kv, **options), layers


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_a_model_beyond_the_budget_streams_from_ordinary_memory(
    opened: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all layers or of none: its passes are planned with one speed. It says so, once."""
    session = opened(mode=mode)
    with caplog.at_level(logging.WARNING, "remap.masters"):
        tenant, layers = attach_bytes(session, "large", 1)
        small = session.attach_bytes(make_layers([1, 1], 2), name="small", kv=make_spec(2, max_blocks=600))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'large'" in line and "host_budget" in line
    nbytes = sum(map(len, layers))
    assert nbytes <= staged(tenant) < nbytes + len(SIZES) * mmap.PAGESIZE  # what lies between counts
    assert staged(small) == 0
    for alpha, buffers in ((2, 1), (1, 2), (0, 1), (2, 1)):
        remap.advanced.remap(session, "large", alpha, buffers=buffers)
        for _ in range(2):
            forward(session, tenant, layers)
        remap.advanced.check(session)


def test_buffers_that_overlap_are_staged_together(opened: Any) -> None:
    whole = mmap.mmap(-1, 4 * PAGE)
    whole[:] = bytes(range(256)) * (4 * PAGE // 256)
    view = memoryview(whole)
    buffers = [view[: 2 * PAGE], view[PAGE : 3 * PAGE + 7], view[3 * PAGE + 7 :], view[: 2 * PAGE].toreadonly()]
    session = opened(host_budget=PAGE)
    tenant = session.attach_bytes(buffers, name="m", kv=make_spec(4, max_blocks=600))
    remap.advanced.remap(session, "m", 2)
    for _ in range(2):
        forward(session, tenant, [bytes(buffer) for buffer in buffers])
    session.detach("m")


def test_what_cannot_be_staged_fails_the_attach_whole(opened: Any) -> None:
    backend = _core.make_fault_backend(_core.make_cuda_backend(host_budget_bytes=BUDGET))
    with remap.Session(60 * PAGE, page_bytes=PAGE, platform=remap.advanced.Platform(backend=backend)) as session:
        backend.arm(_core.Call.register_host, 1)
        with pytest.raises(remap.errors.DriverError):
            attach_bytes(session, "m", 1)
        assert backend.usage()["host_bytes"] == 0 and session.snapshot().pages.free == 60
        backend.disarm()
        assert staged(attach_bytes(session, "m", 1)[0])


# --- models of torch ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A model, and the file that has its weights."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    from models import make, save_weights

    model = make("llama")
    return model, Path(save_weights(model, tmp_path))


def attach(session: remap.Session, model: Any, **options: Any) -> remap.Tenant:
    from models import kv_spec

    return session.attach(model, kv=kv_spec(model, max_blocks=4000), **options)


@pytest.mark.parametrize("from_file", [False, True])
def test_a_torch_model_beyond_the_budget_computes_the_same(opened: Any, saved: Any, from_file: bool) -> None:
    """Its master copies are the mapped file, or else copies in ordinary memory. Detached, it is as it was."""
    import torch
    from models import LAYERS, bytes_of, ids_for, logits_of

    model, path = saved
    ids = ids_for(2, 8)
    expected, before = logits_of(model, ids), bytes_of(model)
    session = opened(70)
    tenant = attach(session, model, weights=path if from_file else None)
    master = internals(tenant)._state.source.keep_alive[0]
    assert sorted(master.files) == (list(range(LAYERS)) if from_file else [])
    assert torch.equal(logits_of(model, ids), expected)  # a whole pass
    for alpha in (3, 0, 4):
        remap.advanced.remap(session, "model", alpha)
        assert torch.equal(logits_of(model, ids), expected)
    session.detach("model")
    assert all(torch.equal(value, before[name]) for name, value in bytes_of(model).items())


def test_a_cold_model_comes_from_its_file_unless_that_has_changed(opened: Any, saved: Any) -> None:
    import torch
    from models import ids_for, logits_of

    model, path = saved
    ids = ids_for(2, 8)
    expected = logits_of(model, ids)
    session = opened(70)
    tenant = attach(session, model, weights=path, active=False, pages="none")
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 10**9))
    with pytest.raises(InvalidState) as caught:
        session.activate("model", alone=True)
    assert caught.value.file == str(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    for _ in range(2):
        assert session.activate("model", alone=True).activated
        assert torch.equal(logits_of(model, ids), expected)
        session.deactivate("model")
    assert staged(tenant)


def test_copies_in_ordinary_memory_need_room_too(opened: Any, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the kernel ends a process for it. The file needs none."""
    model, path = saved
    session = opened(70)
    monkeypatch.setattr(host_memory, "machine_room", lambda: (1000, "cgroup"))
    with pytest.raises(OutOfMemory, match="weights=") as caught:
        attach(session, model)
    assert caught.value.limit == 1000 < caught.value.requested and caught.value.limited_by == "cgroup"
    assert session._backend.usage()["host_bytes"] == 0
    attach(session, model, weights=path)
