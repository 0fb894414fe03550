"""The layout of an offline batch: it fits the budget, and what is refused would not."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap.kv.spec import KVGeometry, KVSpec
from remap.model.footprint import Footprint
from remap_serve.engine.throughput_layout import lay_out

PAGE = 4096


@given(
    layers=st.lists(st.integers(1, 12 * PAGE), min_size=1, max_size=12),
    rest=st.integers(0, 20 * PAGE),
    budget=st.integers(1, 1200),
    host=st.integers(1, 4000),
    longest=st.integers(1, 200),
    seqs=st.integers(1, 40),
    ratio=st.sampled_from([(0, 1), (1, 1), (1, 0), None]),
)
def test_the_layout_fits_the_budget(layers, rest, budget, host, longest, seqs, ratio) -> None:
    model = Footprint(tuple(layers), rest)
    spec = partial(KVSpec, layers=len(layers), kv_heads=2, head_dim=8, block_tokens=4, dtype="float32")
    ask = partial(
        lay_out,
        page_bytes=PAGE,
        model=model,
        spec=spec,
        host_bytes=host * 1024,
        longest_tokens=longest,
        num_seqs=seqs,
        batch_tokens=64,
        chunk_align=32,
        ratio=ratio,
    )
    refused: InvalidArgument | None = None
    try:
        found = ask(budget * PAGE)
    except InvalidArgument as error:
        refused = error
    if refused is not None and refused.fields["field"] == "host_kv":
        assert refused.fields["needed"] > host * 1024
        return
    if refused is not None:
        # What the error names is enough, and a page less is not.
        needed = refused.fields["needed"]
        assert needed > budget * PAGE and ask(needed).num_seqs >= 1
        with pytest.raises(InvalidArgument):
            ask(needed - PAGE)
        return
    assert 1 <= found.num_seqs <= seqs and found.spec.host_blocks * found.spec.block_bytes <= host * 1024
    if ratio in ((1, 0), None):  # any request can be made again, and if the engine chooses, be kept as KV
        assert found.spec.scratch_blocks == -(-longest // 4) // 2 * 2
        assert ratio is not None or found.spec.host_blocks >= found.spec.scratch_blocks
    geometry, pages = KVGeometry(found.spec, PAGE), sorted(model.layer_pages(PAGE))
    taken = -(-rest // PAGE) + geometry.pages_for_blocks(found.spec.min_blocks) + geometry.buffer_pages
    if found.resident_layers is None:
        taken += sum(pages)
    else:
        assert len(layers) - found.resident_layers > 2
        # Whichever layers stay.
        taken += 2 * pages[-1] + sum(pages[len(pages) - found.resident_layers :])
    assert taken <= budget
