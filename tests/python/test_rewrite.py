"""Weights that are written where they lie, past torch's counters, as an engine's loader does: `advanced.rewrite`."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from effort import some, spread

import remap
from remap import advanced
from remap.errors import DriverError, InvalidArgument, InvalidState
from remap.internals import internals
from remap.memory.apply import Changes
from remap.memory.streams import ComputeStream

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import models  # noqa: E402

from remap.model.bind import changed, put_back, tensors_of  # noqa: E402

KV = remap.KVSpec(layers=models.LAYERS, kv_heads=2, head_dim=16, min_blocks=4, max_blocks=400, dtype="float32")
IDS = torch.arange(3, 23).reshape(1, -1)


def master_of(tenant: Any) -> Any:
    return internals(tenant)._state.source.keep_alive[0]


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

    @staticmethod
    def number(name: str) -> int:
        return next((int(part) for part in name.split(".") if part.isdigit()), -1)

    def load(self, layers: int = models.LAYERS, of: Any = None) -> None:
        """The other model's weights, as engines write them: no version counter sees it."""
        new = dict((of or self.other).named_parameters())
        for name, tensor in self.model.named_parameters():
            if self.number(name) < layers:
                tensor.data.copy_(new[name].data)

    def expected(self) -> Any:
        with torch.no_grad():
            return self.other(IDS, use_cache=False).logits

    queries = tuple(f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1))

    def layer(self, number: int) -> Any:
        return self.model.model.layers[number]

    def state(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.model.parameters()]

    def masters(self) -> dict[int, list[str]]:
        """Tensors of the other model that are not what the master copies have."""
        master, new = master_of(self.tenant), dict(tensors_of(self.other))
        found = {i: changed(part, new, master.tensor(i)) for i, part in enumerate(master.layout.layers)}
        return {layer: paths for layer, paths in found.items() if paths}

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


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize(("layers", "buffers", "selection"), [(3, 1, "uniform"), (2, 2, "nested"), (2, 1, "slices")])
def test_layers_that_are_away_have_them_in_the_next_pass(
    world: World, layers: int, buffers: int, selection: Any, passes: int
) -> None:
    advanced.remap(world.session, "m", layers, buffers, selection)
    for _ in range(passes):  # what the next pass needs first is in the ring before it begins
        old = world.answer()
        assert not torch.equal(old, world.expected())
    addresses = world.addresses()
    advanced.rewrite(world.session, "m", world.load)
    assert world.addresses() == addresses
    assert world.masters() == {}
    assert world.tenant.streamed
    assert torch.equal(world.answer(), world.expected())
    assert torch.equal(world.answer(), world.expected())
    advanced.remap(world.session, "m", 0)
    assert torch.equal(world.answer(), world.expected())
    assert internals(world.tenant).pinned == () and advanced.differing(world.session, "m") == {}


def test_layers_without_pages_come_back_with_them(world: World) -> None:
    world.session.deactivate("m", pages="none")
    kv = world.session.attach(models.make("llama", seed=3), name="n", kv=KV).kv
    world.session.step({"n": remap.Demand(blocks=400)})
    blocks = kv.allocate(kv.free_blocks)
    size = kv.spec.block_bytes
    for block in blocks:
        kv.memory[block * size : (block + 1) * size].fill_(0x5A)
    advanced.rewrite(world.session, "m", world.load)
    advanced.settle(world.session)
    assert world.masters() == {}
    assert all(
        (kv.memory[block * size : (block + 1) * size] == 0x5A).all() for block in blocks
    )  # in what were its pages
    kv.free(blocks)
    world.session.detach("n")
    world.session.activate("m")
    assert torch.equal(world.answer(), world.expected())


def test_what_counters_have_seen_before(world: World) -> None:
    """At home it kept its layer there, and does no more. In a layer that was away it is lost, and nothing hides that."""
    with torch.no_grad():
        world.layer(2).self_attn.q_proj.weight.zero_()
    world.stream(2)
    assert internals(world.tenant).pinned == (2,)
    advanced.rewrite(world.session, "m", world.load)
    assert internals(world.tenant).pinned == ()
    assert torch.equal(world.answer(), world.expected())
    with torch.no_grad():
        world.layer(world.tenant.streamed[0]).self_attn.q_proj.weight.zero_()
    calls: list[int] = []
    with pytest.raises(InvalidState) as caught:
        advanced.rewrite(world.session, "m", lambda: calls.append(1))
    assert list(caught.value.fields["written"]) == [world.tenant.streamed[0]] and not calls
    with pytest.warns(RuntimeWarning, match="are lost"):
        world.session.close()


def test_what_torch_does_with_a_model_works_inside_of_it(world: World) -> None:
    world.stream()
    world.answer()
    new = world.other.state_dict()

    def write() -> None:
        world.model.load_state_dict(new)
        shown = world.model.state_dict()
        assert [name for name in new if not torch.equal(shown[name], new[name])] == []

    advanced.rewrite(world.session, "m", write)
    assert torch.equal(world.answer(), world.expected())
    with pytest.raises(InvalidState):
        world.model.load_state_dict(new)  # outside of it, as ever
    assert torch.equal(world.answer(), world.expected())


@pytest.mark.parametrize("streams", [0, 3])
def test_tensors_that_get_other_memory_are_where_they_were_with_its_bytes(world: World, streams: int) -> None:
    world.stream(streams)
    addresses = world.addresses()

    def write() -> None:
        new = dict(world.other.named_parameters())
        for name, tensor in world.model.named_parameters():
            tensor.data = new[name].data.clone().t().contiguous().t() if tensor.dim() == 2 else new[name].data.clone()

    advanced.rewrite(world.session, "m", write)
    assert world.addresses() == addresses
    assert torch.equal(world.answer(), world.expected())
    one, two = (world.layer(number).self_attn.q_proj.weight for number in (0, 1))

    def swap() -> None:
        one.data, two.data = two.data, one.data

    def turn() -> None:
        one.data = one.data.t()

    first, second = (world.state()[name].clone() for name in world.queries)
    advanced.rewrite(world.session, "m", swap)
    assert [torch.equal(world.state()[name], each) for name, each in zip(world.queries, (second, first))] == [
        True,
        True,
    ]
    advanced.rewrite(world.session, "m", turn)
    assert torch.equal(world.state()[world.queries[0]], second.t())
    assert world.addresses() == addresses


@pytest.mark.parametrize("streams", [0, 3])
def test_a_tensor_that_gets_memory_of_another_shape_is_named_and_as_it_was(world: World, streams: int) -> None:
    world.stream(streams)
    kept = {name: world.state()[name].clone() for name in world.queries}

    def write() -> None:
        world.load()
        world.layer(0).self_attn.q_proj.weight.data = torch.zeros(3)
        world.layer(1).self_attn.q_proj.weight.data = torch.zeros(64, 64, dtype=torch.bfloat16)

    with pytest.raises(InvalidState) as caught:
        advanced.rewrite(world.session, "m", write)
    assert caught.value.fields["tensors"] == world.queries
    for name, value in world.other.state_dict().items():
        now = world.state()[name]
        # Of a layer at home these bytes were written before, and they are where they were.
        assert torch.equal(now, value) or (name in kept and torch.equal(now, kept[name])), name
    advanced.remap(world.session, "m", 0)
    assert advanced.differing(world.session, "m") == {}


def test_layers_that_another_instance_computes_are_refused() -> None:
    world = World(hooks=False)
    advanced.place(world.session, "m", 0, 3)
    calls: list[int] = []
    with pytest.raises(InvalidState) as caught:
        advanced.rewrite(world.session, "m", lambda: calls.append(1))
    assert caught.value.fields["layers"] == (3, 4, 5) and not calls
    advanced.place(world.session, "m", 0, models.LAYERS)
    advanced.rewrite(world.session, "m", world.load)
    assert world.masters() == {}
    world.session.close()


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


def test_half_of_a_write_while_layers_are_away(world: World) -> None:
    world.stream()
    world.answer()

    def half() -> None:
        world.load(layers=3)
        raise KeyError("the file ends here")

    with pytest.raises(KeyError):
        advanced.rewrite(world.session, "m", half)
    reference = models.make("llama", seed=1)
    reference.load_state_dict(
        {n: (world.other if world.number(n) < 3 else reference).state_dict()[n] for n in reference.state_dict()}
    )
    with torch.no_grad():
        expected = reference(IDS, use_cache=False).logits
    for layers in (3, 0, 2):
        world.stream(layers)
        assert torch.equal(world.answer(), expected)


def test_it_is_finished_before_the_next_pass_if_that_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the last step is raised; until it succeeds no pass begins and nothing changes."""
    world.stream()
    world.answer()
    state = internals(world.tenant)
    configure, fails = Changes.configure, [2]

    def failing(changes: Any, tenant: Any, plan: Any) -> None:
        if fails[0]:
            fails[0] -= 1
            raise DriverError("the copy stream has failed")
        configure(changes, tenant, plan)

    monkeypatch.setattr(Changes, "configure", failing)
    with pytest.raises(DriverError):
        advanced.rewrite(world.session, "m", world.load)
    with pytest.raises(DriverError):
        world.answer()
    assert torch.equal(world.answer(), world.expected())
    fails[0] = 1
    with pytest.raises(DriverError):
        advanced.rewrite(world.session, "m", lambda: world.load(of=models.make("llama", seed=3)))
    advanced.remap(world.session, "m", 0)
    world.other = models.make("llama", seed=3)
    assert torch.equal(world.answer(), world.expected())
    assert state.pinned == ()


def test_it_waits_for_what_still_computes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the last pass may still read the layers."""
    told: list[str] = []
    monkeypatch.setattr(ComputeStream, "wait", lambda stream: told.append("computed"))
    advanced.rewrite(world.session, "m", lambda: told.append("wrote"))
    assert told == ["computed", "wrote"]


def test_a_model_that_leaves_before_it_could_be_finished_shows_no_master_copy(world: World) -> None:
    world.stream()
    state = internals(world.tenant)._state

    def fails(away: Any) -> list[str]:
        raise DriverError("the device is gone")

    state.source = replace(state.source, renew=fails)
    with pytest.raises(DriverError):
        advanced.rewrite(world.session, "m", world.load)
    master = master_of(world.tenant)
    spans = [(copy.data_ptr(), copy.numel()) for copy in map(master.tensor, range(models.LAYERS))]
    assert any(at <= here < at + size for here in world.addresses() for at, size in spans)
    with pytest.warns(RuntimeWarning, match="wrote without a counter"):  # into layers at home
        world.session.detach("m")
    assert not any(at <= here < at + size for here in world.addresses() for at, size in spans)
    assert torch.equal(world.answer(), world.expected())


def test_what_calls_the_session_inside_of_it_is_refused(world: World) -> None:
    world.stream()
    world.answer()
    calls = [
        lambda: advanced.rewrite(world.session, "m", world.load),
        lambda: advanced.remap(world.session, "m", 0),
        lambda: world.session.deactivate("m", pages="none"),
        world.answer,
    ]
    refused: list[Any] = []

    def write() -> None:
        world.load(layers=2)
        for call in calls:
            with suppress(InvalidState):
                call()
                refused.append(call)
        world.load()

    advanced.rewrite(world.session, "m", write)
    assert refused == []
    assert world.tenant.streamed and torch.equal(world.answer(), world.expected())


@pytest.mark.parametrize("points", ["lines", "signals"])
@pytest.mark.parametrize("selection", ["uniform", "slices"])
def test_behind_an_interrupt_the_weights_are_the_old_or_the_new_ones(world: World, selection: Any, points: str) -> None:
    import interrupts

    advanced.remap(world.session, "m", 2, 1, selection)
    files = tuple(f"{name}.py" for name in ("memory/rewrite", "memory/apply", "model/source", "model/bind"))
    twins = [models.make("llama", seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        answers = [twin(IDS, use_cache=False).logits for twin in twins]
    addresses, now = world.addresses(), 0

    def act(at: int) -> Any:
        write = lambda: world.load(of=twins[1 - now])  # noqa: E731
        return interrupts.interrupted(lambda: advanced.rewrite(world.session, "m", write), at, points, files)

    seen = act(-1)[0].seen
    now = 1
    last = {where: at for at, where in enumerate(seen)}
    assert len(last) > 30
    found = set()
    for at in spread(sorted(last.values()), 24):
        interrupt, _, error = act(at)
        assert interrupt.where == "" or isinstance(error, KeyboardInterrupt)
        given = [torch.equal(world.answer(), answer) for answer in answers]
        assert sum(given) == 1, interrupt.where
        found.add(given.index(True) == now)
        now = given.index(True)
        world.other = twins[now]
        assert world.masters() == {}, interrupt.where
        assert world.addresses() == addresses, interrupt.where
    assert found == {True, False}


def test_a_session_that_closes_or_a_model_that_leaves_behind_it_keeps_them(world: World) -> None:
    world.stream()
    world.answer()
    advanced.rewrite(world.session, "m", world.load)
    world.session.detach("m")
    assert torch.equal(world.answer(), world.expected())


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("other", ["memory", "stride", "outside", "object", "view"])
def test_what_was_replaced_before_keeps_its_layer_at_home_and_gets_the_new_bytes(
    world: World, other: str, streams: int
) -> None:
    """The write was lost, or no pass began any more; and a layer that shows its region by another object streamed again."""
    module = world.layer(0).self_attn.q_proj
    if other == "memory":
        module.weight.data = module.weight.data.clone()
    elif other == "stride":
        module.weight.data = module.weight.data.t().contiguous().t()
    elif other == "outside":
        world.model.model.norm.weight.data = world.model.model.norm.weight.data.clone()
    else:
        data = module.weight.data
        module.weight = torch.nn.Parameter(data if other == "view" else data.clone())
    world.stream(streams)
    for seed in (2, 3):
        world.other = models.make("llama", seed=seed)
        advanced.rewrite(world.session, "m", world.load)
        assert torch.equal(world.answer(), world.expected())
        for layers in (4, 0, streams):
            world.stream(layers)
            assert torch.equal(world.answer(), world.expected())
            assert other == "outside" or 0 not in world.tenant.streamed


@pytest.mark.parametrize("streams", [0, 3])
def test_what_is_replaced_meanwhile_counts_as_ever(world: World, streams: int) -> None:
    world.stream(streams)
    streamed = world.tenant.streamed
    load = lambda: world.model.load_state_dict(world.other.state_dict(), assign=True)  # noqa: E731
    if streams:
        with pytest.raises(InvalidState) as caught:
            advanced.rewrite(world.session, "m", load)
        assert tuple(caught.value.fields["written"]) == streamed
        with pytest.warns(RuntimeWarning):
            world.session.detach("m")
    else:
        advanced.rewrite(world.session, "m", load)
    assert torch.equal(world.answer(), world.expected())


@pytest.mark.parametrize("streams", [0, 3])
def test_parameters_may_be_placeholders_between_two_calls(world: World, streams: int) -> None:
    """As vLLM updates weights in parts: meta tensors stand for those that are to come, which then come back."""
    world.stream(streams)
    linears = [module for module in world.model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    kept = [module.weight for module in linears]

    def begin() -> None:
        for module in linears:
            module.weight = torch.nn.Parameter(torch.empty_like(module.weight, device="meta"))

    def finish() -> None:
        for module, weight in zip(linears, kept):
            module.weight = weight
        world.load()

    for step in (begin, finish):
        advanced.rewrite(world.session, "m", step)
    assert len(world.tenant.streamed) >= streams
    for layers in (streams, 4, 0):
        world.stream(layers)
        assert torch.equal(world.answer(), world.expected())
    assert internals(world.tenant).pinned == ()


def test_an_embedding_in_host_memory_is_where_it_was_with_the_new_bytes() -> None:
    world = World(embedding="host")
    addresses, new = world.addresses(), list(world.other.parameters())

    def write() -> None:
        for tensor, value in zip(world.model.parameters(), new):
            tensor.data = value.data.clone()

    advanced.rewrite(world.session, "m", write)
    assert world.addresses() == addresses
    world.session.detach("m")
    assert torch.equal(world.answer(), world.expected())
    world.session.close()


def test_a_tensor_of_one_element_that_is_shown_many_times_is_as_it_was() -> None:
    """Nothing can be copied into it, and then no pass began any more."""
    world = World.__new__(World)
    world.model = models.make("llama", seed=1)
    norm = world.layer(0).input_layernorm
    norm.weight = torch.nn.Parameter(torch.ones(1).expand(64))
    world.session = remap.Session(4 << 20, page_bytes=4096)
    world.session.attach(world.model, name="m", kv=KV)
    old = world.answer()

    def write() -> None:
        norm.weight.data = torch.full((64,), 2.0)

    with pytest.raises(InvalidState) as caught:
        advanced.rewrite(world.session, "m", write)
    assert caught.value.fields["tensors"] == ("model.layers.0.input_layernorm.weight",)
    assert torch.equal(world.answer(), old)
    world.session.close()


def test_behind_an_interrupt_nothing_is_owed_that_is_not_due(world: World) -> None:
    """It was done with the next change, for layers that were away long ago."""
    import interrupts

    world.stream(1)
    state, files = internals(world.tenant)._state, ("memory/apply.py",)

    def act(at: int) -> Any:
        call = lambda: advanced.rewrite(world.session, "m", lambda: None)  # noqa: E731
        return interrupts.interrupted(call, at, "lines", files)

    code = Changes.owe.__code__
    lines = {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}
    points = [at for at, where in enumerate(act(-1)[0].seen) if int(where.split(":")[1].split()[0]) in lines]
    assert len(points) > 2
    for at in points:
        act(at)
        world.answer()
        assert state.owed is None


def test_two_tensors_that_change_places_do_so_whole_or_not_at_all(world: World) -> None:
    import interrupts

    world.stream()
    one, two = (world.layer(number).self_attn.q_proj.weight for number in (0, 1))
    before = [world.state()[name].clone() for name in world.queries]

    def swap() -> None:
        one.data, two.data = two.data, one.data

    def act(at: int) -> Any:
        call = lambda: advanced.rewrite(world.session, "m", swap)  # noqa: E731
        return interrupts.interrupted(call, at, "lines", ("model/bind.py",))

    last = max(line for _, _, line in put_back.__code__.co_lines() if line is not None)
    seen = [int(where.split(":")[1].split()[0]) for where in act(-1)[0].seen]
    points = [at for at, line in enumerate(seen) if last - 9 < line <= last]  # bytes are copied, and tensors go back
    for at in (*points[:12], *spread(points, 12)):
        act(at)
        world.answer()
        now = [world.state()[name] for name in world.queries]
        assert any(all(map(torch.equal, now, each)) for each in (before, before[::-1]))


# -- walks ----------------------------------------------------------------------------------------------------------------


class Walk:
    """A random walk over what moves layers, with new weights in between. Its twin gets the same weights and never moves."""

    def __init__(self, seed: int) -> None:
        self.random, self.seed = random.Random(seed), 10
        self.kind = self.random.choice(("llama", "llama-odd", "gpt2"))
        self.model, self.twin = models.make(self.kind, seed=1), models.make(self.kind, seed=1)
        self.neighbour = models.make("qwen2", seed=2)
        self.session = remap.Session(8 << 20, page_bytes=4096)
        self.tenant = self.session.attach(self.model, name="m", kv=models.kv_spec(self.model, max_blocks=600))
        self.session.attach(self.neighbour, name="n", kv=models.kv_spec(self.neighbour, max_blocks=600), active=False)
        self.step_pass()

    def close(self) -> None:
        self.session.close()

    def step_pass(self) -> None:
        if not internals(self.tenant).active:
            self.session.activate("m")
        with torch.no_grad():
            mine, right = (each(IDS, use_cache=False).logits for each in (self.model, self.twin))
        assert torch.equal(mine, right)

    def step_remap(self) -> None:
        selection = self.random.choice(("uniform", "nested", "slices"))
        layers, buffers = self.random.randint(0, 4), self.random.randint(1, 2)
        with suppress(InvalidState, InvalidArgument):
            advanced.remap(self.session, "m", layers, buffers, selection)

    def step_lend(self) -> None:
        with suppress(InvalidState, InvalidArgument):
            advanced.lend(self.session, "m", self.random.randint(0, 4), to=self.random.choice((None, "n")))

    def step_turn(self) -> None:
        if internals(self.tenant).active:
            self.session.deactivate("m", pages=self.random.choice(("own", "none", "auto")))
        else:
            self.session.activate("m")

    def step_settle(self) -> None:
        advanced.settle(self.session)

    def step_rewrite(self) -> None:
        self.seed += 1
        new = models.make(self.kind, seed=self.seed).state_dict()
        how = self.random.choice(("data", "state", "memory", "grad", "views"))
        part = self.random.choice((1.0, 0.5))
        names = [name for name, _ in self.twin.named_parameters() if self.random.random() < part]
        stops = self.random.randint(0, len(names)) if self.random.random() < 0.3 else None
        error = KeyError("the file ends here")
        raised: list[KeyError] = []

        def write(model: Any) -> None:
            parameters = dict(model.named_parameters())
            for number, name in enumerate(names):
                if number == stops:
                    raise error
                tensor, value = parameters[name], new[name]
                if how == "state":
                    model.load_state_dict({name: value}, strict=False)
                elif how == "memory":
                    tensor.data = value.clone()
                elif how == "views":
                    for row, line in zip(tensor.data, value):
                        row.copy_(line)
                elif how == "grad":
                    with torch.no_grad():
                        tensor.copy_(value)
                else:
                    tensor.data.copy_(value)

        with suppress(KeyError):
            write(self.twin)
        try:
            advanced.rewrite(self.session, "m", lambda: write(self.model))
        except KeyError as once:
            raised.append(once)
        assert raised == [error][: stops is not None and stops < len(names)]
        for index, part_of in enumerate(master_of(self.tenant).layout.layers):
            assert changed(part_of, dict(tensors_of(self.twin)), master_of(self.tenant).tensor(index)) == []
        shown = self.model.state_dict()
        assert [n for n, value in self.twin.state_dict().items() if not torch.equal(shown[n], value)] == []


@pytest.mark.parametrize("seed", range(some(6, 40)))
def test_walks(seed: int) -> None:
    walk = Walk(seed)
    try:
        rewrites = 0
        for _ in range(40):
            step = walk.random.choice(
                ("pass", "pass", "remap", "remap", "lend", "turn", "settle", "rewrite", "rewrite")
            )
            rewrites += step == "rewrite" and bool(internals(walk.tenant).away())
            getattr(walk, f"step_{step}")()
        walk.step_pass()
        assert rewrites
    finally:
        walk.close()
