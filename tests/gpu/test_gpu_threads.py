"""Threads and devices: a context is nobody's duty but the backend's, and sessions do not disturb each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from bench.gpu.tenants import device_tenant
from conftest import program
from rig import Reader, one_pass

import remap

PASSES = 12


def _on_threads(*bodies: Callable[[], None]) -> None:
    """Each on a thread of its own; what one raises is raised here."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        for each in [threads.submit(body) for body in bodies]:
            each.result(120)


def _use(tenant: Any, marks: Any, seed: int) -> None:
    rng = random.Random(seed)
    with Reader(tenant, PASSES * tenant.layers) as reader:
        for _ in range(PASSES):
            remap.advanced.remap(tenant.session, "raw", rng.randrange(5), 1)
            one_pass(tenant, reader, tenant.stream, tenant.handle)
        reader.end(marks, tenant.handle)
        remap.advanced.check(tenant.session)


def test_two_threads_with_a_session_each(context: Any) -> None:
    def serve(seed: int) -> None:
        """A session of this thread's own: opened, changed and closed here."""
        with device_tenant(context, 6, 2 << 20) as (tenant, marks):
            _use(tenant, marks, seed)

    _on_threads(partial(serve, 1), partial(serve, 2))


def test_a_session_is_used_from_a_thread_without_a_context(raw: Any) -> None:
    """Opened on one thread; passes and changes on another, which has never made a CUDA call."""
    _on_threads(partial(_use, *raw, 3))


SECOND_DEVICE = """
import ctypes
import threading
import numpy as np
import remap
from bench.gpu.driver import Driver
from remap import _core

SIZE = 1 << 20
seen = []

def use():
    spec = remap.KVSpec(layers=3, kv_heads=1, head_dim=64, min_blocks=1, max_blocks=4000)
    layers = [np.full(SIZE, value, np.uint8) for value in range(3)]
    backend = _core.make_cuda_backend(1)
    with Driver(device=1) as driver, driver.stream() as stream:
        host, event = backend.allocate_host(SIZE), backend.create_event()
        with remap.Session("32MiB", device="cuda:1", platform=remap.advanced.Platform(backend=backend)) as session:
            tenant = session.attach_bytes(layers, name="raw", kv=spec)
            remap.advanced.remap(session, "raw", 1, 1)
            handle = backend.adopt_stream(stream)
            with tenant.forward(stream=stream):
                for layer in range(3):
                    tenant.wait(layer)
                    backend.copy(handle, host, remap.advanced.layer_address(session, "raw", layer), SIZE)
                    tenant.done(layer)
                    backend.record(event, handle)
                    assert backend.synchronize(event, 20.0)
                    seen.append(set(ctypes.string_at(host, SIZE)) == {layer})
        backend.destroy_event(event)
        backend.free_host(host, SIZE)
    seen.append(backend.device_index == 1)

if len(_core.probe_cuda()["devices"]) < 2:
    print("one device")
else:
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    print("second device", seen)
"""


def test_another_device_from_another_thread(gpu: Any) -> None:
    said = program(SECOND_DEVICE, REMAP_EMULATED_DEVICES="2")
    if said == "one device":
        pytest.skip("there is one GPU")
    assert said == f"second device {[True] * 4}"
