"""Pages that suit a model: as large as rounding allows, no larger than a layer lets a KV cache grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.model.footprint import DEVICE_PAGE_SIZES, DEVICE_WASTE, PAGE_SIZES, Footprint

MIB = 1 << 20
LLAMA_8B = 436_224_000 // MIB * MIB


def test_a_layer_of_hundreds_of_megabytes_takes_large_pages():
    size = Footprint((LLAMA_8B,) * 32, 2 * 1050 * MIB)
    assert size.page_size("cuda:0") == 32 * MIB and size.waste(32 * MIB) < DEVICE_WASTE
    assert max(size.layer_pages(32 * MIB)) <= 14 < max(size.layer_pages(2 * MIB))


def test_rounding_decides():
    # 33 MiB: two pages of 32, three of 16 or five of 8 lose too much; nine of 4 and seventeen of 2 as well: the smallest then.
    assert Footprint((33 * MIB,) * 8, 0).page_size("cuda") == 2 * MIB
    assert Footprint((40 * MIB,) * 8, 0).page_size("cuda") == 8 * MIB


def test_a_kv_cache_in_many_ranges_grows_by_no_more_than_a_layer():
    size = Footprint((LLAMA_8B,) * 32, 0)
    page = size.page_size("cuda", ranges=64)
    assert 64 * page <= LLAMA_8B < 64 * 2 * page


def test_small_models_keep_the_usual_sizes():
    tiny = Footprint((100_000,) * 4, 1000)
    assert tiny.page_size("cuda") == DEVICE_PAGE_SIZES[-1] and tiny.page_size() == PAGE_SIZES[-1]
    assert Footprint((), 0).page_size("cuda") == DEVICE_PAGE_SIZES[0]  # nothing to lose


@given(
    st.lists(st.integers(0, 900 * MIB), min_size=1, max_size=80),
    st.integers(0, 2000 * MIB),
    st.sampled_from(["cpu", "cuda:1", "sim:H100-SXM"]),
    st.integers(1, 200),
)
def test_no_larger_page_would_have_done(layers, rest, device, ranges):
    size = Footprint(tuple(layers), rest)
    sizes, most = (PAGE_SIZES, 0.01) if device == "cpu" else (DEVICE_PAGE_SIZES, DEVICE_WASTE)

    def does(page: int) -> bool:
        total = sum(max(1, -(-each // page)) for each in layers) + -(-rest // page)
        lost = total * page - sum(layers) - rest
        return lost <= most * (sum(layers) + rest) * (1 + 1e-12) and (ranges == 1 or ranges * page <= max(layers))

    found = size.page_size(device, ranges=ranges)
    assert found == next((page for page in sizes if does(page)), sizes[-1])


@pytest.mark.parametrize("page", [2 * MIB, 32 * MIB])
def test_waste_is_a_share(page):
    size = Footprint((33 * MIB, 0), 1)
    assert size.waste(page) == pytest.approx(size.pages(page) * page / size.nbytes - 1)
