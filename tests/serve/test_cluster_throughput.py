"""What the network brings, by the pieces that went over it."""

from __future__ import annotations

import pytest

from remap_serve.cluster.throughput import LEAST_BYTES, Throughput
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.pipeline import Network

NETWORK = Network(Line(1.0, 0.0), 100.0)


def test_until_a_large_piece_has_left_nothing_is_known() -> None:
    throughput = Throughput(NETWORK)
    throughput.note(LEAST_BYTES - 1, 1.0)
    throughput.note(LEAST_BYTES, 0.0)
    assert (throughput.bytes_per_s, throughput.network) == (0.0, NETWORK)
    throughput.note(3 * LEAST_BYTES, 2.0)
    assert throughput.bytes_per_s == 1.5 * LEAST_BYTES
    assert throughput.network == Network(NETWORK.hop_s, 1.5 * LEAST_BYTES)


def test_what_it_brings_of_late_counts() -> None:
    throughput = Throughput(NETWORK)
    for _ in range(100):
        throughput.note(LEAST_BYTES, 1.0)
    throughput.note(LEAST_BYTES, 1e-9)  # one that found an empty buffer
    assert throughput.bytes_per_s < 1.12 * LEAST_BYTES
    for _ in range(100):
        throughput.note(LEAST_BYTES, 4.0)
    assert throughput.bytes_per_s == pytest.approx(LEAST_BYTES / 4, rel=1e-3)
