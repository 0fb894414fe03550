"""Master copies in memory and in safetensors files."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import struct
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors.torch import save_file  # noqa: E402

from reference import tiny_models  # noqa: E402
from remap.errors import InvalidArgument  # noqa: E402
from remap.model import bind as modules  # noqa: E402
from remap.model import master as masters  # noqa: E402
from remap.model.pack import build  # noqa: E402

IDS = torch.tensor([[1, 5, 3, 10, 2]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tiny_models.llama()


@pytest.fixture
def file(model, tmp_path):
    """The model as transformers would save it: sorted by name."""
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def save_in_order(tensors, path):
    """A safetensors file with the tensors one after another in this very order (the library would sort them)."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.float64: "F64"}
    header, blobs, end = {}, [], 0
    for name, tensor in tensors:
        blob = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        span = [end, end + len(blob)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        blobs.append(blob)
        end += len(blob)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return path


def layout_of(model, path="model.layers", **arguments):
    return build(modules.collect(model, path), **arguments)


def make_master(model, layout, **options):
    return masters.make_master(modules.tensors_of(model), layout, **options)


def run_from(model, master):
    """Install the model from its master copies alone (one copy a layer, by address) and return the logits."""
    layout = master.layout
    storages = []
    for index, layer in enumerate(layout.layers):
        storage = torch.full((layer.nbytes,), 255, dtype=torch.uint8)
        place = master.tensor(index)
        assert place.numel() == layer.nbytes
        ctypes.memmove(storage.data_ptr(), place.data_ptr(), place.numel())
        storages.append(storage)
    rest = torch.zeros(layout.rest.nbytes, dtype=torch.uint8)
    tensors = modules.tensors_of(model)
    modules.fill(layout.rest, tensors, rest)
    modules.install(layout, tensors, storages, rest)
    with torch.no_grad():
        return model(IDS).logits


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.clone()


def test_host_master_loads_every_layer_with_one_copy(model):
    before = logits(model)
    layout = layout_of(model)
    master = make_master(model, layout)
    assert not master.files and master.reason == "" and master.layout is layout
    assert all(master.tensor(i).data_ptr() % mmap.PAGESIZE == 0 for i in range(4))
    assert torch.equal(run_from(model, master), before)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    found = modules.changed(layout.layers[0], modules.tensors_of(model), master.tensor(0))
    assert found == ["model.layers.0.mlp.up_proj.weight"]
    given = []

    def allocate(nbytes):
        given.append(torch.zeros(nbytes + 100, dtype=torch.uint8))
        return given[-1]

    master = make_master(model, layout, allocate=allocate)
    assert [master.tensor(i).data_ptr() for i in range(4)] == [tensor.data_ptr() for tensor in given]


@pytest.mark.parametrize("whole_directory", [False, True])
def test_file_master_uses_the_file_itself(model, file, whole_directory):
    before, layout, content = logits(model), layout_of(model), file.read_bytes()
    master = make_master(model, layout, files=file.parent if whole_directory else str(file))
    assert sorted(master.files) == [0, 1, 2, 3] and master.reason == ""
    for index, layer in enumerate(master.layout.layers):
        place = master.tensor(index)
        assert content.count(ctypes.string_at(place.data_ptr(), place.numel())) == 1
        assert [p.spec.path for p in layer.tensors] == sorted(p.spec.path for p in layout.layers[index].tensors)
    assert master.layout.rest == layout.rest
    assert torch.equal(run_from(model, master), before)


def test_file_addresses_are_read_only_and_live_as_long_as_what_keeps_them(model, file):
    master = make_master(model, layout_of(model), files=file)
    keep = master.tensor(1)
    address, nbytes = keep.data_ptr(), keep.numel()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in span.split("-")], flags) for span, flags, *_ in lines]
    (flags,) = [flags for (first, end), flags in spans if first <= address < end]
    assert flags.startswith("r--")
    expected = master.tensor(1).clone()
    file.unlink()
    del master
    gc.collect()
    assert ctypes.string_at(address, nbytes) == bytes(expected.tolist())
    assert keep.numel()


def test_tied_names_and_other_names(tmp_path):
    torch.manual_seed(0)
    base = tiny_models.qwen2().model
    names = {name: f"model.{name}" for name in base.state_dict()}
    save_file({names[name]: tensor for name, tensor in base.state_dict().items()}, tmp_path / "a.safetensors")
    layout = layout_of(base, "layers")
    master = make_master(base, layout, files=tmp_path, names=names)
    assert len(master.files) == len(layout.layers) and master.reason == ""
    missing = make_master(base, layout, files=tmp_path)
    assert not missing.files and missing.layout is layout
    assert "not in the files" in missing.reason


def test_one_layer_split_between_files_is_kept_in_memory(model, tmp_path):
    before, state, layout = logits(model), model.state_dict(), layout_of(model)
    names = sorted(state)
    cut = names.index("model.layers.2.mlp.up_proj.weight")
    for name, part in (("model-00001-of-00002", names[:cut]), ("model-00002-of-00002", names[cut:])):
        save_file({n: state[n] for n in part}, tmp_path / f"{name}.safetensors")
    master = make_master(model, layout, files=tmp_path)
    assert sorted(master.files) == [0, 1, 3]
    assert master.reason.startswith("layer 2: ") and "split between files" in master.reason
    assert master.layout.layers[2] == layout.layers[2]
    assert torch.equal(run_from(model, master), before)


def less_one(state):
    return {n: t for n, t in state.items() if not n.endswith("up_proj.weight")}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda state: {n: t.bfloat16() for n, t in state.items()}, "bfloat16 ("),
        (lambda state: {n: t[None] for n, t in state.items()}, "but float32 (1,"),
        (lambda state: dict(sorted(state.items(), key=lambda one: one[0][::-1])), "other tensors lie between"),
        (lambda state: {n: t + 1 for n, t in state.items()}, "model.layers.3.input_layernorm.weight has other values"),
        (less_one, "not in the files"),
    ],
)
def test_files_that_do_not_match_are_not_used(model, tmp_path, changed, reason):
    layout = layout_of(model)
    path = save_in_order(changed(dict(sorted(model.state_dict().items()))).items(), tmp_path / "other.safetensors")
    master = make_master(model, layout, files=path)
    assert not master.files and master.layout is layout
    assert reason in master.reason


def test_one_changed_element_is_noticed_and_values_are_compared_by_bytes(model, tmp_path):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
        model.model.layers[0].mlp.up_proj.weight[0, 1] = -0.0
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    assert make_master(model, layout_of(model), files=tmp_path).reason == ""
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[31, 63] += 1
    master = make_master(model, layout_of(model), files=tmp_path)
    assert sorted(master.files) == [0, 2, 3] and master.reason.startswith("layer 1: ")
    assert "v_proj.weight has other values" in master.reason


def test_odd_sizes_and_views_fall_back(tmp_path):
    torch.manual_seed(0)
    model = tiny_models.OddModel(layers=2)
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    layout = layout_of(model, "blocks")
    assert "not contiguous in memory" in make_master(model, layout, files=tmp_path).reason

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 3)])
            self.layers[0].twin = self.layers[0].weight
            self.layers[0].register_buffer("none", torch.empty(0))

    small = Small()
    path = save_in_order(list(small.layers[0].named_parameters(prefix="layers.0")), tmp_path / "b.safetensors")
    layout = layout_of(small, "layers")
    assert "layers.0.bias at 48 is not aligned to 64" in make_master(small, layout, files=path).reason
    small.layers[0] = wide = torch.nn.Linear(4, 4)
    wide.twin = wide.weight
    wide.register_buffer("none", torch.empty(0))
    path = save_in_order(list(wide.named_parameters(prefix="layers.0")), tmp_path / "b.safetensors")
    master = make_master(small, layout_of(small, "layers"), files=path)
    assert sorted(master.files) == [0]
    places = [(p.spec.path.removeprefix("layers.0."), p.offset) for p in master.layout.layers[0].tensors]
    assert places == [("weight", 0), ("twin", 0), ("none", 0), ("bias", 64)]


def test_layers_without_bytes_need_nothing():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Linear(2, 2)])
    master = make_master(model, build(modules.collect(model, "layers"), layers=2))
    assert [master.tensor(layer).numel() for layer in (0, 1)] == [0, 264]


ENTRY = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[%s]}}'
# How long the header says that it is, and the header: too long, no object, cut off, too deep for the reader, outside.
BROKEN = [(100, b"{}"), (2**63, b"{}"), (2, b"[]"), (3, b'{"a'), (8, b'{"a": 1}'), (100_000, b"[" * 100_000)]
BROKEN += [(52, (ENTRY % b"0,4")[:52]), (54, ENTRY % b"0,4"), (55, ENTRY % b"-4,0")]


@pytest.mark.parametrize("content", [b"", b"\0" * 7, *(struct.pack("<Q", size) + header for size, header in BROKEN)])
def test_broken_files_are_refused(model, tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        make_master(model, layout_of(model), files=tmp_path / "a.safetensors")
    assert caught.value.file.endswith("a.safetensors")


def test_missing_files_and_double_names_are_refused(model, file, tmp_path):
    layout = layout_of(model)
    (tmp_path / "empty").mkdir()
    for files in (tmp_path / "nothing.safetensors", tmp_path / "empty", []):
        with pytest.raises(InvalidArgument):
            make_master(model, layout, files=files)
    (tmp_path / "copy.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(InvalidArgument, match=r"in .* and in"):
        make_master(model, layout, files=[file, tmp_path / "copy.safetensors"])
