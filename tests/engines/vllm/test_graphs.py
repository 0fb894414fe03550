"""CUDA graphs, by vLLM's own dispatchers: graphs of whole passes only while nothing streams, pieces that end at layers otherwise.

No graph is captured here, which takes a GPU: what is tested is what vLLM would replay, with its classes and stubbed platforms.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")

import torch
import vllm.platforms
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from remap.adapters.vllm import engine_internals
from remap.adapters.vllm.link import PoolIds, RankLink
from remap.adapters.vllm.offloader import RemapOffloader
from remap.errors import InvalidState
from remap.ranks import RankReport

OURS = list(engine_internals.LAYER_OPERATORS)
FULL, PIECES, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODES = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY


class Tenant:
    """What the offloader asks of one."""

    name = "vllm"

    def __init__(self) -> None:
        self.seen, self.streaming = True, False
        self.passes = 0

    def forward(self, phase: str, tokens: int) -> Any:
        tenant = self

        class Pass:
            def __enter__(self) -> None:
                tenant.passes += 1

            def __exit__(self, *error: object) -> None:
                pass

        return Pass()

    def wait(self, layer: int) -> None:
        pass


@pytest.fixture
def offloader() -> RemapOffloader:
    made = RemapOffloader()
    made.layers = [None] * 4  # type: ignore[list-item]
    return made


def compiled(mode: CUDAGraphMode, **more: Any) -> Any:
    """A compilation config as vLLM has it after its own set-up."""
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode, **more)
    config.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = [1, 2, 4, 8], 8
    return config


def dispatcher(mode: CUDAGraphMode) -> CudagraphDispatcher:
    config: Any = SimpleNamespace(
        compilation_config=compiled(mode),
        num_speculative_tokens=0,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    made = CudagraphDispatcher(config)
    made.initialize_cudagraph_keys(mode, 1)
    return made


def manager(mode: CUDAGraphMode) -> CudaGraphManager:
    """Model Runner V2's, with candidates as it makes them: for uniform decodes first those of whole passes."""
    made = CudaGraphManager.__new__(CudaGraphManager)
    whole = [BatchExecutionDescriptor(FULL, 4, 4, 1)] * (mode.decode_mode() == FULL)
    pieces = [BatchExecutionDescriptor(PIECES, 4, None)] * (mode.mixed_mode() == PIECES)
    mixed = [BatchExecutionDescriptor(FULL, 4, 4)] * (mode.mixed_mode() == FULL)
    made._candidates, made._graphs_captured = {(4, 0): [*whole, *mixed, *pieces]}, True
    made._resolve_effective_loras = lambda count: 0  # type: ignore[method-assign]
    return made


def chosen(runner: Any, decode: bool) -> CUDAGraphMode:
    """What vLLM would run for 4 tokens: of 4 requests, or of a prompt."""
    if hasattr(runner, "cudagraph_dispatcher"):
        return runner.cudagraph_dispatcher.dispatch(num_tokens=4, uniform_decode=decode)[0]
    return runner.cudagraph_manager.dispatch(4 if decode else 1, 4, 1 if decode else None, 0).cg_mode


RUNNERS = [
    pytest.param(lambda mode: SimpleNamespace(cudagraph_dispatcher=dispatcher(mode)), id="V1"),
    pytest.param(lambda mode: SimpleNamespace(cudagraph_manager=manager(mode)), id="V2"),
]
# mode -> (a decode at home, a prompt at home, a decode beside streaming, a prompt beside streaming)
EXPECTED = {
    BOTH: (FULL, PIECES, PIECES, PIECES),
    PIECES: (PIECES, PIECES, PIECES, PIECES),
    DECODES: (FULL, NONE, NONE, NONE),
    FULL: (FULL, FULL, NONE, NONE),
}


@pytest.mark.parametrize("mode", EXPECTED, ids=lambda mode: mode.name)
@pytest.mark.parametrize("make", RUNNERS)
def test_whole_graphs_run_only_while_nothing_streams(offloader: RemapOffloader, make: Any, mode: CUDAGraphMode) -> None:
    runner, tenant = make(mode), Tenant()
    stock = [chosen(runner, decode) for decode in (True, False)]
    for _ in range(2):  # every pass asks
        engine_internals.guard_whole_graphs(runner, offloader.may_be_whole, offloader.is_whole)
    assert [chosen(runner, decode) for decode in (True, False)] == stock  # captures and warm-ups, outside of passes
    found = []
    for streaming in (False, True):
        tenant.streaming = streaming
        for decode in (True, False):
            with offloader.entered(tenant, "decode", 4):
                found.append(chosen(runner, decode))
                if found[-1] != FULL:
                    for layer in range(4):
                        offloader._wait_for_layer(layer)
    assert tuple(found) == EXPECTED[mode] and found[:2] == stock
    assert tenant.passes == 4


@pytest.mark.parametrize("make", RUNNERS)
def test_none_runs_before_a_pass_has_waited_for_every_layer(offloader: RemapOffloader, make: Any) -> None:
    """Else no pass ever would, where all graphs are whole, and no layer could leave."""
    runner, tenant = make(FULL), Tenant()
    engine_internals.guard_whole_graphs(runner, offloader.may_be_whole, offloader.is_whole)
    tenant.seen = False
    with pytest.raises(InvalidState) as caught, offloader.entered(tenant, "decode", 4):
        assert chosen(runner, True) == NONE
    assert caught.value.fields["waited"] == 0
    tenant.seen = True
    with offloader.entered(tenant, "decode", 4):
        assert chosen(runner, True) == FULL


def test_a_pass_without_waits_is_wrong_unless_it_was_whole(offloader: RemapOffloader) -> None:
    runner, tenant = SimpleNamespace(cudagraph_dispatcher=dispatcher(BOTH)), Tenant()
    engine_internals.guard_whole_graphs(runner, offloader.may_be_whole, offloader.is_whole)
    with offloader.entered(tenant, "decode", 4):
        assert chosen(runner, True) == FULL
    with pytest.raises(InvalidState), offloader.entered(tenant, "decode", 4):
        assert chosen(runner, False) == PIECES


@pytest.mark.parametrize("make", RUNNERS)
def test_ranks_replay_a_whole_graph_all_or_none(offloader: RemapOffloader, make: Any) -> None:
    """One that replays it beside one that does not reads what that one has not written."""
    runner, tenant = make(BOTH), Tenant()
    engine_internals.guard_whole_graphs(runner, offloader.may_be_whole, offloader.is_whole)
    with offloader.entered(tenant, "decode", 4, whole=False):  # another rank's layer is not home yet
        assert chosen(runner, True) == PIECES
        for layer in range(4):
            offloader._wait_for_layer(layer)
    with offloader.entered(tenant, "decode", 4, whole=True):
        assert chosen(runner, True) == FULL
    tenant.streaming = True
    with pytest.raises(InvalidState, match="agreed"), offloader.entered(tenant, "decode", 4, whole=True):
        pass
    assert tenant.passes == 3, "the pass has ended"


def test_ranks_are_asked_until_no_layer_of_any_waits() -> None:
    settled, asked, target = [[True, False], [True, True]], [], (0, 0)

    def rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "remap_settled":
            asked.append(method)
            return settled.pop(0)
        if method == "remap_may_move":
            return [True, True]
        if method == "remap_manifest":
            return [{"first_blocks": 4, "arena": ""}] * 2
        report = RankReport(((0, 4),), target)
        return {"report": [report] * 2, "step": [report, None], "listen": [None] * 2}.get(args[0], ["", ""])

    executor = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2), collective_rpc=rpc)
    pool = BlockPool(4, enable_caching=False, hash_block_size=16)
    manager = SimpleNamespace(block_pool=pool, watermark_blocks=0)
    config = SimpleNamespace(watermark=0.25)
    link = RankLink(executor, PoolIds(SimpleNamespace(kv_cache_manager=manager, scheduler_config=config)))
    assert [link.may_be_whole() for _ in range(4)] == [False, True, True, True] and len(asked) == 2
    target = (2, 1)
    link.step(1, 0)
    assert not link.may_be_whole() and len(asked) == 2, "none, while layers are away"
    target, settled = (0, 0), [[False, True], [True, True]]
    link.step(0, 4)
    assert [link.may_be_whole() for _ in range(3)] == [False, True, True] and len(asked) == 4


def test_layers_are_breaks_of_graphs_that_vllm_breaks_by_itself(
    offloader: RemapOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's default for some families, without a compiler: no layer waited in a replay, since the operators were captured."""
    from vllm.compilation import breakable_cudagraph

    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setattr(breakable_cudagraph, "_weak_ref_capture_arg", lambda given: given)
    calls: list[tuple[str, int]] = []

    class Waits(Tenant):
        def wait(self, layer: int) -> None:
            calls.append(("wait", layer))

        def done(self, layer: int) -> None:
            calls.append(("done", layer))

    class Capture:
        """As BreakableCUDAGraphCapture: what is not in `eager` would be a graph."""

        _capturing = True

        def __init__(self) -> None:
            self.eager: list[Any] = []

        def add_eager(self, call: Any) -> Any:
            self.eager.append(call)
            return call()

    made = RemapOffloader()
    made.bracket(torch.nn.Linear(4, 4) for _ in range(2))
    layers = torch.nn.Sequential(*made.layers)
    breakable_cudagraph.BreakableCUDAGraphCapture._tls.active = capture = Capture()
    try:
        layers(torch.ones(1, 4))  # captured outside of a pass: nothing waits
    finally:
        breakable_cudagraph.BreakableCUDAGraphCapture._tls.active = None
    assert len(capture.eager) == 4 and calls == []
    with made.entered(Waits(), "decode", 1):
        for replay in capture.eager:
            replay()
    assert calls == [("wait", 0), ("done", 0), ("wait", 1), ("done", 1)]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_name="cuda")
    monkeypatch.setattr(vllm.platforms, "_current_platform", gpu)


@pytest.mark.parametrize("mode", [BOTH, PIECES], ids=lambda mode: mode.name)
def test_pieces_end_at_layers_and_vllms_own_list_stays(monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode) -> None:
    config: Any = SimpleNamespace(compilation_config=compiled(mode))
    theirs = list(config.compilation_config.splitting_ops)
    own = list(CompilationConfig._attention_ops)
    assert theirs and not set(OURS) & set(theirs)
    engine_internals.split_at_layers(config)
    assert config.compilation_config.splitting_ops == theirs  # on a CPU there are no graphs
    on_a_gpu(monkeypatch)
    for _ in range(2):  # in front of the workers, and in each of them
        engine_internals.split_at_layers(config)
    assert config.compilation_config.splitting_ops == [*theirs, *OURS]
    assert list(CompilationConfig._attention_ops) == own
    assert config.compilation_config.cudagraph_mode == mode
    assert config.compilation_config.is_attention_compiled_piecewise()


def test_compiled_code_is_kept_apart_from_that_of_stock_vllm() -> None:
    config = VllmConfig()
    stock = config.compute_hash()
    engine_internals.keep_apart(config)
    assert config.compute_hash() != stock


@pytest.mark.parametrize("mode", [FULL, DECODES, NONE], ids=lambda mode: mode.name)
def test_without_pieces_nothing_is_split(monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode) -> None:
    config: Any = SimpleNamespace(compilation_config=compiled(mode))
    theirs = list(config.compilation_config.splitting_ops)
    on_a_gpu(monkeypatch)
    engine_internals.split_at_layers(config)
    assert config.compilation_config.splitting_ops == theirs


def test_the_layers_are_those_that_keep_keys_and_values() -> None:
    """An encoder's stay where they are, and a second stack that keeps some is refused."""

    class Keeps(torch.nn.Module, AttentionLayerBase):
        get_attn_backend = get_kv_cache_spec = None

    made, encoder, layers, more = RemapOffloader(), [torch.nn.Linear(4, 4)], [Keeps(), Keeps()], [Keeps()]
    assert made.wrap_modules(iter(encoder)) == encoder and made.layers == []
    assert made.wrap_modules(iter(layers)) == made.layers == layers
    assert made.wrap_modules(iter(encoder)) == encoder
    with pytest.raises(InvalidState) as refused:
        made.wrap_modules(iter(more))
    assert refused.value.layers == 2 and made.layers == layers
