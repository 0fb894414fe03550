"""Packing, against a byte-by-byte reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import layout_reference as reference
from remap.errors import InvalidArgument
from remap.model.pack import DEFAULT_MUTABLE, TensorSpec, build, span_bytes

DTYPES = {"int8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


def spec(path, shape=(4,), *, layer=0, dtype="float32", storage=None, offset=0, stride=None, kind="parameter"):
    if stride is None:
        stride, step = [], 1
        for size in reversed(shape):
            stride.insert(0, step)
            step *= max(size, 1)
    itemsize = DTYPES[dtype]
    return TensorSpec(
        path=path, layer=layer, kind=kind, dtype=dtype, itemsize=itemsize, shape=tuple(shape), stride=tuple(stride),
        storage=hash(path) if storage is None else storage, storage_offset_bytes=offset,
        span_bytes=span_bytes(shape, stride, itemsize),
    )  # fmt: skip


@st.composite
def models(draw, layers=4):
    """Up to 12 tensors on up to 6 storages: any dtype, size, stride (0 too), offset; some tied, some outside."""
    specs = []
    for number in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        stride = draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
        specs.append(
            spec(
                draw(st.sampled_from(["a", "b.running_mean", "c.step"])) + f".{number}",
                shape,
                layer=draw(st.one_of(st.none(), st.integers(0, layers - 1))),
                dtype=dtype,
                storage=draw(st.integers(0, 5)) if draw(st.booleans()) else 100 + number,
                offset=draw(st.integers(0, 40)) * DTYPES[dtype],
                stride=stride,
                kind=draw(st.sampled_from(["parameter", "buffer"])),
            )
        )
    return specs


@settings(max_examples=examples(300), deadline=None)
@given(
    specs=models(),
    alignment=st.sampled_from([16, 64, 256]),
    mutable=st.sampled_from([(), ("c.step*",), ("*running*", "a.0")]),
)
def test_every_byte_of_every_tensor_survives_packing(specs, alignment, mutable):
    layout = build(specs, layers=4, alignment=alignment, mutable=mutable)
    assert [part.index for part in layout.parts] == [0, 1, 2, 3, None]
    assert Counter(p.spec for part in layout.parts for p in part.tensors) == Counter(specs)
    for part in layout.parts:
        reference.check_part(part)
        starts = {}
        for placed in part.tensors:
            resident = reference.must_stay_resident(placed.spec, specs, mutable)
            assert part.index == (None if resident else placed.spec.layer)
            if placed.spec.span_bytes:
                starts.setdefault(placed.spec.storage, []).append(placed)
        ends = [p.offset + p.spec.span_bytes for p in part.tensors if p.spec.span_bytes]
        assert part.nbytes == max(ends, default=0)
        for members in starts.values():
            # The packed storage starts aligned; mixed itemsizes may put its first view up to one itemsize later.
            slack = max(p.spec.itemsize for p in members)
            assert min(p.offset for p in members) % alignment < slack
            if len({p.spec.itemsize for p in members}) == 1:
                assert min(p.offset for p in members) % alignment == 0
    again = build([replace(s) for s in specs], layers=4, alignment=alignment, mutable=mutable)
    assert (again, hash(again)) == (layout, hash(layout))


@settings(max_examples=examples(150), deadline=None)
@given(specs=models(layers=1), data=st.data())
def test_a_prescribed_order_is_taken_exactly(specs, data):
    """Any packed layer, with gaps put in front of its storages, is a valid prescription; and it is obeyed."""
    layer = build(specs, layers=1).layers[0]
    gaps, total, offsets = {}, 0, {}
    for placed in layer.tensors:
        if placed.spec.storage not in gaps:
            total += 256 * data.draw(st.integers(0, 2))
            gaps[placed.spec.storage] = total
        offsets[placed.spec.path] = placed.offset + gaps[placed.spec.storage] if placed.spec.span_bytes else 0
    layout = build(specs, layers=1).with_file_order({0: offsets}, file_alignment=1)
    reference.check_part(layout.layers[0])
    assert {p.spec.path: p.offset for p in layout.layers[0].tensors} == offsets
    assert [p.offset for p in layout.layers[0].tensors] == sorted(offsets.values())
    assert layout.rest == build(specs, layers=1).rest


def test_one_tensor_a_storage_is_packed_in_order_at_multiples_of_256():
    layout = build([spec("b", (3,)), spec("a", (65,)), spec("c", (), dtype="int8"), spec("z", (0, 7)), spec("d", (1,))])
    places = {p.spec.path: p.offset for p in layout.layers[0].tensors}
    assert places == {"b": 0, "a": 256, "c": 768, "z": 0, "d": 1024} and list(places) == ["b", "a", "c", "z", "d"]
    assert layout.layers[0].nbytes == layout.nbytes == 1028
    # Views of another itemsize stay aligned; layers without tensors exist.
    views = [spec("bytes", (1,), dtype="int8", storage=1, offset=35), spec("wide", (1,), storage=1, offset=36)]
    assert [p.offset for p in build(views).layers[0].tensors] == [3, 4]
    assert [part.nbytes for part in build([spec("a")], layers=3).layers] == [16, 0, 0]
    assert build([]).layers == ()


def test_tied_and_mutable_tensors_are_kept_resident():
    specs = [
        *(spec("embed.weight", layer=None, storage=1), spec("layers.0.head", storage=1)),
        *(spec(f"layers.{layer}.shared", layer=layer, storage=2) for layer in (0, 1)),
        *(spec("layers.1.bn.running_var", layer=1, kind="buffer"), spec("layers.1.own", layer=1)),
    ]
    layout = build(specs, mutable=DEFAULT_MUTABLE)
    assert [p.spec.path for p in layout.layers[1].tensors] == ["layers.1.own"]
    assert (layout.layers[0].tensors, layout.layers[0].nbytes) == ((), 0)
    offsets = {p.spec.path: p.offset for p in layout.rest.tensors}
    assert set(offsets) == {each.path for each in specs} - {"layers.1.own"}
    assert offsets["embed.weight"] == offsets["layers.0.head"]


WRONG = [
    {"kind": "other"},
    {"layer": -1},
    {"layer": 2},
    {"itemsize": 3},
    {"itemsize": 512},
    {"stride": ()},
    {"shape": (-1,)},
]
WRONG += [{"span_bytes": 15}, {"storage_offset_bytes": 2}, {"storage_offset_bytes": -4}, {"path": "twice"}]


@pytest.mark.parametrize("change", WRONG)
def test_inconsistent_specs_are_refused(change):
    with pytest.raises(InvalidArgument) as caught:
        build([spec("twice"), replace(spec("a"), **change)], layers=2)
    assert caught.value.path == change.get("path", "a")


@pytest.mark.parametrize("bad", [{"alignment": 0}, {"alignment": 48}, {"mutable": "*.x"}])
def test_bad_arguments_are_refused(bad):
    with pytest.raises(InvalidArgument):
        build([spec("a")], **bad)


def test_a_file_order_of_no_layer_is_refused():
    with pytest.raises(InvalidArgument):
        build([spec("a")]).with_file_order({5: {}})


@pytest.mark.parametrize(
    ("offsets", "why"),
    [
        ({"a": 0, "v": 4}, "missing"),
        ({"a": 0, "v": 4, "b": 64, "x": 0}, "unknown"),
        ({"a": 0, "v": 4, "b": 32}, "aligned"),
        ({"a": 0, "v": 4, "b": 66}, "itemsize"),
        ({"a": 64, "v": 68, "b": -64}, "negative"),
        ({"a": 0, "v": 8, "b": 64}, "distance"),
        ({"a": 0, "v": 4, "b": 0}, "overlaps"),
    ],
)
def test_impossible_file_orders_are_refused(offsets, why):
    specs = [spec("a", storage=1), spec("v", (2,), storage=1, offset=4), spec("b")]
    with pytest.raises(InvalidArgument, match=why):
        build(specs).with_file_order({0: offsets})
    layout = build(specs).with_file_order({0: {"a": 64, "v": 68, "b": 0}})
    assert [p.spec.path for p in layout.layers[0].tensors] == ["b", "a", "v"]
    assert layout.layers[0].nbytes == 80
