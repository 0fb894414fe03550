"""What remap costs while nothing happens: session.step, and wait + done of a layer that is there."""

from __future__ import annotations

import time

import pytest
from measure import RawTenant, median, record, seconds_of

import remap
from remap.internals import internals

LAYERS = 12
LAYER_BYTES = 256 << 10
ITERATIONS = 100


def _tenant(alpha: int, buffers: int = 2) -> RawTenant:
    raw = RawTenant(LAYERS, LAYER_BYTES, page_bytes=64 << 10)
    for _ in range(2):
        with raw.tenant.forward():
            for layer in range(LAYERS):
                raw.tenant.wait(layer)
                time.sleep(0.001)
                raw.tenant.done(layer)
    remap.advanced.remap(raw.session, "raw", alpha, buffers, "nested")
    raw.verify()
    return raw


@pytest.mark.parametrize("alpha", [0, 4])
def test_step_with_nothing_to_do(benchmark, alpha):
    with _tenant(alpha) as raw:
        # With layers remapped nearly all blocks are in use: otherwise the step would rightly give layers back.
        raw.tenant.kv.allocate(max(0, raw.tenant.kv.free_blocks - 1))
        step, epoch = raw.session.step, raw.session.snapshot().epoch

        def steps() -> None:
            for _ in range(ITERATIONS):
                step({"raw": remap.Demand(blocks=0)})

        steps()
        benchmark.pedantic(steps, rounds=300, warmup_rounds=10)
        assert raw.session.snapshot().epoch == epoch
        each = [seconds / ITERATIONS for seconds in seconds_of(benchmark)]
        record(
            benchmark,
            f"session.step with nothing to do, alpha = {alpha}",
            median(each) * 1e6,
            "us",
            each,
            target=10.0 if alpha == 0 else None,
        )


@pytest.mark.parametrize("whose", ["kv", "pool"])
def test_allocate_and_free_a_block(benchmark, whose):
    """kv: as engines call it, with the locks that keep a change of another thread away. pool: the books alone."""
    with _tenant(0) as raw:
        blocks = raw.tenant.kv if whose == "kv" else internals(raw.tenant).kv.pool
        free = blocks.free_blocks

        def pairs() -> None:
            for _ in range(ITERATIONS):
                blocks.free(blocks.allocate(1))

        benchmark.pedantic(pairs, rounds=300, warmup_rounds=10)
        assert blocks.free_blocks == free
        each = [seconds / ITERATIONS for seconds in seconds_of(benchmark)]
        record(benchmark, f"allocate + free of one block, {whose}", median(each) * 1e6, "us", each)


@pytest.mark.parametrize("alpha", [0, 4])
def test_wait_and_done_of_a_resident_layer(benchmark, alpha):
    with _tenant(alpha) as raw, raw.tenant.forward():
        wait, done = raw.tenant.wait, raw.tenant.done
        layer = next(layer for layer in range(LAYERS) if layer not in raw.tenant.streamed)
        for streamed in raw.tenant.streamed:  # the pass has to come by them
            wait(streamed)
            done(streamed)

        def pairs() -> None:
            for _ in range(ITERATIONS):
                wait(layer)
                done(layer)

        benchmark.pedantic(pairs, rounds=300, warmup_rounds=10)
        each = [seconds / ITERATIONS for seconds in seconds_of(benchmark)]
        record(
            benchmark,
            f"wait + done of a resident layer, alpha = {alpha}",
            median(each) * 1e6,
            "us",
            each,
            target=1.0,
        )


def test_wait_and_done_of_a_streamed_layer_that_has_arrived(benchmark):
    with _tenant(4) as raw:
        tenant = raw.tenant
        passes: list[object] = []
        turn = iter(())

        def setup():
            nonlocal turn
            layer = next(turn, None)
            if layer is None:
                if passes:
                    passes.pop().__exit__(None, None, None)
                passes.append(tenant.forward())
                passes[0].__enter__()
                turn = iter(tenant.streamed)
                layer = next(turn)
            time.sleep(0.001)  # a copy takes a tenth of that
            return (layer,), {}

        def pair(layer: int) -> None:
            tenant.wait(layer)
            tenant.done(layer)

        benchmark.pedantic(pair, setup=setup, rounds=600)
        for layer in turn:  # a pass that is not abandoned has to come by all of them
            pair(layer)
        passes.pop().__exit__(None, None, None)
        raw.verify()
        samples = seconds_of(benchmark)
        record(
            benchmark,
            "wait + done of a streamed layer that has arrived (issues a copy)",
            median(samples) * 1e6,
            "us",
            samples,
        )
