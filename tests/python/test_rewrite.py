"""Weights that are written where they lie, past torch's counters, as an engine's loader does: `advanced.rewrite`."""

from __future__ import annotations

from typing import Any

import pytest

import remap
from remap import advanced
from remap.errors import InvalidState
from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import models  # noqa: E402

KV = remap.KVSpec(layers=models.LAYERS, kv_heads=2, head_dim=16, min_blocks=4, max_blocks=400, dtype="float32")
IDS = torch.arange(3, 23).reshape(1, -1)


class World:
    """A session around one model, and another model with other weights."""

    def __init__(self, **more: Any) -> None:
        self.model, self.other = models.make("llama", seed=1), models.make("llama", seed=2)
        self.session = remap.Session(4 << 20, page_bytes=4096)
        self.tenant = self.session.attach(self.model, name="m", kv=KV, **more)
        self.answer()  # a whole pass: from now on layers may stream

    def answer(self) -> Any:
        with torch.no_grad():
            return self.model(IDS, use_cache=False).logits.clone()

    def load(self, layers: int = models.LAYERS) -> None:
        """The other model's weights, as engines write them: no version counter sees it."""
        new = dict(self.other.named_parameters())
        for name, tensor in self.model.named_parameters():
            number = next((int(part) for part in name.split(".") if part.isdigit()), -1)
            if number < layers:
                tensor.data.copy_(new[name].data)

    def expected(self) -> Any:
        with torch.no_grad():
            return self.other(IDS, use_cache=False).logits

    def stream(self, layers: int = 3) -> None:
        advanced.remap(self.session, "m", layers)


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.session.close()


def test_what_a_loader_writes_is_what_streams_later(world: World) -> None:
    versions = [tensor._version for tensor in world.model.parameters()]
    assert advanced.rewrite(world.session, "m", lambda: world.load() or 7) == 7
    assert [tensor._version for tensor in world.model.parameters()] == versions  # nothing else could have told
    assert torch.equal(world.answer(), world.expected())
    world.stream()
    assert torch.equal(world.answer(), world.expected())
    advanced.remap(world.session, "m", 0)
    assert torch.equal(world.answer(), world.expected())
    assert internals(world.tenant).pinned == ()
    assert advanced.differing(world.session, "m") == {}


def test_without_it_the_copies_are_old_and_differing_says_which(world: World) -> None:
    world.load(layers=2)
    found = advanced.differing(world.session, "m")
    assert sorted(found) == [0, 1]
    assert all(path.startswith("model.layers.") for paths in found.values() for path in paths)


def test_layers_that_are_away_are_refused_before_anything_is_written(world: World) -> None:
    world.stream()
    before = world.answer()
    calls: list[int] = []
    with pytest.raises(InvalidState) as caught:
        advanced.rewrite(world.session, "m", lambda: calls.append(1))
    assert caught.value.fields["tenant"] == "m"
    assert set(caught.value.fields["layers"]) >= set(world.tenant.streamed)
    assert calls == [] and torch.equal(world.answer(), before)
    advanced.remap(world.session, "m", 0)
    advanced.rewrite(world.session, "m", world.load)  # waits for the layers that are on their way
    assert torch.equal(world.answer(), world.expected())


def test_inside_a_pass_and_for_bytes_of_the_caller_it_is_refused(world: World) -> None:
    with world.tenant.forward(), pytest.raises(InvalidState):
        advanced.rewrite(world.session, "m", world.load)
    spec = remap.KVSpec(layers=2, kv_heads=2, head_dim=16, min_blocks=0, max_blocks=4, dtype="float32")
    world.session.attach_bytes([bytearray(4096), bytearray(4096)], name="bytes", kv=spec)
    with pytest.raises(InvalidState) as caught:
        advanced.rewrite(world.session, "bytes", lambda: None)
    assert caught.value.fields["tenant"] == "bytes"
    assert advanced.differing(world.session, "bytes") == {}


def test_half_of_a_write_streams_as_it_lies(world: World) -> None:
    def half() -> None:
        world.load(layers=3)
        raise KeyError("the file ends here")

    with pytest.raises(KeyError):
        advanced.rewrite(world.session, "m", half)
    now = world.answer()
    assert not torch.equal(now, world.expected())
    world.stream()
    assert torch.equal(world.answer(), now)
