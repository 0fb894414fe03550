"""Collecting, installing and restoring real torch models."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch import nn  # noqa: E402

from reference import tiny_models  # noqa: E402
from remap.errors import InvalidArgument, InvalidState  # noqa: E402
from remap.model import bind as modules  # noqa: E402
from remap.model.pack import build  # noqa: E402

MODELS = {
    "llama": (lambda: tiny_models.llama(), "model.layers"),
    "llama-bf16": (lambda: tiny_models.llama().bfloat16(), "model.layers"),
    "qwen2-tied": (lambda: tiny_models.qwen2(), "model.layers"),
    "opt": (lambda: tiny_models.opt(), "model.decoder.layers"),
    "odd": (lambda: tiny_models.OddModel().eval(), "blocks"),
}
IDS = torch.tensor([[1, 5, 3, 10, 2, 0, 7]])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def output(model):
    with torch.no_grad():
        result = model(IDS)
    return getattr(result, "logits", result).clone()


def memory(part):
    """Zeroed memory that torch does not own; a little longer than needed, as pages are."""
    return torch.frombuffer(bytearray(part.nbytes + 4096), dtype=torch.uint8)


def install(model, path, **arguments):
    """Collect, pack, fill and install. Returns (layout, tensors, storages, rest)."""
    layout = build(modules.collect(model, path), **arguments)
    parts, tensors = [memory(part) for part in layout.parts], modules.tensors_of(model)
    for part, destination in zip(layout.parts, parts, strict=True):
        modules.fill(part, tensors, destination)
    modules.install(layout, tensors, parts[:-1], parts[-1])
    return layout, tensors, parts[:-1], parts[-1]


def named(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def facts(model):
    return [(n, id(t), t.requires_grad, t.shape, t.stride(), t.dtype, t._version) for n, t in named(model)]


def addresses(model):
    return [tensor.data_ptr() for _, tensor in named(model)]


@pytest.mark.parametrize("name", MODELS)
def test_install_and_restore_are_bit_identical(name):
    make, path = MODELS[name]
    model = make()
    before, was = output(model), facts(model)
    layout, tensors, storages, rest = install(model, path)
    assert torch.equal(output(model), before)
    assert facts(model) == was
    everything = [*storages, rest]
    placed = {p.spec.path: (i, p) for i, part in enumerate(layout.parts) for p in part.tensors}
    assert set(placed) == {n for n, _ in named(model)}
    for path_, tensor in named(model):
        i, place = placed[path_]
        assert not tensor.numel() or tensor.data_ptr() == everything[i].data_ptr() + place.offset
    assert all(part.nbytes for part in layout.layers)

    # Really read from there: without the bytes of one layer, or of the rest, the output is another one.
    for storage in (storages[1], rest):
        saved = storage.clone()
        storage.zero_()
        assert not torch.equal(output(model), before)
        storage.copy_(saved)

    master = storages[2].clone()
    storages[2].random_()  # a streamed layer's region shows another layer's bytes
    modules.restore(layout, tensors, storages, rest, sources={2: master})
    for storage in everything:
        storage.fill_(255)
    assert torch.equal(output(model), before)
    assert facts(model) == was
    # And the whole way again.
    install(model, path)
    assert torch.equal(output(model), before)


def test_restore_goes_by_the_objects_and_what_they_show():
    """It went by paths: what was renamed, or registered anew over the same memory, kept memory that was then unmapped."""
    model = tiny_models.OddModel()
    layout, tensors, storages, rest = install(model, "blocks")
    block = model.blocks[0]
    mine, old, renamed, whole = nn.Parameter(torch.ones(7, 7)), block.strided, block.left, model.blocks[1].transposed
    block.strided, block.other = mine, renamed  # replaced by memory of its own; under another name
    del block.left
    model.blocks[1].transposed = nn.Parameter(whole[:3])  # another object, over a part of the same memory
    del model.alias
    model.far = nn.Parameter(storages[0].as_strided((storages[0].numel() // 4,), (4,)), requires_grad=False)
    before = {id(tensor): tensor.detach().clone() for tensor in tensors.values()}
    address = renamed.data_ptr()
    with pytest.raises(InvalidState) as caught:  # of more than one tensor
        modules.restore(layout, tensors, storages, rest, others=modules.tensors_of(model).items())
    assert caught.value.path == "far" and renamed.data_ptr() == address
    del model.far
    modules.restore(layout, tensors, storages, rest, others=modules.tensors_of(model).items())
    for storage in (*storages, rest):
        storage.fill_(255)
    assert block.strided is mine and mine.data_ptr() != old.data_ptr()
    assert all(torch.equal(tensor, before[id(tensor)]) for tensor in tensors.values())
    assert model.blocks[1].transposed.data_ptr() == whole.data_ptr()


def test_models_made_under_inference_mode_work_in_every_mode():
    with torch.inference_mode():
        model = tiny_models.llama(layers=2)
    before = output(model)
    layout, tensors, storages, rest = install(model, "model.layers")
    assert all(p.is_inference() for p in model.parameters())
    assert torch.equal(output(model), before)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, before)
        modules.restore(layout, tensors, storages, rest)  # the caller's mode does not matter
    rest.fill_(255)
    assert torch.equal(output(model), before)
    watch = modules.WriteWatch(model, model.model.layers, layout, tensors)
    assert watch.written_in(range(2)) == {}


def test_install_under_inference_mode_gives_normal_tensors():
    model = tiny_models.llama(layers=2)
    before = output(model)
    with torch.inference_mode():
        install(model, "model.layers")
    assert not any(p.is_inference() for p in model.parameters())
    assert torch.equal(output(model), before)
    model(IDS).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_failed_install_changes_nothing(monkeypatch):
    model = tiny_models.llama(layers=2)
    layout, tensors = build(modules.collect(model, "model.layers")), modules.tensors_of(model)
    one, other, rest = (memory(part) for part in layout.parts)

    def refused(error, storages):
        before = addresses(model)
        with pytest.raises(error):
            modules.install(layout, tensors, storages, rest)
        assert addresses(model) == before

    refused(InvalidArgument, [one])
    for wrong in (
        other[: layout.layers[1].nbytes - 1],
        other.view(torch.int8),
        other.view(2, -1),
        other[8:],
        one,
        torch.empty(other.numel(), dtype=torch.uint8, device="meta"),
    ):
        refused(InvalidArgument, [one, wrong])
    real, calls = modules._view, []

    def failing(storage, offset, like):
        calls.append(offset)
        return real(storage, offset, like) if len(calls) != 10 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(modules, "_view", failing)  # torch refuses half way
        refused(ZeroDivisionError, [one, other])
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(99, 64)
    refused(InvalidArgument, [one, other])


# --- finding and describing ---------------------------------------------------------------------------------------


def test_layers_are_found_from_the_model_and_from_its_base():
    model = tiny_models.opt()
    assert modules.find_layers(model) == "model.decoder.layers"
    assert modules.find_layers(model.model) == "decoder.layers"
    assert modules.collect(model, "model.decoder.layers") == modules.collect(model, list(model.model.decoder.layers))


def test_unknown_layer_paths_list_the_candidates():
    for call, more in ((modules.find_layers, ()), (modules.collect, ("model.layers",))):
        with pytest.raises(InvalidArgument, match=r"blocks \(3 modules\)") as caught:
            call(tiny_models.OddModel(), *more)
        assert caught.value.candidates == {"blocks": 3, "alias": 3}


def test_bad_layer_lists_are_refused():
    model = tiny_models.OddModel()
    blocks = list(model.blocks)
    lists = {"layers": [], "first": [blocks[0], blocks[1], blocks[0]], "outer": [blocks[0], blocks[0].shared]}
    for field, layers in (*lists.items(), ("index", [nn.Linear(2, 2)]), ("index", [torch.ones(1)])):
        with pytest.raises(InvalidArgument) as caught:
            modules.collect(model, layers)
        assert field in caught.value.fields
    again = tiny_models.OddModel()  # equal models give equal specs and layouts
    assert modules.collect(model, "blocks") == modules.collect(again, "blocks")
    assert build(modules.collect(model, "blocks")) == build(modules.collect(again, "blocks"))


def test_memory_shared_behind_two_storages_counts_as_shared():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            data = bytearray(range(64))
            self.layers = nn.ModuleList([nn.Module(), nn.Module()])
            for i, offset in enumerate((1, 0)):
                view = torch.frombuffer(data, dtype=torch.uint8, offset=16 * offset, count=32)
                self.layers[i].register_buffer("x", view)
                self.layers[i].register_buffer("own", torch.ones(3))

    model = Pair()
    first, second = (s for s in modules.collect(model, "layers") if s.path.endswith("x"))
    assert first.storage == second.storage
    assert first.storage_offset_bytes - second.storage_offset_bytes == 16
    layout, tensors, storages, rest = install(model, "layers")
    assert {"layers.0.x", "layers.1.x"} <= {placed.spec.path for placed in layout.rest.tensors}
    for value in (99, 98):
        model.layers[1].x[20] = value
        assert model.layers[0].x[4] == value
        modules.restore(layout, tensors, storages, rest)


def test_tensors_that_cannot_be_moved_are_refused():
    def refused(tensor, **where):
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(2, 2)])
        model.layers[0].register_buffer("odd", tensor)
        with pytest.raises(InvalidArgument) as caught:
            modules.collect(model, "layers", **where)
        return caught.value

    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    complex_view = torch.ones(2, dtype=torch.complex64).conj()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor in (
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        complex_view,
        nested,
        nn.UninitializedBuffer(),
        freed,
    ):
        assert refused(tensor).path == "layers.0.odd"
    error = refused(torch.ones(2), device="cuda:0")
    assert (error.device, error.expected) == ("cpu", "cuda:0")


# --- writes -------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)])
        for layer in self.layers:
            layer.register_buffer("step", torch.zeros((), dtype=torch.int64))


def watched():
    model = Counting().eval()
    layout, tensors, storages, _ = install(model, "layers")
    return model, layout, tensors, storages, modules.WriteWatch(model, list(model.layers), layout, tensors)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def swap(layers):
    layers[0], layers[1] = layers[1], layers[0]


PARAMETERS = ["layers.0.0.weight", "layers.0.0.bias"]
CHANGES = {
    "written": (lambda layers: layers[1][0].weight.mul_(2), {1: ["layers.1.0.weight"]}),
    # The kernel does not announce that it writes the statistics.
    "trained": (
        lambda layers: layers[1].train()(torch.ones(5, 4)),
        {1: [f"layers.1.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]},
    ),
    "read": (lambda layers: [layer(layer.step.float() + torch.ones(5, 4)) for layer in layers], {}),
    "counted": (lambda layers: layers[2].step.add_(1), {2: ["layers.2.step"]}),
    # Replaced: the tensor, the module that holds it, its memory; or the layer has gone (the paths are then its own).
    "tensor": (lambda layers: setattr(layers[0][0], "bias", nn.Parameter(torch.ones(4))), {0: PARAMETERS[1:]}),
    "module": (lambda layers: layers[0].__setitem__(0, nn.Linear(4, 4)), {0: PARAMETERS}),
    "memory": (lambda layers: setattr(layers[0][0].bias, "data", torch.ones(4)), {0: PARAMETERS[1:]}),
    "layer": (lambda layers: layers.__setitem__(0, nn.Sequential()), {0: ...}),
    # Another layer does not wait for these bytes.
    "taken": (
        lambda layers: layers[1].__setitem__(0, layers[0][0]),
        {0: PARAMETERS, 1: ["layers.1.0.weight", "layers.1.0.bias"]},
    ),
    "lent": (
        lambda layers: setattr(layers[1][0], "bias", layers[0][0].bias),
        {0: PARAMETERS[1:], 1: ["layers.1.0.bias"]},
    ),
    # Only another name, or none: the bytes are where they were.
    "wrapped": (lambda layers: layers[0].__setitem__(0, Around(layers[0][0])), {}),
    "wrapped layer": (lambda layers: layers.__setitem__(0, Around(layers[0])), {}),
    "other places": (swap, {}),
    "removed": (lambda layers: setattr(layers[0][0], "bias", None), {}),
    "no bytes": (lambda layers: layers[0][0].requires_grad_(False), {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_change_is_found_in_its_layer(change):
    model, layout, tensors, _, watch = watched()
    assert watch.written_in(range(3)) == {}
    make, expected = CHANGES[change]
    with torch.no_grad():
        make(model.layers)
    found = watch.written_in([9, 2, 1, 0, 1, -1])
    assert watch.written_in([]) == {}
    for layer in range(3):
        assert watch.written_in((layer,)) == {i: p for i, p in found.items() if i == layer}
    if change == "written":
        assert modules.WriteWatch(model, list(model.layers), layout, tensors).written_in(range(3)) == {}
    if change == "layer":
        assert list(found) == [0] and set(PARAMETERS) <= set(found[0])
    else:
        assert found == expected


def test_what_was_replaced_is_reported_until_it_is_back():
    model, *_, watch = watched()
    layer = model.layers[0]
    kept, layer[0] = layer[0], nn.Linear(4, 4)
    assert watch.written_in((0,)) == {0: PARAMETERS}
    layer[1].extra = nn.Linear(4, 4)
    del layer.step
    assert watch.written_in((0,)) == {0: ["layers.0.step", *PARAMETERS]}
    assert watch.written_in((0,), replaced=False) == {}
    layer[0] = kept
    layer.step = nn.Buffer(torch.zeros(()))
    assert watch.written_in((0,)) == {0: ["layers.0.step"]}


def test_changed_sees_writes_that_have_no_version():
    model, layout, tensors, storages, watch = watched()
    masters = [storage.clone() for storage in storages]
    model.layers[1][0].weight.data[2, 2] = 7.0
    model.layers[1].step.numpy()[()] = 3
    assert watch.written_in(range(3)) == {}
    found = [modules.changed(part, tensors, master) for part, master in zip(layout.layers, masters, strict=True)]
    assert found == [[], ["layers.1.step", "layers.1.0.weight"], []]
