"""Stages against the whole model: logits and tokens are equal to the bit, wherever the layers are cut."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")

from cluster_instances import attached, expected_tokens, requests_for  # noqa: E402
from models import LAYERS, kv_spec, make, poison  # noqa: E402

from remap.errors import InvalidArgument, InvalidState, OutOfBlocks  # noqa: E402
from remap.internals import internals  # noqa: E402
from remap_serve.cluster.pool import GroupPool  # noqa: E402
from remap_serve.cluster.slots import Slots, Whole  # noqa: E402
from remap_serve.cluster.stage import Row, Stage, row_of  # noqa: E402
from remap_serve.cluster.stage_kv import StageKV  # noqa: E402
from remap_serve.cluster.wire import Handed, Handover, Microbatch, decode, encode  # noqa: E402
from remap_serve.engine import ModelRunner  # noqa: E402
from remap_serve.engine.attention import decode_first  # noqa: E402
from remap_serve.engine.chunk import Chunk  # noqa: E402
from remap_serve.engine.layer_run import LayerRun  # noqa: E402
from remap_serve.engine.models import decoder_of  # noqa: E402
from remap_serve.engine.request import Request, SamplingParams, Sequence, TokenLogprobs  # noqa: E402
from remap_serve.engine.scheduler import Scheduler  # noqa: E402

CUTS = [(0, 3, 6), (0, 1, 6), (0, 2, 3, 6), (0, 0, 4, 4, 6), (0, 5, 6, 6), (0, 6, 6)]


def pipeline(stack, model, cuts, blocks):
    """The stages, one session each, and the pool of their logical blocks."""
    last = max(place for place in range(len(cuts) - 1) if cuts[place] < cuts[place + 1])
    stages, capacity = [], blocks  # scarce: requests are preempted
    for place, (first, end) in enumerate(zip(cuts, cuts[1:])):
        _, tenant, mine = stack.enter_context(attached(model, f"i{place}", blocks))
        places = Whole(LAYERS) if first == end else Slots(LAYERS, end - first)
        if first < end:
            # In pieces and out of order, so that places lie anywhere and straddle blocks.
            ids = tenant.kv.allocate(tenant.kv.free_blocks)
            for part in (ids[5:8], ids[:3], ids[8:], ids[3:5]):
                places.grow(part)
            capacity = min(capacity, places.capacity)
            poison(internals(tenant).kv)
        stages.append(Stage(decoder_of(mine), tenant, StageKV(tenant.kv, first, end), places, samples=place == last))
    return stages, GroupPool(4, capacity)


def passed(stages, chunks):
    """A microbatch through all stages that have something to do: its tokens."""
    ordered = decode_first(chunks)
    rows, known = [row_of(chunk) for chunk in ordered], [chunk.sequence.tokens for chunk in ordered]
    result = stages[0].compute(rows, None, known)
    for stage in stages[1:]:
        if stage.kv.first < stage.kv.end:
            result = stage.compute(rows, result)
    for row, noted in result.noted.items():
        ordered[row].sequence.noted.update(noted)
    return [chunk for chunk in ordered if chunk.samples], result.tokens


@pytest.mark.parametrize("kind", ["llama", "llama-odd", "opt-odd", "gpt2"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_tokens_of_stages_are_those_of_one_engine(kind, cuts):
    model, requests = make(kind), requests_for(len(kind), count=7, low=8, high=20, tokens=24)
    expected = expected_tokens(model, requests)
    with ExitStack() as stack:
        stages, pool = pipeline(stack, model, cuts, 17)
        scheduler = Scheduler(block_tokens=4, max_num_seqs=6, max_batch_tokens=60)
        sequences = {one.id: Sequence.of(one, order) for order, one in enumerate(requests)}
        for sequence in sequences.values():
            scheduler.add(sequence)
        preempted = 0
        while scheduler.running or scheduler.waiting:
            schedule = scheduler.schedule(pool)
            preempted += len(schedule.preempted)
            samplers, tokens = passed(stages, schedule.chunks)
            for chunk in schedule.chunks:
                scheduler.commit(chunk)
            for chunk, token in zip(samplers, tokens, strict=True):
                if chunk.sequence.append(token) is not None:
                    scheduler.finish(chunk.sequence, pool)
        assert pool.free_blocks == pool.usable_blocks
        assert {id: tuple(one.tokens[one.prompt_tokens :]) for id, one in sequences.items()} == expected
    assert preempted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_equal_to_the_bit(dtype):
    model = make("qwen3", dtype=dtype)
    texts = [tuple(range(1, 30)), (5,), tuple(range(40, 76))]
    with attached(model, "one", 40) as (_, tenant, mine), attached(model, "two", 40) as (_, other, its):
        sequences = [Sequence.of(Request(str(n), text), n) for n, text in enumerate(texts)]
        for sequence in sequences:
            sequence.blocks = tenant.kv.allocate(10)
        chunks = [Chunk(sequence, 0, sequence.length) for sequence in sequences]
        _, expected = ModelRunner(mine, tenant).forward(chunks)
        decoder, hidden = decoder_of(its), None
        other.kv.allocate(40)
        for first, end in ((0, 2), (2, 6)):
            kv = StageKV(other.kv, first, end)
            run = LayerRun(decoder, other, kv.tensors, dtype, first=first, samples=end == LAYERS)
            # Any slots of this many: blocks of the whole model are places of the stage as well.
            hidden = run.compute(run.batch(chunks), hidden)
        assert torch.equal(hidden, expected)


def test_a_stage_reads_and_writes_slots_and_nothing_else():
    with attached(make("llama"), "one", 8) as (_, tenant, _model):
        ids = tenant.kv.allocate(8)
        kv = StageKV(tenant.kv, 2, 4)
        slots = Slots(LAYERS, 2)
        slots.grow(ids)
        assert slots.capacity == 8 * LAYERS // 2
        kv.rows[:] = torch.arange(kv.rows.numel()).view(kv.rows.shape)
        before = kv.rows.clone()
        places = slots.table([0, 7, 23])
        data = kv.read(places, 3, 4)
        assert torch.equal(data, before[[place + 1 for place in places]])
        for layer in range(2):
            for place in places:
                seen = torch.cat([kv.tensors[layer][half, place].flatten() for half in (0, 1)])
                assert torch.equal(seen, before[place + layer])
        kv.write(places, 2, 3, data)
        changed = (kv.rows != before).any(1).nonzero().flatten().tolist()
        assert changed == places
        assert kv.rows.data_ptr() == tenant.kv.tensors[0].data_ptr()
        assert kv.slot_bytes * LAYERS == tenant.kv.spec.block_bytes


def test_a_layer_major_region_is_refused():
    model = make("llama")
    spec = kv_spec(model, layout="layer_major")
    with attached(model, "one", 8) as (session, _, _model), pytest.raises(InvalidArgument) as refused:
        StageKV(type("KV", (), {"spec": spec}), 0, 1)
    assert refused.value.layout == "layer_major" and session is not None


@given(st.integers(0, 12), st.data())
def test_the_pool_of_a_group_against_sets(capacity, data):
    pool, live = GroupPool(4, capacity), set()
    for _ in range(data.draw(st.integers(0, 12))):
        step = data.draw(st.sampled_from(["allocate", "free", "grow", "shrink"]))
        if step == "allocate":
            wanted = data.draw(st.integers(0, 6))
            if wanted > capacity - len(live):
                with pytest.raises(OutOfBlocks) as refused:
                    pool.allocate(wanted)
                assert (refused.value.requested, refused.value.free) == (wanted, capacity - len(live))
            else:
                ids = pool.allocate(wanted)
                assert ids == sorted(set(range(capacity)) - live)[:wanted]
                live |= set(ids)
        elif step == "free":
            given = data.draw(st.sets(st.integers(0, 12), max_size=4))
            if given <= live:
                pool.free(given)
                live -= given
            else:
                with pytest.raises(InvalidArgument):
                    pool.free(given)
        elif step == "grow":
            capacity = max(capacity, data.draw(st.integers(0, 16)))
            pool.grow(capacity)
        else:
            wanted = data.draw(st.integers(0, capacity))
            if wanted < len(live):
                with pytest.raises(OutOfBlocks):
                    pool.shrink(wanted)
            else:
                moves = pool.shrink(wanted)
                assert set(moves) == {id for id in live if id >= wanted}
                moved = {moves.get(id, id) for id in live}
                assert len(moved) == len(live) and all(id < wanted for id in moved)
                live, capacity = moved, wanted
        assert (pool.usable_blocks, pool.free_blocks) == (capacity, capacity - len(live))


def test_a_row_carries_what_the_choice_of_a_token_needs():
    sequence = Sequence.of(requests_for(1)[2], 0)
    sequence.blocks = [4, 2]
    row = row_of(Chunk(sequence, 1, 2))
    sampling = sequence.request.sampling
    sequence.blocks.append(9)  # what is sent is how it was
    assert row == Row(1, 2, sequence.prompt_tokens, sequence.length, [4, 2], replace(sampling, max_tokens=1), b"")
    assert row_of(Chunk(Sequence.of(requests_for(1)[0], 0), 0, 2)).sampling is None  # it is greedy


def test_what_goes_to_others_has_every_sampling_parameter():
    bias = ((5, -1.0), (6, 0.5))
    sampling = SamplingParams(9, 0.5, 7, 0.9, 3, frozenset({1}), 0.25, 1.5, -0.5, 1.25, bias, 2, True, "{}")
    assert all(
        getattr(sampling, each.name) != each.default for each in fields(SamplingParams) if each.default != MISSING
    )
    sequence = Sequence.of(Request("r", (1, 2), sampling), 0)
    row = decode(encode(Microbatch(0, [row_of(Chunk(sequence, 0, 2))]))).rows[0]
    # What ends an answer is the head's business.
    assert row.sampling == replace(sampling, max_tokens=1, stop_token_ids=frozenset())
    assert array("i", row.tokens).tolist() == [1, 2]
    sequence.noted = {1: TokenLogprobs(2, -0.5, ((7, -0.25),))}
    (handed,) = decode(encode(Handover([Handed.of(sequence, 1, 0, 16)]))).requests
    assert handed.request == sequence.request and handed.noted == sequence.noted
    assert isinstance(handed.noted[1], TokenLogprobs)


@pytest.mark.parametrize("deep", [b"\x91" * 60_000 + b"\xc0", b"\xc1", b""], ids=["deep", "wrong", "none"])
def test_a_header_that_is_no_message_is_refused_by_type(deep: bytes) -> None:
    """60,000 nested lists were a RecursionError, and any other wrong header an error of msgspec's."""
    with pytest.raises(InvalidState, match="is no message"):
        decode(b"\x82\xa4type\xa6Forget\xa1x" + deep)
