"""Pages that suit a model: as large as rounding allows, no larger than a layer lets a KV cache grow."""

from __future__ import annotations

from itertools import accumulate, permutations

from hypothesis import example, given
from hypothesis import strategies as st

from remap.model.footprint import DEVICE_PAGE_SIZES, DEVICE_WASTE, PAGE_SIZES, Footprint

MIB = 1 << 20
LLAMA_8B = 436_224_000 // MIB * MIB


def test_models_of_several_sizes():
    # A layer of hundreds of megabytes takes large pages, unless the KV cache lies in many ranges.
    large = Footprint((LLAMA_8B,) * 32, 2 * 1050 * MIB)
    assert (large.page_size("cuda:0"), large.page_size("cuda", ranges=64)) == (32 * MIB, 4 * MIB)
    # Where the KV cache is small, what rounding takes from it counts: 12 MiB beside each of 12 layers are a fifth of 768 MiB.
    some = Footprint((420 * MIB,) * 12, 2 * 1050 * MIB)
    assert (some.page_size("cuda"), some.page_size("cuda", kv_bytes=768 * MIB)) == (16 * MIB, 4 * MIB)
    assert some.page_size("cuda", kv_bytes=100 * some.nbytes) == 16 * MIB
    assert Footprint((), 0).page_size("cuda") == DEVICE_PAGE_SIZES[0]  # nothing to lose


@given(
    st.lists(st.integers(0, 900 * MIB), min_size=1, max_size=80),
    st.integers(0, 2000 * MIB),
    st.sampled_from(["cpu", "cuda:1", "sim:H100-SXM"]),
    st.integers(1, 200),
)
@example([33 * MIB, 0], 1, "cuda", 1)
def test_no_larger_page_would_have_done(layers, rest, device, ranges):
    size = Footprint(tuple(layers), rest)
    sizes, most = (PAGE_SIZES, 0.01) if device == "cpu" else (DEVICE_PAGE_SIZES, DEVICE_WASTE)

    def does(page: int) -> bool:
        total = sum(max(1, -(-each // page)) for each in layers) + -(-rest // page)
        assert size.pages(page) == total
        lost = total * page - sum(layers) - rest
        assert not size.nbytes or abs(size.waste(page) - lost / size.nbytes) < 1e-9
        return lost <= most * (sum(layers) + rest) * (1 + 1e-12) and (ranges == 1 or ranges * page <= max(layers))

    found = size.page_size(device, ranges=ranges)
    assert found == next((page for page in sizes if does(page)), sizes[-1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 12), st.integers(0, 60))
@example([4, 4, 4, 4], 3, 5)
def test_whatever_layers_leave_a_region_reaches_its_ceiling(layers, first, pages):
    """Any order of layers gives enough while it has a place there, though the layer behind the first is ring; where all but one
    layer are too few, all have a place."""
    places, sizes = Footprint(tuple(layers), 0).reach(1, first, pages), sorted(layers)
    if len(sizes) > 1 and first + sum(sizes[:-1]) < pages:
        assert places == first + sum(sizes)
    elif first >= pages or len(sizes) == 1:
        assert places == first
    else:
        for order in permutations(sizes):
            placed = [there for there in accumulate(order) if first + there <= places]
            assert first + placed[-1] - max(order[: len(placed)]) >= pages
