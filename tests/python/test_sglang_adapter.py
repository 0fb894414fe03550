"""The SGLang adapter without SGLang: its hooks around stand-ins that keep ids the way SGLang's allocators do.

What they do inside the engine is tested in tests/engines/sglang.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import remap
from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import models  # noqa: E402

from remap.adapters.settings import Settings  # noqa: E402
from remap.adapters.sglang import hooks, versions  # noqa: E402

PAGE = 4096
LAYERS = 6
SHAPE = {"kv_heads": 2, "head_dim": 16}


class MHATokenToKVPool:
    """The name is what the adapter looks at."""

    kv_cache_layout = "nhd"

    def __init__(self, size: int, page_size: int, **other: Any) -> None:
        self.size, self.page_size = size, page_size
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = LAYERS, 2, 16, 16
        self.store_dtype = torch.float32
        self.k_buffer: list[Any] = []
        self.v_buffer: list[Any] = []
        self.__dict__.update(other)
        hooks.around_buffers(lambda pool: None, self)


class MLATokenToKVPool:
    """The same, of latents, in an odd number of layers."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size, self.layer_num, self.kv_cache_dim = size, page_size, LAYERS - 1, 40
        self.store_dtype = torch.bfloat16
        self.kv_buffer: list[Any] = []
        hooks.around_buffers(lambda pool: None, self)


class Allocator:
    """Ids from 1 on; 0 is padding."""

    device = "cpu"

    def __init__(self, pool: Any) -> None:
        self.pool, self.page_size, self.num_pages = pool, pool.page_size, pool.size // pool.page_size
        self.clear_all()

    def clear_all(self) -> None:
        self.free_pages = torch.arange(1, self.num_pages + 1)

    def merge_and_sort_free(self) -> None:
        self.free_pages = torch.sort(self.free_pages)[0]

    def get_kvcache(self) -> Any:
        return self.pool

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, pages: int) -> list[int]:
        assert pages <= len(self.free_pages)
        ids = self.free_pages[:pages].tolist()
        self.free_pages = self.free_pages[pages:]
        return ids

    def free(self, ids: list[int]) -> None:
        self.free_pages = torch.cat((self.free_pages, torch.tensor(ids, dtype=torch.int64)))


class Tree:
    """A prefix cache: ids that it would give up, oldest first."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def evictable_size(self) -> int:
        return len(self.ids)


def runner_of(page_size: int = 1, ranks: int = 1) -> Any:
    return SimpleNamespace(
        model=models.make("llama"),
        model_config=SimpleNamespace(head_dim=16, v_head_dim=16, get_num_kv_heads=lambda tp: 2, context_len=64),
        layer_info=SimpleNamespace(num_effective_layers=LAYERS), server_args=SimpleNamespace(tp_size=ranks),
        use_mla_backend=False, is_hybrid_swa=False, is_draft_worker=False, kv_cache_dtype=torch.float32, page_size=page_size,
        device="cpu", gpu_id=0, max_total_num_tokens=0,
    )  # fmt: skip


class World:
    """A runner whose memory was allocated through the hook, and a scheduler around it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        page_size: int = 1,
        capacity: int | None = 1600 << 10,
        version: str = versions.TESTED,
        ranks: int = 1,
        runner: Any = None,
        **more: Any,
    ) -> None:
        for name in ("_adapter", "_settings", "_applied"):
            monkeypatch.setattr(hooks, name, None)
        # A reload of these small layers costs next to nothing beside mapping them; here it is paid for at once.
        config = remap.advanced.Knobs(slowdown=1000.0, reserve_blocks=0, contention=1e9, dwell=1)
        monkeypatch.setattr(hooks, "_controller", lambda settings: config)
        settings = Settings(capacity=capacity, page_bytes=PAGE, slowdown=1000.0, **more)
        hooks.configure(settings, version, applied=lambda target: True)
        self.runner = runner or runner_of(page_size, ranks)
        hooks.around_alloc(self.allocate, self.runner)
        adapter = hooks.current()
        assert adapter is not None
        self.adapter, self.tenant, self.allocator = adapter, adapter.tenant, self.runner.token_to_kv_pool_allocator
        self.tree = Tree()
        parts = ("pool_stats_observer", "invariant_checker", "load_inquirer", "kv_events_publisher")
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            chunked_req=None,
            page_size=page_size,
            max_total_num_tokens=0,
            is_fully_idle=lambda: not self.used and not self.waiting,
            running_batch=SimpleNamespace(is_empty=lambda: not self.used),
            last_batch=None,
            **{part: SimpleNamespace(max_total_num_tokens=0) for part in parts},
        )
        self.used: list[int] = []
        self.waiting = 0  # requests in the queue

    def allocate(self, runner: Any) -> None:
        adapter = hooks.current()
        size = adapter.most_tokens
        assert (
            hooks.around_profile(None, SimpleNamespace(mambaish_config=None))
            >= size * adapter.spec.block_bytes // adapter.spec.block_tokens
        )
        assert hooks.around_budget(lambda configurator, budget, cap_tokens: cap_tokens, None, 1) == size
        pool = (MLATokenToKVPool if runner.use_mla_backend else MHATokenToKVPool)(size, runner.page_size)
        runner.token_to_kv_pool_allocator = Allocator(pool)

    def iterate(self) -> None:
        hooks.around_next_batch(lambda scheduler: None, self.scheduler)
        self.check()

    def evict(self, tokens: int) -> None:
        hooks.around_evict(lambda allocator, tree, wanted: None, self.allocator, self.tree, tokens)
        self.check()

    def fill(self, short: int) -> int:
        """Everything is used, and `short` tokens more are wanted. Returns how many tokens there were."""
        tokens = self.adapter.tokens
        self.used = self.allocator.alloc(tokens // self.allocator.page_size)
        self.evict(short)
        return tokens

    def finish(self) -> None:
        self.allocator.free(self.used)
        self.used = []

    def serve(self, iterations: int = 60) -> None:
        for _ in range(iterations):
            self.iterate()
            self.forward()

    def forward(self) -> Any:
        ids = torch.tensor([[1, 2, 3]])
        mode = SimpleNamespace(is_decode=lambda: False, is_mixed=lambda: False)
        batch = SimpleNamespace(forward_mode=mode, input_ids=ids[0])
        with torch.no_grad():
            return hooks.around_forward(lambda runner, batch: runner.model(ids).logits, self.runner, batch)

    def check(self) -> None:
        """Every id is free, in use or cached; sizes agree everywhere; the library's own books hold."""
        ours = [*self.allocator.free_pages.tolist(), *self.used, *self.tree.ids]
        assert len(set(ours)) == len(ours)
        assert 0 not in ours
        tokens = len(ours) * self.allocator.page_size
        assert self.adapter.tokens == tokens == self.runner.max_total_num_tokens
        if self.adapter.scheduler is not None:
            parts = (self.scheduler, self.scheduler.load_inquirer, self.scheduler.kv_events_publisher)
            more = (self.scheduler.invariant_checker, self.scheduler.pool_stats_observer)
            assert {part.max_total_num_tokens for part in (*parts, *more)} == {tokens}
        usable = set(internals(self.tenant).kv.pool.open_ids()) | self.adapter.held.leaving
        if self.adapter.rank.rank:  # its blocks close when rank 0's have left
            assert usable >= self.adapter._opened
            usable = self.adapter._opened | self.adapter.held.leaving
        assert 0 in usable or not self.tenant.active  # padded rows write there
        assert set(ours) == usable.intersection(range(1, self.allocator.num_pages + 1))
        remap.advanced.check(self.adapter.session)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    made = World(monkeypatch)
    yield made
    made.adapter.session.close()


def test_the_pool_lies_in_the_arena_and_its_rows_are_the_ids(world: World):
    pool = world.allocator.pool
    rows = pool.size + pool.page_size
    assert len(pool.k_buffer) == len(pool.v_buffer) == LAYERS
    for layer, (keys, values) in enumerate(zip(pool.k_buffer, pool.v_buffer)):
        assert keys.shape == values.shape == (rows, 2, 16)
        assert keys.is_contiguous() and values.is_contiguous()
        tensor = world.tenant.kv.tensors[layer]
        block = world.allocator.free_pages[-1].item()
        assert keys[block].data_ptr() == tensor[0, block].data_ptr()
        assert values[block].data_ptr() == tensor[1, block].data_ptr()
        values[block] = layer + 1.0
        assert tensor[1, block, 0].view(torch.float32).eq(layer + 1.0).all()
    assert pool.k_buffer[0][0].eq(0).all()  # padding is there, though it is nobody's


def test_a_pool_of_latents_has_a_row_for_each_token_in_each_layer(monkeypatch: pytest.MonkeyPatch):
    runner = runner_of()
    runner.use_mla_backend, runner.kv_cache_dtype = True, torch.bfloat16
    runner.layer_info.num_effective_layers = LAYERS - 1
    vars(runner.model_config).update(kv_lora_rank=32, qk_rope_head_dim=8)
    world = World(monkeypatch, runner=runner)
    pool, rows = world.allocator.pool, world.tenant.kv.tensors[0].shape[1]
    assert len(pool.kv_buffer) == LAYERS - 1
    assert pool.size + pool.page_size <= rows
    block = world.allocator.free_pages[-1].item()
    halves = [half for tensor in world.tenant.kv.tensors for half in tensor]
    for layer, latents in enumerate(pool.kv_buffer):
        assert latents.shape == (pool.size + pool.page_size, 1, 40)
        assert latents.is_contiguous() and latents.dtype == torch.bfloat16
        assert latents[block].data_ptr() == halves[layer][block].data_ptr()
    assert world.fill(short=40) > 0 and world.tenant.remapped
    world.adapter.session.close()


def test_a_model_with_states_beside_its_cache_is_refused(world: World):
    with pytest.raises(remap.InvalidState) as caught:
        hooks.around_profile(None, SimpleNamespace(mambaish_config=SimpleNamespace()))
    assert caught.value.states == "SimpleNamespace"


def test_what_is_short_after_eviction_is_grown_by_and_tokens_stay_the_same(world: World):
    assert (
        world.adapter.session.snapshot().pages.free < 2 * LAYERS
    )  # less than one group: all that fits is usable at once
    assert world.adapter.tokens < world.adapter.most_tokens
    expected = world.forward()
    world.iterate()
    world.evict(world.allocator.available_size())
    assert world.tenant.remapped == 0  # nothing is short
    before = world.fill(1)
    assert world.allocator.available_size() >= 1
    assert world.adapter.tokens > before
    assert world.tenant.remapped >= 1
    assert torch.equal(world.forward(), expected)


@pytest.mark.parametrize("others", ["run", "ran", "", "lack it"])
def test_before_a_pass_decoded_no_layer_leaves_for_a_request_that_can_wait(world: World, others: str):
    """The prefill of a first burst hides copies that no decode pass hides."""
    world.forward()
    world.iterate()
    world.used = world.allocator.alloc(world.adapter.tokens // world.allocator.page_size)
    world.scheduler.running_batch.is_empty = lambda: others == "ran" or not others
    world.scheduler.last_batch = SimpleNamespace(is_empty=lambda: others != "ran")
    grows = others not in ("run", "ran")
    assert world.adapter.grow(5, world.tree, urgent=others == "lack it") == grows
    world.iterate()  # asks once more
    assert (world.tenant.remapped > 0) == grows


def test_layers_come_home_when_what_they_gave_is_free(world: World):
    world.forward()
    start = world.fill(5)
    grown = world.allocator.available_size()
    world.used += world.allocator.alloc(grown)
    late, world.used = world.used[start:], world.used[:start]
    world.allocator.free(world.used)
    world.used = late
    world.serve()
    assert world.tenant.remapped >= 1  # its blocks are in use
    world.finish()
    world.serve()
    assert world.tenant.remapped == 0
    assert world.adapter.tokens == start


def test_the_rest_of_a_chunked_prompt_keeps_its_room(world: World):
    world.forward()
    world.fill(5)
    world.finish()
    everything = world.adapter.tokens
    world.scheduler.chunked_req = SimpleNamespace(seqlen=everything, prefix_len=1)
    world.serve()
    assert world.tenant.remapped >= 1
    assert world.allocator.available_size() >= everything - 1
    world.scheduler.chunked_req = None
    world.serve()
    assert world.tenant.remapped == 0


def test_when_idle_the_prefix_cache_gives_up_what_is_on_its_way_home(world: World, monkeypatch: pytest.MonkeyPatch):
    def give_up(tree: Tree, tokens: int) -> None:
        ids, tree.ids = tree.ids[:tokens], tree.ids[tokens:]
        world.allocator.free(ids)

    monkeypatch.setattr(versions, "evict", give_up)
    world.forward()
    start = world.fill(5)
    world.tree.ids = [*world.used, *world.allocator.alloc(world.allocator.available_size())]
    world.used = []
    world.scheduler.is_fully_idle = lambda: True
    for _ in range(200):
        world.iterate()
        hooks.around_idle(lambda scheduler: world.check(), world.scheduler)
    assert world.tenant.remapped == 0
    assert world.adapter.tokens == start
    assert world.adapter.held.leaving == frozenset()


def test_a_flush_gives_every_usable_id_back_and_no_other(world: World):
    world.forward()
    world.fill(3)
    world.used = []
    hooks.around_clear(Allocator.clear_all, world.allocator)
    world.check()
    assert world.allocator.available_size() == world.adapter.tokens < world.adapter.most_tokens


@pytest.mark.parametrize(("options", "short"), [({"page_size": 8}, 9), ({"max_tokens": 200}, 10_000)])
def test_pages_of_several_tokens_and_no_more_tokens_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: Any, short: int
):
    world = World(monkeypatch, **options)
    world.forward()
    world.fill(short)
    if most := options.get("max_tokens"):
        assert world.adapter.tokens == world.adapter.most_tokens == most
    else:
        assert world.allocator.available_size() >= 16
    world.adapter.session.close()


def test_the_pool_grows_to_a_ceiling_inside_of_a_layer(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch)
    at_start = world.adapter.tokens
    world.adapter.session.close()
    world = World(monkeypatch, max_tokens=at_start + 5)
    world.forward()
    world.fill(100)
    assert world.adapter.tokens == world.adapter.most_tokens == at_start + 5
    assert world.tenant.remapped == 1
    world.finish()
    world.serve()
    assert world.tenant.remapped == 0 and world.adapter.tokens == at_start
    world.adapter.session.close()


# -- admission ---------------------------------------------------------------------------------------------------------


class Budget:
    """total_offset is what running requests may still need."""

    def __init__(self, world: World, offset: int) -> None:
        self.allocator, self.tree_cache, self.offset = world.allocator, world.tree, offset

    @property
    def remaining_total(self) -> int:
        return self.allocator.available_size() - self.offset

    remaining_current = remaining_total

    def check_prefill(self, *, total_tokens: int, **other: Any) -> tuple[bool, int | None]:
        return (True, 7) if total_tokens < self.remaining_total else (False, None)


def test_a_request_that_does_not_fit_is_asked_about_again_after_growing(world: World):
    world.forward()
    budget = Budget(world, offset=10)
    needed = world.adapter.tokens
    ask = {"total_tokens": needed, "chunk_limit": 7}
    assert not budget.check_prefill(**ask)[0]
    assert hooks.around_admission(Budget.check_prefill, budget, **ask) == (True, 7)
    world.check()
    assert budget.remaining_total > needed


def test_a_request_that_can_never_fit_is_refused_once_an_iteration(world: World):
    world.forward()
    world.iterate()
    budget = Budget(world, offset=0)
    ask = {"total_tokens": 10**6, "chunk_limit": 7}
    for _ in range(5):
        assert hooks.around_admission(Budget.check_prefill, budget, **ask) == (False, None)
    world.check()
    assert len(world.adapter.session.snapshot().decisions) == 3  # one shortage is asked about three times at most


def test_room_for_more_is_made_only_if_more_are_waiting(world: World):
    world.forward()
    no, yes = SimpleNamespace(name="NO_TOKEN"), SimpleNamespace(name="CONTINUE")
    budget = Budget(world, offset=world.adapter.tokens)
    adder = SimpleNamespace(memory_budget=budget, can_run_list=[1], waiting_queue_len=1)

    def state(adder: Any) -> Any:
        return yes if adder.memory_budget.remaining_total > 0 else no

    assert hooks.around_state(state, adder) is no
    assert world.tenant.remapped == 0
    adder.waiting_queue_len = 2
    assert hooks.around_state(state, adder) is yes
    assert world.tenant.remapped >= 1


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_a_graph_is_replayed_only_where_no_layer_is_away_or_on_its_way(world: World):
    def may(runner: Any) -> bool:
        found: list[bool] = []
        mode = SimpleNamespace(is_decode=lambda: True)
        batch = SimpleNamespace(forward_mode=mode, input_ids=torch.tensor([1]))

        def forward(runner: Any, batch: Any) -> Any:
            graphs = SimpleNamespace(model_runner=runner)
            found.append(hooks.around_can_run(lambda graphs, batch: True, graphs, batch))
            assert not hooks.around_can_run(lambda graphs, batch: False, graphs, batch)
            if not found[0]:
                with torch.no_grad():
                    world.runner.model(torch.tensor([[1]]))

        hooks.around_forward(forward, runner, batch)
        return found[0]

    world.forward()
    world.iterate()
    assert may(world.runner)
    world.fill(1)
    assert world.tenant.remapped >= 1 and not may(world.runner)
    assert may(SimpleNamespace())  # another model of this process
    world.finish()
    world.serve()
    assert world.tenant.remapped == 0 and may(world.runner)


def test_graphs_are_captured_while_no_thread_of_the_library_works(world: World, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    monkeypatch.setattr(remap.advanced, "settle", lambda session: order.append("settled"))
    for runner in (world.runner, SimpleNamespace()):
        hooks.around_graphs(lambda runner: order.append("captured"), runner)
    assert order == ["settled", "captured", "captured"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def config(decode: str, as_dict: bool) -> Any:
    parts = {"decode": {"backend": decode}, "prefill": {"backend": "breakable"}}
    return parts if as_dict else SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})


@pytest.mark.parametrize("as_dict", [True, False])
def test_arguments_that_do_not_go_together_with_it_are_named(as_dict: bool):
    for good in (
        {"tp_size": 1, "speculative_algorithm": None},
        {"cuda_graph_config": config("disabled", as_dict)},
        {"cuda_graph_config": config("full", as_dict)},  # SGLang's default on a GPU
        {"cuda_graph_config": config("compiled", as_dict), "disable_cuda_graph": True},
    ):
        versions.check_arguments(SimpleNamespace(**good))
    versions.check_arguments(SimpleNamespace(tp_size=2))
    for name, value in (("tp_size", 2), ("speculative_algorithm", "EAGLE"), ("enable_memory_saver", True)):
        with pytest.raises(remap.InvalidState) as caught:
            versions.check_arguments(SimpleNamespace(**{name: value}), joins=name == "tp_size")
        assert (caught.value.argument, caught.value.value) == (name, value)
    with pytest.raises(remap.InvalidState) as caught:
        versions.check_arguments(
            SimpleNamespace(cuda_graph_config=config("compiled", as_dict), disable_cuda_graph=False)
        )
    assert caught.value.argument == "cuda_graph_config.decode"
    assert "--cuda-graph-backend-decode=breakable" in str(caught.value)


def test_other_versions_are_refused():
    versions.check_version(versions.TESTED)
    with pytest.raises(remap.InvalidState) as caught:
        versions.check_version("0.5.9")
    assert (caught.value.version, caught.value.tested) == ("0.5.9", (versions.TESTED,))


def test_a_capacity_without_room_for_a_cache_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(remap.InvalidState) as caught:
        World(monkeypatch, capacity=600 << 10)
    assert caught.value.capacity == 600 << 10
    assert caught.value.weights > 600 << 10


def test_a_hook_that_was_not_applied_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hooks, "_adapter", None)
    gone = versions.TARGETS["around_clear"][0]
    hooks.configure(Settings(capacity=1), versions.TESTED, applied=lambda target: target != gone)
    with pytest.raises(remap.InvalidState) as caught:
        hooks.around_alloc(None, runner_of())
    assert caught.value.missing == [gone]


def test_a_pool_of_another_shape_or_that_did_not_ask_for_its_buffers_is_an_error(world: World):
    with pytest.raises(remap.InvalidState):
        world.adapter.bind(Allocator(SimpleNamespace(size=8, page_size=1)))
    for wrong in ({"head_num": 4}, {"store_dtype": torch.bfloat16}, {"kv_cache_layout": "hnd"}):
        with pytest.raises(remap.InvalidState):
            MHATokenToKVPool(32, 1, **wrong)


def test_layers_that_run_past_their_hooks_are_found_in_the_first_pass(world: World):
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True, is_mixed=lambda: False), input_ids=torch.zeros(1)
    )

    def bypass(runner: Any, batch: Any) -> None:
        for index in range(LAYERS):
            if index != 2:
                world.tenant.wait(index)
                world.adapter._unseen.discard(index)
                world.tenant.done(index)

    with pytest.raises(remap.InvalidState) as caught:
        hooks.around_forward(bypass, world.runner, batch)
    assert caught.value.layers == [2]


def load_other(world: World, seed: int) -> tuple[bool, str]:
    """SGLang's way of writing weights: past torch's counters."""

    def original(updater: Any, *args: Any) -> tuple[bool, str]:
        new = dict(models.make("llama", seed=seed).named_parameters())
        for name, tensor in world.runner.model.named_parameters():
            tensor.data.copy_(new[name].data)
        return True, "Success"

    return hooks.around_update(original, SimpleNamespace())


def test_updated_weights_are_what_streams_afterwards(world: World):
    world.forward()
    assert load_other(world, seed=5)[0] is True
    world.fill(400)
    assert world.tenant.remapped > 0
    ids = models.ids_for(1, 8)
    with world.tenant.forward():
        found = models.logits_of(world.runner.model, ids)
    assert torch.equal(found, models.logits_of(models.make("llama", seed=5), ids))


def test_an_update_brings_layers_home_first_and_those_whose_pages_are_used_stream_it(world: World):
    world.forward()
    world.fill(400)
    assert world.tenant.remapped > 0
    world.used += world.allocator.alloc(len(world.allocator.free_pages))
    ids = models.ids_for(1, 8)
    for seed, away in ((5, True), (6, False)):
        assert load_other(world, seed)[0] is True
        assert (world.tenant.remapped > 0) is away
        with world.tenant.forward():
            found = models.logits_of(world.runner.model, ids)
        assert torch.equal(found, models.logits_of(models.make("llama", seed=seed), ids))
        if away:
            world.finish()


class BeginWeightUpdateReqInput:
    """The name is what the adapter looks at."""


def test_the_begin_and_the_end_of_several_updates_write_too(world: World, monkeypatch: pytest.MonkeyPatch):
    """SGLang unpacks weights, and packs them: a refusal that it does not hear would leave half of that."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    answers = SimpleNamespace(BeginWeightUpdateReqOutput=SimpleNamespace)
    monkeypatch.setattr(sys.modules["sglang.srt.managers"], "io_struct", answers, raising=False)
    away: list[float] = []
    refuses = True

    def begin(manager: Any, request: Any) -> str:
        away.append(world.tenant.remapped)
        if refuses:
            raise remap.InvalidState("not now")
        return "begun"

    def ask() -> Any:
        return hooks.around_update_session(begin, None, BeginWeightUpdateReqInput())

    world.forward()
    world.fill(400)
    assert world.tenant.remapped > 0
    world.used += world.allocator.alloc(len(world.allocator.free_pages))
    answer = ask()
    assert answer.success is False and answer.message == "not now"
    refuses = False
    assert ask() == "begun" and min(away) > 0


# -- a version newer than the tested one ----------------------------------------------------------------------------


class OneBatch:
    """SGLang's benchmark of one batch, over a World: each pass computes the whole sequence anew. wrong: what differs."""

    def __init__(self, world: World, wrong: str) -> None:
        self.world, self.wrong, self.passes = world, wrong, 0

    def prepare_synthetic_inputs_for_latency_test(self, size: int, length: int, custom_inputs: Any) -> list[Any]:
        assert (size, length) == (len(custom_inputs), len(custom_inputs[0]))
        return [list(each) for each in custom_inputs]

    def extend(self, requests: list[Any], runner: Any) -> tuple[Any, Any, Any]:
        (ids,) = requests
        self.world.used += self.world.allocator.alloc(len(ids))
        return *self._pass(ids, runner), ids

    def decode(self, chosen: Any, ids: list[int], runner: Any) -> tuple[Any, Any]:
        ids.append(int(chosen[0]))
        self.world.used += self.world.allocator.alloc(1)
        if self.wrong == "cache":
            ids = [ids[0], *ids[2:]]
        return self._pass(ids, runner)

    def _pass(self, ids: list[int], runner: Any) -> tuple[Any, Any]:
        self.passes += 1
        if self.wrong == "error":
            raise ArithmeticError("7")
        if self.wrong == "writes":
            self.world.tenant.kv.tensors[0][:, max(internals(self.world.tenant).kv.pool.open_ids()) + 40] = 7.0

        def forward(runner: Any, batch: Any) -> Any:
            return runner.model(batch.input_ids[None]).logits

        mode = SimpleNamespace(is_decode=lambda: False, is_mixed=lambda: False)
        batch = SimpleNamespace(forward_mode=mode, input_ids=torch.tensor(ids))
        with torch.no_grad():
            logits = forward(runner, batch) if self.wrong == "past" else hooks.around_forward(forward, runner, batch)
        if self.wrong == "away" and self.world.tenant.remapped:
            logits = logits.flip(-1)
        return logits[0, -1:].argmax(-1), logits[0, -1:]


def start(monkeypatch: pytest.MonkeyPatch, world: World, wrong: str = "") -> OneBatch:
    """What SGLang does behind its memory pool: it makes its runner able to compute."""
    made = OneBatch(world, wrong)
    for name in ("sglang", "sglang.benchmark"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["sglang.benchmark"], "one_batch", made, raising=False)

    def clear() -> None:
        world.used = []
        hooks.around_clear(Allocator.clear_all, world.allocator)

    world.allocator.clear = clear
    world.runner.req_to_token_pool = SimpleNamespace(clear=lambda: None)
    hooks.around_graphs(lambda runner: None, world.runner)
    return made


def test_a_tested_version_is_not_tried(world: World, monkeypatch: pytest.MonkeyPatch):
    assert start(monkeypatch, world).passes == 0


def test_a_newer_version_is_tried_with_layers_at_home_and_away_before_it_serves(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch, version="0.6.0")
    tokens = world.adapter.tokens
    assert start(monkeypatch, world).passes == 3 + 1 + 3
    assert internals(world.tenant).stats().copies > 0
    assert world.tenant.remapped == 0 and world.adapter.tokens == tokens == world.allocator.available_size()
    world.check()
    world.fill(5)
    assert world.tenant.remapped >= 1
    world.adapter.session.close()


@pytest.mark.parametrize("wrong", ["away", "cache", "past", "writes", "error"])
def test_a_newer_version_that_computes_something_else_is_refused_and_detached(
    monkeypatch: pytest.MonkeyPatch, wrong: str
):
    world = World(monkeypatch, version="0.6.0")
    with pytest.raises(remap.InvalidState) as caught:
        start(monkeypatch, world, wrong)
    assert (caught.value.version, caught.value.tested) == ("0.6.0", (versions.TESTED,))
    assert caught.value.differed
    assert isinstance(caught.value.__cause__, ArithmeticError) is (wrong == "error")
    assert hooks.current() is None and world.adapter.session.closed
    if wrong != "writes":
        ids = models.ids_for(1, 8)
        assert torch.equal(models.logits_of(world.runner.model, ids), models.logits_of(models.make("llama"), ids))


def test_where_no_layer_can_leave_it_is_tried_at_home_only(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any) -> None:
        raise remap.InvalidArgument("all layers but one are pinned")

    world = World(monkeypatch, version="0.6.0")
    with monkeypatch.context() as patch:
        patch.setattr(remap.advanced, "remap", refuse)
        assert start(patch, world).passes == 3 + 1
    assert internals(world.tenant).stats().copies == 0
    world.adapter.session.close()


def test_in_a_brokers_arena_it_has_room_for_one_request_and_grows_by_what_others_do_not_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("msgspec", reason="messages between processes need msgspec")
    from remap.broker.server import Broker

    with Broker(tmp_path / "s", 3 << 20, PAGE) as broker:
        world = World(monkeypatch, capacity=None, arena=f"unix:{broker.path}")
        first, had = world.adapter.tokens, broker.ledger.held[1]
        assert 64 <= first <= 64 + world.adapter._group
        world.iterate()
        assert world.fill(first) == first
        assert world.adapter.tokens >= 2 * first
        assert world.tenant.remapped == 0
        assert broker.ledger.held[1] > had
        world.finish()
        with remap.Session(device=f"unix:{broker.path}") as other:  # another process wants all that there is
            layers = [bytes(1000)] * 2
            spec = remap.KVSpec(
                layers=2, kv_heads=1, head_dim=64, block_tokens=16, dtype="uint8", min_blocks=1, max_blocks=4000
            )
            theirs = other.attach_bytes(layers, name="other", kv=spec, config=remap.Config(max_layers=0))
            while world.adapter.tokens > first + world.adapter._group:
                other.step({"other": remap.Demand(4000)})
                world.iterate()
            assert theirs.kv.usable_blocks > 1
        world.adapter.session.close()


class Turns:
    """The world in a broker's arena, and another process with a model whose layers need its pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broker: Any, **more: Any) -> None:
        for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.mem_cache"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name, content in {
            "managers.io_struct": {
                "PauseGenerationReqInput": SimpleNamespace,
                "ContinueGenerationReqInput": SimpleNamespace,
            },
            "managers.schedule_batch": {"NextBatchPlan": SimpleNamespace},
            "mem_cache.base_prefix_cache": {"EvictParams": SimpleNamespace},
        }.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
            package, _, last = name.partition(".")
            monkeypatch.setattr(sys.modules[f"sglang.srt.{package}"], last, module, raising=False)
        monkeypatch.setattr(hooks, "_AGAIN_S", 0.0)
        self.world = world = World(monkeypatch, capacity=None, arena=f"unix:{broker.path}", **more)
        self.paused: list[str] = []
        world.scheduler.pause_generation = self.pause
        world.scheduler.continue_generation = lambda request: self.paused.append("continues")
        world.tree.evict_for_alloc = self.evict
        self.other = remap.Session(device=f"unix:{broker.path}")
        data = [bytes([7 + layer]) * (40 * PAGE) for layer in range(4)]
        spec = remap.KVSpec(
            layers=4, kv_heads=1, head_dim=64, block_tokens=16, dtype="uint8", min_blocks=1, max_blocks=4000
        )
        self.other.attach_bytes(data, name="other", kv=spec, active=False, pages="none")

    def pause(self, request: Any) -> None:
        """SGLang's requests go back to its queue; what they computed is in the prefix cache."""
        self.paused.append(request.mode)
        self.world.waiting += bool(self.world.used)
        self.world.tree.ids += self.world.used
        self.world.used = []

    def evict(self, params: Any) -> None:
        tree = self.world.tree
        gone, tree.ids = tree.ids[: params.num_tokens], tree.ids[params.num_tokens :]
        self.world.allocator.free(gone)

    def others_turn(self) -> bool:
        try:
            return bool(self.other.activate("other").activated)
        except remap.OutOfMemory:
            return False

    def iterate(self) -> Any:
        """One iteration of SGLang's scheduler. Its plan: "scheduled", or one that runs nothing."""
        plan = hooks.around_next_batch(lambda scheduler: "scheduled", self.world.scheduler)
        self.world.check() if not self.world.adapter.asleep else remap.advanced.check(self.world.adapter.session)
        return plan

    def close(self) -> None:
        self.other.close()
        self.world.adapter.session.close()


@pytest.fixture
def broker(tmp_path: Path):
    pytest.importorskip("msgspec", reason="messages between processes need msgspec")
    from remap.broker.server import Broker

    with Broker(tmp_path / "s", 322 * PAGE, PAGE) as made:
        yield made


def until(holds: Any) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end


def test_its_turn_ends_for_another_process_and_its_requests_wait(monkeypatch: pytest.MonkeyPatch, broker: Any) -> None:
    turns = Turns(monkeypatch, broker, turn_s=1e9)
    world = turns.world
    before = world.forward()
    for _ in range(3):
        world.adapter.rank.turn.turn_s = 1e9
        had = world.adapter.tokens
        world.used = world.allocator.alloc(8)
        assert turns.iterate() == "scheduled" and turns.paused == []
        assert not turns.others_turn()
        world.adapter.rank.turn.turn_s = 0.0
        plan = turns.iterate()
        assert plan.batch_to_run is None and plan.running_batch is world.scheduler.running_batch
        assert turns.paused == ["retract", "continues"] and world.adapter.asleep and world.waiting == 1
        free = world.allocator.free_pages.tolist()
        assert world.adapter.tokens == had == len(free)  # as SGLang knows them, whatever goes
        until(turns.others_turn)
        for _ in range(3):
            assert turns.iterate().batch_to_run is None
        assert world.allocator.free_pages.tolist() == free
        done, why = load_other(world, seed=5)
        assert done is False and "other processes" in why
        turns.other.deactivate("other", pages="none")
        until(lambda: turns.iterate() == "scheduled")
        assert not world.adapter.asleep
        world.waiting = 0
        assert torch.equal(world.forward(), before)
        turns.paused.clear()
    turns.close()


def test_without_requests_it_gives_its_pages_at_once_and_asks_for_none(
    monkeypatch: pytest.MonkeyPatch, broker: Any
) -> None:
    turns = Turns(monkeypatch, broker, turn_s=1e9)
    world = turns.world
    before = world.forward()
    world.tree.ids = world.allocator.alloc(20)
    world.used = world.allocator.alloc(4)
    assert not turns.others_turn()
    assert turns.iterate() == "scheduled" and not world.adapter.asleep  # a turn lasts, while there are requests
    world.finish()
    # It is told to schedule: there is nothing.
    until(lambda: not turns.others_turn() and turns.iterate() == "scheduled" and world.adapter.asleep)
    assert world.tree.ids == []
    until(turns.others_turn)
    hooks.around_idle(lambda scheduler: None, world.scheduler)
    assert turns.iterate() == "scheduled" and world.adapter.asleep
    turns.other.deactivate("other")  # it keeps its pages until they are asked for
    world.waiting = 1
    until(lambda: turns.iterate() == "scheduled" and not world.adapter.asleep)
    world.waiting = 0
    assert torch.equal(world.forward(), before)
    turns.close()
