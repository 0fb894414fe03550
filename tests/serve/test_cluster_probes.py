"""What passes cost is found again from the few that an instance measures."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")
pytest.importorskip("scipy", reason="costs are fitted with scipy, of the extra `cluster`")

import torch
from cluster_instances import attached
from models import LAYERS, make

from remap.errors import InvalidState
from remap_serve.cluster.probes import Probe, cost_of, probes, rows_of
from remap_serve.cluster.resources import Resources, fingerprint_of
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.lookahead import ChunkCost, QueuedChunk
from remap_serve.policy.cluster.pipeline import Network


@example(1, 1)
@example(2, 1)
@given(st.integers(1, 4096), st.integers(1, 4096))
def test_probes_fit_into_what_there_is_room_for(most: int, batch: int) -> None:
    found = probes(most, batch)
    assert len(found) >= 5
    assert all(each.tokens >= 1 and each.prefix >= 0 and each.prefix + each.tokens <= most for each in found)
    assert max(each.tokens for each in found if not each.prefix) >= min(most, batch)


def test_one_token_behind_others_is_decoded_as_requests_are() -> None:
    several = [each for each in probes(600, 512) if each.rows > 1]
    for probe in [*several, Probe(1, 512, 1)]:
        for row in rows_of(probe, [0]):
            assert row.start >= row.prompt and row.start + row.count == row.length
    assert {row.prompt for row in rows_of(Probe(1, 512, 64), [0])} == {576}


FACTOR = st.floats(1e-6, 1e-2)


@settings(max_examples=examples(100), deadline=None)
@given(st.builds(ChunkCost, *[FACTOR] * 5), st.integers(100, 2000))
def test_a_cost_is_found_again(cost: ChunkCost, most: int) -> None:
    def seconds(probe: Probe) -> float:
        return cost.microbatch([QueuedChunk(n, probe.prefix, probe.tokens) for n in range(probe.rows)])

    found = cost_of(seconds, most, 512)
    for other in (
        [QueuedChunk(0, 300, 100)],
        [QueuedChunk(n, 40 * n, 1 + n % 3) for n in range(20)],
        [QueuedChunk(0, 0, 512)],
    ):
        assert found.microbatch(other) == pytest.approx(cost.microbatch(other), rel=1e-3)


@pytest.mark.parametrize("blocks", [1, 30])
def test_an_instance_measures_its_own_and_keeps_no_block(blocks: int) -> None:
    with attached(make("llama"), "m", blocks) as (session, tenant, model):
        has = Resources("m", model, session, tenant, Network(Line(0.0, 0.0), 1e9), 6, 64, 0)
        assert tenant.kv.live_blocks == 0
        assert has.cost.microbatch([QueuedChunk(0, 0, 8)]) > 0.0
        # What its own calls move of others, somebody has to hear.
        assert has.tell({"m": {1: 2}, "b": {}}) is None
        with pytest.raises(InvalidState) as lost:
            has.tell({"m": {1: 2}, "b": {3: 4}})
        assert lost.value.fields["moved"] == {"b": {3: 4}}
        # A round of one request, as plans see it, is a pass over it.
        assert has.model.seconds(0, LAYERS, 1) == pytest.approx(has.cost.microbatch([QueuedChunk(0, 256, 1)]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_told_apart_though_all_else_is_equal(dtype: str) -> None:
    models = [make("llama", seed=seed).to(getattr(torch, dtype)) for seed in (0, 0, 1)]
    first, same, other = (fingerprint_of(model, 16) for model in models)
    assert first == same
    assert [key for key in vars(first) if vars(first)[key] != vars(other)[key]] == ["weights"]
    with torch.no_grad():
        next(models[1].parameters()).add_(1.0)  # one tensor is another
    assert fingerprint_of(models[1], 16).weights != first.weights
