"""Layers that the model writes, shares or ties: what must stay resident does, is named, and nothing computes differently."""

from __future__ import annotations

import copy

import pytest

import remap
from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import LAYERS, bytes_of  # noqa: E402
from torch import nn  # noqa: E402

from remap import InvalidArgument, InvalidState  # noqa: E402
from remap.adapters.hooks import attach_hooks  # noqa: E402

WIDTH, PAGE = 48, 4096
KV = remap.KVSpec(layers=LAYERS, kv_heads=1, head_dim=16, block_tokens=4, dtype="float32", min_blocks=1, max_blocks=200)


class Layer(nn.Module):
    """A matrix, and something that it may write in each forward."""

    def __init__(self, kind):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.Identity()
        if kind == "step":
            self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(x)))
        if hasattr(self, "step"):
            self.step.add_(1)
            x = x * (1 + 0.125 * self.step)
        return x


class Stack(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(Layer, kinds))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Pair:
    """A bare model and its twin in a session; `forward` runs both and compares everything. A context manager."""

    def __init__(self, *kinds, prepare=lambda model: None, **attach):
        self.bare = Stack(kinds or [""] * LAYERS)
        prepare(self.bare)
        self.model = copy.deepcopy(self.bare)
        self.session = remap.Session(100 * PAGE, page_bytes=PAGE)
        self.tenant = self.session.attach(self.model, kv=KV, name="m", hooks=False, **attach)
        self.hooks = attach_hooks(self.model.layers, self.tenant, model=self.model)
        self.passes = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.hooks.remove()
        self.session.close()
        if error[0] is None:
            self.forward(2)
            assert all(torch.equal(value, bytes_of(self.bare)[name]) for name, value in bytes_of(self.model).items())

    @torch.no_grad()
    def forward(self, times=1):
        for _ in range(times):
            self.passes += 1
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(self.passes))
            assert torch.equal(self.model(x), self.bare(x)), f"pass {self.passes}"
            if not self.session.closed:
                remap.advanced.check(self.session)

    def remap(self, *how, passes=2):
        remap.advanced.remap(self.session, "m", *how)
        self.forward(passes)

    def refused(self, layers):
        with pytest.raises(InvalidArgument) as caught:
            remap.advanced.remap(self.session, "m", layers)
        return caught.value


def test_a_layer_with_a_counter_is_found_named_and_kept():
    with Pair("", "", "step", "", "", "") as pair:
        pair.forward()
        for alpha, beta in ((1, 1), (4, 1), (3, 2), (0, 1), (2, 1), (4, 1)):
            for selection in ("uniform", "nested"):
                pair.remap(alpha, beta, selection)
                assert 2 not in pair.tenant.streamed
        assert internals(pair.tenant).pinned == pair.session.snapshot().tenants["m"].pinned == (2,)
        assert pair.tenant.written == {2: ["layers.2.step"]}
        error = pair.refused(5)
        assert (error.streamable, error.maximum, pair.tenant.remapped) == (5, 4, 4)
        assert int(pair.model.layers[2].step) == pair.passes


def test_mutable_keeps_only_that_tensor_resident():
    with Pair("", "", "step", "", "", "step", mutable=["*.step"]) as pair:
        pair.forward()
        for how in ((5, 1), (4, 2), (1, 1), (5, 1)):
            pair.remap(*how)
        assert set(pair.tenant.streamed) == set(range(LAYERS))
        assert (internals(pair.tenant).pinned, pair.tenant.written) == ((), {})


def test_batch_norm_in_training_streams_beside_its_statistics():
    """Its kernel does not announce its writes; the statistics are known by name."""
    with Pair(*["norm"] * LAYERS) as pair:
        for alpha in (5, 2, 0, 3):
            pair.remap(alpha)
        assert internals(pair.tenant).pinned == ()
        assert int(pair.model.layers[0].norm.num_batches_tracked) == pair.passes


def test_the_controller_skips_written_layers():
    with Pair("", "step", "", "", "step", "", config=remap.advanced.Knobs(slowdown=1e6)) as pair:
        pair.forward()
        most = pair.tenant.kv.max_blocks
        report = pair.session.step({"m": remap.Demand(blocks=most)})
        assert (set(pair.tenant.written), pair.tenant.streamed) == ({1, 4}, (0, 2, 3, 5))
        assert (report.remapped, report.unmet_blocks) == ({"m": 3}, {"m": most - pair.tenant.kv.free_blocks})
        pair.forward(3)


def test_a_write_into_a_streamed_layer_is_an_error_not_a_wrong_result():
    """Never run before it was streamed, so nothing could be found earlier."""
    model = Stack(["", "step", "", "", "", ""])
    with remap.Session(100 * PAGE, page_bytes=PAGE) as session:
        tenant = session.attach(model, kv=KV, name="m", hooks=False)
        remap.advanced.remap(session, "m", 5)
        with attach_hooks(model.layers, tenant, model=model), pytest.raises(InvalidState) as caught:
            model(torch.zeros(2, WIDTH))
        assert caught.value.written == {1: ["layers.1.step"]}
        assert not internals(tenant).in_pass
        remap.advanced.check(session)


def share_between_layers(model):
    model.layers[4].first.weight = model.layers[1].first.weight


def share_everything(model):
    model.layers[4].first = model.layers[1].first


def tie_to_the_outside(model):
    model.outside = nn.Embedding(WIDTH, WIDTH)
    model.layers[2].first.weight = model.outside.weight


def view_of_one_another(model):
    both = torch.randn(2 * WIDTH, WIDTH) * 0.1
    model.layers[0].first.weight = nn.Parameter(both[:WIDTH])
    model.layers[5].first.weight = nn.Parameter(both[WIDTH:])


@pytest.mark.parametrize("prepare", [share_between_layers, share_everything, tie_to_the_outside, view_of_one_another])
def test_shared_tensors_stay_resident_and_shared(prepare):
    with Pair(prepare=prepare) as pair:
        most = LAYERS - len(internals(pair.tenant).pinned) - 1
        assert most == (3 if prepare is share_everything else 5)
        for alpha in (most, 1, most, 0, 2):
            pair.remap(alpha)
        layers = pair.model.layers
        if prepare is share_between_layers:
            assert layers[4].first.weight is layers[1].first.weight
        if prepare is tie_to_the_outside:
            assert layers[2].first.weight.data_ptr() == pair.model.outside.weight.data_ptr()
