"""The vLLM adapter without vLLM: what it refuses, and its worker and scheduler over stand-ins of vLLM's classes.

What they do inside the engine is tested in tests/engines/vllm.
"""

from __future__ import annotations

import ast
import copy
import importlib
import logging
import re
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from effort import examples
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import remap
from remap import advanced, ranks
from remap.adapters.settings import Settings
from remap.adapters.vllm import apart, engine_internals
from remap.adapters.vllm.reach import Reach
from remap.adapters.vllm.served import HOST_KV, UNSERVED, refuse_unserved
from remap.errors import InvalidState
from remap.model.footprint import Footprint

ROOT = Path(__file__).resolve().parents[2]
CPU = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False, device_name="cpu")
CUDA = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_name="cuda")
ROCM = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="rocm")
XPU = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="xpu")


def config(**changed: Any) -> Any:
    """A configuration that is served. changed: part__field=value."""
    made = SimpleNamespace(
        speculative_config=None,
        kv_transfer_config=None,
        diffusion_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, enable_eplb=False, enable_elastic_ep=False, use_ubatching=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", num_gpu_blocks_override=None, kv_offloading_size=None),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
    )
    for path, value in changed.items():
        *parts, name = path.split("__")
        owner = made
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return made


# -- what is not served ----------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "pipeline parallelism": {"parallel_config__pipeline_parallel_size": 2},
    "speculative decoding": {"speculative_config": SimpleNamespace(method="medusa")},
    "prefill and decode on different servers": {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
    "a KV connector": {"cache_config__kv_offloading_size": 4.0},
    "--cpu-offload-gb": {"offload_config__uva__cpu_offload_gb": 2.0},
    "--offload-group-size": {"offload_config__prefetch__offload_group_size": 4},
    "--kv-cache-dtype": {"cache_config__cache_dtype": "nvfp4"},
    "--enable-eplb": {"parallel_config__enable_eplb": True},
    "--enable-elastic-ep": {"parallel_config__enable_elastic_ep": True},
    "dual-batch overlap": {"parallel_config__use_ubatching": True},
    "--enable-sleep-mode": {"model_config__enable_sleep_mode": True},
    "a model that answers by diffusion": {"diffusion_config": True},
}
NAMED = {"speculative decoding": "medusa", "prefill and decode on different servers": "NixlConnector"}
"""What is found where the configuration has an object."""


def test_every_entry_of_the_table_is_tried_here() -> None:
    assert [each.what for each in UNSERVED] == list(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_its_value(name: str) -> None:
    given = {**REFUSED[name]}
    if "kv_transfer_config" in given:
        given["kv_transfer_config"].kv_connector_extra_config = {}
    with pytest.raises(InvalidState) as caught:
        refuse_unserved(config(**given), CPU)
    assert caught.value.fields["unserved"] == (name,)
    (value,) = caught.value.fields["found"]
    assert value is True or value in (*given.values(), NAMED.get(name))


@pytest.mark.parametrize(("asked", "refused"), [(None, False), (10, False), (11, True)])
def test_an_override_is_refused_if_there_can_never_be_so_many_blocks(asked: int | None, refused: bool) -> None:
    cache = SimpleNamespace(num_gpu_blocks_override=asked)
    if not refused:
        engine_internals.refuse_more_blocks(cache, 10)
        return
    with pytest.raises(InvalidState) as caught:
        engine_internals.refuse_more_blocks(cache, 10)
    assert (caught.value.fields["asked"], caught.value.fields["most"]) == (11, 10)


def test_all_of_several_are_named() -> None:
    given = REFUSED["--enable-eplb"] | REFUSED["--cpu-offload-gb"]
    with pytest.raises(InvalidState) as caught:
        refuse_unserved(config(**given), ROCM)
    assert caught.value.fields["unserved"] == ("--cpu-offload-gb", "--enable-eplb", "rocm")


@pytest.mark.parametrize("platform", [ROCM, XPU], ids=["rocm", "xpu"])
def test_a_device_without_a_backend_is_refused(platform: Any) -> None:
    with pytest.raises(InvalidState) as caught:
        refuse_unserved(config(), platform)
    assert caught.value.fields["unserved"] == (platform.device_name,)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "fp8", "fp8_e5m2"])
def test_the_rest_is_served(dtype: str) -> None:
    for platform in (CPU, CUDA):
        refuse_unserved(config(cache_config__cache_dtype=dtype), platform)


@pytest.mark.parametrize("method", ["ngram_gpu", "suffix", "medusa", "dflash"])
def test_of_speculation_only_what_was_tried_is_served(method: str) -> None:
    for tried in ("ngram", "draft_model", "eagle", "eagle3", "mtp"):
        refuse_unserved(config(speculative_config=SimpleNamespace(method=tried)), CPU)
    with pytest.raises(InvalidState) as caught:
        refuse_unserved(config(speculative_config=SimpleNamespace(method=method)), CPU)
    assert caught.value.fields["found"] == (method,)


@pytest.mark.parametrize("name", ["NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"])
def test_what_another_server_would_read_is_refused_with_what_is_needed(name: str) -> None:
    with pytest.raises(InvalidState, match="needed are memory registered page by page") as caught:
        refuse_unserved(connector(name), CUDA)
    assert caught.value.fields["found"] == (name,)


def connector(name: str, **more: str) -> Any:
    return config(kv_transfer_config=SimpleNamespace(kv_connector=name, kv_connector_extra_config=more))


def test_of_kv_connectors_only_vllms_own_with_our_copies_is_served() -> None:
    module, name = HOST_KV
    refuse_unserved(connector("OffloadingConnector", spec_module_path=module, spec_name=name), CPU)
    for other in (
        connector("OffloadingConnector"),
        connector("OffloadingConnector", spec_name=name),
        connector("SimpleCPUOffloadConnector", spec_module_path=module, spec_name=name),
    ):
        with pytest.raises(InvalidState) as caught:
            refuse_unserved(other, CPU)
        assert caught.value.fields["found"] == (other.kv_transfer_config.kv_connector,)


# -- what is used of vLLM --------------------------------------------------------------------------------------------

NOT_VLLMS = {
    "Python's": "__dict__ __func__ __init__ append clear get items pop setdefault startswith tolist upper values",
    "torch's": "bias buffers clone copy_ cpu data detach device dtype float is_meta long max modules"
    " flatten named_children ndim numel parameters shape squeeze to view weight",
    "prometheus_client's": "add_metric register",
    "ours, on objects of vLLM's": "bind cpu_linear first remap remap_whole",
    "of models; without it nothing is done": "cos_sin_cache load_weights",
    "not in 0.31, where nobody calls what overrides it": "compute_weight_checksums drain_pending",
    "of calls that a trainer makes, on what vLLM has where it can": "update_weights weight_transfer_engine",
    "of the kernel for latent attention on a CPU, which is there if a model has come so far": "do_kv_cache_update impl"
    " gather_mla_context_cache_cpu",
    "of one version or one configuration, and asked for with a default": "blocks_per_kv_block kv_cache_block_copies local_rank"
    " new_block_ids_to_zero pcp_manager use_hybrid_blocks",
}
OURS = {"tenant", "tensors"}
"""Parameters of any type that are not vLLM's objects."""
OVER_VLLM = {"RemapWorker", "RemapOffloader", "Scheduler", "Overlapping", "HostKV", "_Copies"}
THROUGH = {"dict", "enumerate", "getattr", "iter", "list", "max", "min", "next", "reversed", "sorted", "tuple", "zip"}


class Uses(ast.NodeVisitor):
    """The attributes of vLLM's objects that a module uses. These objects are what it imports, parameters of any type, `self` and
    `super()` of a class over one of vLLM's, and whatever is reached from them."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self._known: list[set[str]] = [{"super"}]
        self._over = False
        stored = (
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        )
        self._own = {node.attr for node in stored if ast.unparse(node.value) == "self"}
        self._own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.visit(tree)

    def _theirs(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(name):
                return any(name in scope for scope in self._known)
            case ast.Attribute(ast.Name("self"), name) if name in self._own:
                return False
            case ast.Attribute(value) | ast.Subscript(value):
                return self._theirs(value)
            case ast.Call(ast.Name(name), arguments) if name in THROUGH:
                return any(map(self._theirs, arguments))
            case ast.Call(function):
                return self._theirs(function)
            case ast.Tuple(parts) | ast.List(parts) | ast.BoolOp(_, parts):
                return any(map(self._theirs, parts))
            case ast.IfExp(_, one, other):
                return self._theirs(one) or self._theirs(other)
        return False

    def _bind(self, value: ast.expr, *targets: ast.expr) -> None:
        if self._theirs(value):
            for target in targets:
                if not isinstance(target, ast.Attribute | ast.Subscript):
                    self._known[-1] |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef():
                self._known.append(set())
                for each in (*node.args.args, *node.args.kwonlyargs):
                    any_type = each.annotation is not None and "Any" in ast.unparse(each.annotation)
                    if (any_type and each.arg not in OURS) or (each.arg == "self" and self._over):
                        self._known[-1].add(each.arg)
                self.generic_visit(node)
                self._known.pop()
                return
            case ast.ClassDef():
                before, self._over = self._over, node.name in OVER_VLLM
                self.generic_visit(node)
                self._over = before
                return
            case ast.ImportFrom(str(module), names) if module.split(".")[0] in ("vllm", "prometheus_client"):
                self._known[-1] |= {each.asname or each.name for each in names}
            case ast.Assign(targets, value):
                self._bind(value, *targets)
            case ast.NamedExpr(target, value) | ast.For(target, value):
                self._bind(value, target)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for each in node.generators:
                    self._bind(each.iter, each.target)
            case ast.Call(ast.Name("getattr" | "hasattr"), [whose, ast.Constant(str(name)), *_]) if self._theirs(whose):
                self.found.add(name)
            case ast.Attribute() if self._theirs(node):
                self.found.add(node.attr)
        self.generic_visit(node)


def used() -> set[str]:
    found: set[str] = set()
    for path in set(Path(engine_internals.__file__).parent.glob("*.py")) - {
        Path(apart.__file__)
    }:  # which knows no vLLM
        found |= Uses(ast.parse(path.read_text(encoding="utf-8"))).found
    return found


def test_what_is_used_of_vllm_is_checked_at_the_start_or_has_a_reason() -> None:
    """`Scheduler._preempt_request` and attributes of instances were used, and no check looked at them."""
    checked = {part for each in engine_internals.TOUCHED for part in each.name.split(".")}
    reasons = {name for names in NOT_VLLMS.values() for name in names.split()}
    found = used()
    assert {"_preempt_request", "req_to_blocks", "watermark_blocks", "single_type_managers", "np", "_jobs"} <= found
    assert found - checked - reasons == set()
    assert reasons <= found, "a reason for nothing"


def test_a_field_is_named_once() -> None:
    names = [(each.module, each.name) for each in engine_internals.TOUCHED]
    assert len(names) == len(set(names))


# -- sizes -----------------------------------------------------------------------------------------------------------


def reached(reach: Reach, max_blocks: int) -> set[int]:
    """The blocks that are open when an engine with this reach has asked for more than there can be."""
    layers = [bytes([n + 1]) * nbytes for n, nbytes in enumerate(reach.size.layer_bytes)]
    first = min(reach.first, max_blocks)
    capacity = (reach.size.pages(reach.page) + reach.pages(first)) * reach.page
    with remap.Session(capacity, "cpu", page_bytes=reach.page) as session:
        places = reach.places(first, max_blocks)
        kv = remap.KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=reach.block // 2,
            block_tokens=1,
            dtype="uint8",
            min_blocks=first,
            max_blocks=places,
        )
        rank = ranks.Rank(session, session.attach_bytes(layers, name="m", kv=kv), 0)
        rank.listen(lambda report: [])
        with rank.tenant.forward():
            for layer in range(len(layers)):
                rank.tenant.wait(layer)
                rank.tenant.done(layer)
        report = rank.step(places + 1, 0, anyway=True)
        assert report is not None and report.short > 0
        again = rank.step(places + 1, 0, anyway=True)
        assert again is not None and again.short > 0, "that it falls short is said although nothing has changed"
        return ranks.ids(report.open)


@given(
    st.lists(st.integers(0, 7), min_size=2, max_size=9).filter(lambda pages: sum(map(bool, pages)) > 1),
    st.sampled_from([32, 64, 100, 256, 512, 1000, 2048]),
    st.integers(1, 160_000),
    st.sampled_from([None, None, 1, 3, 0.3, 0.8]),
)
@example([5] * 5, 256, 135_017, None)  # the first cache ends within a page
@example([3] * 7, 2048, 37_705, None)  # a block is larger than a layer
@example([4, 3, 4, 6], 32, 123_285, None)  # the ring is as large as the largest layer
@settings(max_examples=examples(200), deadline=None)
def test_as_many_blocks_as_vllm_is_told_are_reached(
    pages: list[int], part: int, nbytes: int, most: float | None
) -> None:
    """vLLM accepted a prompt of 3,608 tokens, since it was told of 114 blocks, and 113 could ever be: this request and all behind
    it waited for ever. most: a share of the blocks, as a ceiling, or how many layers may leave."""
    size = Footprint(tuple(max(0, 4096 * n - 64) for n in pages), 0)
    reach = Reach(size, 4096, 2 * len(pages) * part, nbytes)
    assume(reach.first >= 1)
    told = reach.reached(most if isinstance(most, int) else None)
    if isinstance(most, float):
        told = max(1, int(told * most))
    found = reached(reach, told)
    assert found >= set(range(told))
    if most is None:
        assert len(found) == told, "and no more are left unsaid"


def test_in_a_shared_arena_no_more_are_told_than_one_engine_leaves_itself() -> None:
    """All but its ring, as large as its largest layer, and what lies outside of layers, though the others have nothing."""
    assert Reach(Footprint((4096, 9000, 0), 5000), 4096, 6, 1).reached_of(20 * 4096 + 1) == (20 - 3 - 1 - 2) * 4096 // 6


# -- the table in the pages ------------------------------------------------------------------------------------------


def rows() -> list[tuple[str, str, str]]:
    """What, what becomes of it, and its tests."""
    page = (ROOT / "docs/notes/vllm.md").read_text(encoding="utf-8")
    table = page.partition("| what | with remap | test |\n|---|---|---|\n")[2].partition("\n\n")[0]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()]  # type: ignore[misc]


def test_what_the_page_says_of_a_feature_has_a_test() -> None:
    """It works with the same tokens, or is refused: nothing else. What the code refuses is there."""
    found = rows()
    assert len(found) > 30
    for what, becomes, tests in found:
        assert becomes.startswith(("same tokens", "works", "refused")), what
        named = re.findall(r"`(\w+\.py)::(test_\w+)`", tests)
        assert named and tests == ", ".join(f"`{file}::{test}`" for file, test in named), what
        for file, test in named:
            folder = "tests/python" if file == Path(__file__).name else "tests/engines/vllm"
            assert f"\ndef {test}(" in (ROOT / folder / file).read_text(encoding="utf-8"), (what, test)
    refused = " ".join(what for what, becomes, _ in found if becomes.startswith("refused"))
    words = {
        "--kv-cache-dtype": "other kinds",
        "a KV connector": "KV connectors",
        "multi-head latent attention (MLA)": "latent",
    }
    for each in UNSERVED:
        assert words.get(each.what, each.what) in refused


# -- stand-ins for vLLM ----------------------------------------------------------------------------------------------


said: list[str] = []
SCHEDULED = SimpleNamespace(total_num_scheduled_tokens=0)


class BaseOffloader:
    pass


class PlainScheduler:
    scheduled = 0

    def __init__(self, vllm_config: Any, block_size: int = 16) -> None:
        self.block_size = block_size

    def schedule(self) -> Any:
        self.scheduled += 1
        return SCHEDULED

    def update_from_output(self, scheduled: Any, output: Any) -> Any:
        return output

    def reset_prefix_cache(self) -> bool:
        said.append("reset")
        return True


class AsyncScheduler(PlainScheduler):
    pass


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of vLLM that the worker and the scheduler import, and those two modules of ours over them."""

    def module(name: str, **names: Any) -> ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if whole not in sys.modules:
                monkeypatch.setitem(sys.modules, whole, ModuleType(whole))
        made = sys.modules[name]
        made.__dict__.update(names)
        return made

    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    ignore = lambda *args: None  # noqa: E731
    core = type("EngineCore", (), {"_initialize_effective_attention_block_size": ignore})
    prefetch = module("vllm.model_executor.offloader.prefetch_ops")
    module("vllm.model_executor.offloader", set_offloader=ignore, prefetch_ops=prefetch)
    module("vllm.model_executor.offloader.base", BaseOffloader=BaseOffloader, set_offloader=ignore)
    module("vllm.platforms", current_platform=CPU)
    module("vllm.compilation.breakable_cudagraph", eager_break_during_capture=lambda call: call)
    module("vllm.v1.core.sched.async_scheduler", AsyncScheduler=AsyncScheduler)
    module("vllm.v1.core.sched.scheduler", Scheduler=PlainScheduler)
    module("vllm.v1.engine.core", EngineCore=core)
    module("vllm.v1.metrics.loggers", StatLoggerBase=object)
    module("vllm.v1.request", RequestStatus=SimpleNamespace(RUNNING="running", FINISHED_ERROR="failed"))
    module(
        "vllm.v1.engine",
        EngineCoreOutput=lambda **fields: SimpleNamespace(**fields),
        EngineCoreOutputs=lambda: SimpleNamespace(outputs=[]),
    )
    names = [f"remap.adapters.vllm.{name}" for name in ("metrics", "offloader", "worker", "scheduler")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    *_, worker, scheduler = (importlib.import_module(name) for name in names)
    yield SimpleNamespace(worker=worker, scheduler=scheduler)
    for name in names:
        sys.modules.pop(name, None)


# -- kinds of models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "size", "served"), [(65536, 655360, True), (65535, 655350, False), (65536, 655361, False)]
)
def test_a_block_is_a_number_of_bytes(each: int, size: int, served: bool) -> None:
    """However many layers share it: a multiple of 2 x layers was asked for, which Gemma 3 has with 8 layers, and not with 6."""
    tensors = [SimpleNamespace(block_stride=each, size=size)] * 3
    config = SimpleNamespace(kv_cache_tensors=tensors, num_blocks=10)
    if served:
        assert engine_internals.block_bytes(config) == each
        return
    with pytest.raises(InvalidState) as caught:
        engine_internals.block_bytes(config)
    assert caught.value.fields == {"block_stride": each, "blocks": 10, "size": size}


def test_the_layers_of_the_transformers_backend_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 11,
        "num_hidden_layers": 3,
    }
    for inner, path in (
        (transformers.LlamaModel(transformers.LlamaConfig(**shape)), "layers"),
        (transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**shape)), "layers"),
        (transformers.FalconModel(transformers.FalconConfig(**shape)), "h"),
    ):
        found = engine_internals.layers_of_transformers(SimpleNamespace(model=inner))
        assert list(found) == list(getattr(inner, path))
    assert engine_internals.layers_of_transformers(SimpleNamespace(model=inner.h)) == ()


def test_latents_are_written_and_gathered_between_those_of_other_layers(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    kernel = type("CPUMLAImpl", (), {"kv_lora_rank": 3})
    stand_in, operators = ModuleType("vllm.v1.attention.backends.mla.cpu_mla"), ModuleType("vllm._custom_ops")
    stand_in.CPUMLAImpl = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setitem(sys.modules, operators.__name__, operators)
    monkeypatch.setattr(sys.modules["vllm"], "_custom_ops", operators, raising=False)
    layer = torch.nn.Module()
    layer.impl = type("AMXMLAImpl", (), {"kv_lora_rank": 3})()
    with pytest.raises(InvalidState, match="--attention-backend CPU_MLA") as caught:
        engine_internals.latents_apart(layer)
    assert caught.value.fields == {"kernel": "AMXMLAImpl"}
    layer.impl = kernel()
    engine_internals.latents_apart(layer)
    slots, new = torch.tensor([5, -1, 2, 7]), torch.arange(16.0).view(4, 4) + 1
    # blocks, layers, tokens of a block, a token's latent
    alone, together = torch.zeros(4, 2, 4), torch.zeros(4, 3, 2, 4)
    table, starts, ends = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32), [0, 1], [0, 3, 4]
    for cache in (alone, together[:, 1]):
        layer.impl.do_kv_cache_update(new[:, :3], new[:, 3:].unsqueeze(1), cache, slots, "auto", None)
        found = torch.zeros(4, 4)
        operators.gather_mla_context_cache_cpu(
            src_cache=cache,
            dst=found,
            block_table=table,
            starts=torch.tensor(starts),
            cu_seq_lens=torch.tensor(ends),
        )
        assert found.equal(alone.view(8, 4)[[2, 3, 4, 7]])
    layer.impl.do_kv_cache_update(new[:, :3], new[:, 3:].unsqueeze(1), torch.zeros(0), slots, "auto", None)
    assert alone.view(8, 4)[slots[slots >= 0]].equal(new[slots >= 0]) and alone.count_nonzero() == 12
    assert together[:, 1].equal(alone) and together[:, ::2].count_nonzero() == 0


def test_a_layer_without_keys_of_its_own_has_the_specification_of_the_one_that_it_reads() -> None:
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(kv_cache_specs={"a": "wide", "b": "narrow"})),
        SimpleNamespace(kv_cache_spec=SimpleNamespace()),
    ]
    layers = {"a": SimpleNamespace(), "c": SimpleNamespace(kv_sharing_target_layer_name="a")}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    engine_internals.specs_of_sharing_layers(config, SimpleNamespace(kv_cache_groups=groups))
    specs = copy.deepcopy(groups[0].kv_cache_spec.kv_cache_specs)  # as vLLM does
    assert specs["c"] == "wide" and dict(specs) == {"a": "wide", "b": "narrow"}
    with pytest.raises(KeyError):
        specs["d"]


# -- without flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "platform", "ours"),
    [
        ({"kv_offloading_size": 4.0}, CPU, True),
        ({"kv_offloading_size": None}, CPU, False),
        ({"kv_offloading_size": 4.0, "kv_offloading_backend": "lmcache"}, CPU, False),
        ({"kv_offloading_size": 4.0, "worker_cls": "a.Worker"}, CPU, False),
        ({"kv_offloading_size": 4.0}, CUDA, False),
        ({"kv_offloading_size": 4.0, "kv_transfer_config": "the user's"}, CPU, False),
    ],
)
def test_a_size_alone_gets_the_copies_that_a_cpu_can_make(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], platform: Any, ours: bool
) -> None:
    class EngineArgs:
        worker_cls, scheduler_cls = "auto", None
        kv_offloading_size, kv_offloading_backend, kv_transfer_config = None, "native", None

        def create_engine_config(self) -> Any:
            return SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=self.worker_cls))

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("vllm", "vllm.engine"):
        module(name)
    module("vllm.engine.arg_utils", EngineArgs=EngineArgs)
    module("vllm.config", KVTransferConfig=lambda **fields: SimpleNamespace(**fields))
    module("vllm.platforms", current_platform=platform)
    monkeypatch.setattr(engine_internals, "admit_config", lambda made: None)
    for _ in range(2):  # a plugin is loaded more than once
        engine_internals.enter_without_flags("our.Worker", "our.Scheduler")
    arguments = EngineArgs()
    vars(arguments).update(given)
    arguments.create_engine_config()
    arguments.create_engine_config()
    assert arguments.worker_cls == given.get("worker_cls", "our.Worker") and arguments.scheduler_cls == "our.Scheduler"
    if ours:
        extra = arguments.kv_transfer_config.kv_connector_extra_config
        assert (extra["spec_module_path"], extra["spec_name"]) == HOST_KV and extra["offload_prompt_only"] is False
    else:
        assert arguments.kv_transfer_config == given.get("kv_transfer_config")


@pytest.mark.parametrize("given", [{}, {"remap": {"slowdown": 0.05}, "the user's": 1}])
def test_compiled_code_is_kept_apart_from_that_of_stock_vllm(given: dict[str, Any]) -> None:
    """vLLM's hash of a configuration, by which it keeps compiled code, has no word of workers and schedulers."""
    changed = SimpleNamespace(additional_config=given)
    for _ in range(2):  # in front of the workers, and in each of them
        engine_internals.keep_apart(changed)
    assert changed.additional_config == {**given, "remap_version": remap.__version__}
    assert "remap_version" not in given  # the user's own, of which another engine may be made
    own = SimpleNamespace(additional_config=object())
    before = own.additional_config
    engine_internals.keep_apart(own)
    assert own.additional_config is before


# -- the scheduler ---------------------------------------------------------------------------------------------------


class OtherProcess:
    """A link whose only rank lives in another process, unless `local`."""

    def __init__(self, local: bool, alpha: int) -> None:
        self.local, self.steps = local, 0
        self.group = SimpleNamespace(ranks=1, target=(alpha, 1))
        self.books = SimpleNamespace(leaving=set())

    def turn_over(self) -> bool:
        return False

    def wake(self) -> bool:
        return True

    def step(self, wanted: int, free: int, can_wait: bool) -> None:
        self.steps += 1
        self.can_wait = can_wait


@pytest.mark.parametrize(
    ("local", "alpha", "wanted", "asked"),
    [(True, 0, 0, 1), (False, 0, 0, 0), (False, 0, 100, 1), (False, 2, 0, 1)],
)
@pytest.mark.parametrize("running", [0, 1])
def test_one_rank_in_another_process_is_asked_only_if_it_may_matter(
    vllm: Any, local: bool, alpha: int, wanted: int, asked: int, running: int
) -> None:
    scheduler: Any = object.__new__(vllm.scheduler.Scheduler)
    scheduler.remap = link = OtherProcess(local, alpha)
    scheduler.running, scheduler._in_flight = [object()] * running, 0
    scheduler.has_unfinished_requests = lambda: True
    scheduler._demand = lambda: wanted
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 50))
    assert scheduler.schedule() is SCHEDULED
    assert link.steps == asked
    assert not asked or link.can_wait == (running > 0)


@pytest.mark.parametrize(
    ("request_", "running", "asks"),
    [
        ("waits", [], (True, False)),  # (anyway, can wait): nothing else can run
        ("waits", ["runs"], (False, True)),
        ("runs", ["runs"], (True, False)),
        ("runs", ["another", "runs"], (False, False)),  # it would be preempted
    ],
)
def test_only_a_request_that_waits_for_its_start_beside_others_can_wait(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, request_: str, running: list[str], asks: tuple[bool, bool]
) -> None:
    scheduler: Any = object.__new__(vllm.scheduler.Scheduler)
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 50))
    scheduler.running, asked = running, list[Any]()
    scheduler._missing_at_start = lambda request, prefixes: 3
    scheduler.remap = SimpleNamespace(step=lambda *given: asked.append(given))
    monkeypatch.setattr(engine_internals, "Prefixes", lambda scheduler: None)
    assert not scheduler._grow(request_, 1)
    assert asked == [(51, 50, *asks)]


@pytest.mark.parametrize("overlaps", [True, False])
def test_only_where_steps_overlap_it_is_vllms_scheduler_for_these(vllm: Any, overlaps: bool) -> None:
    """Without overlap vLLM's own scheduler writes no placeholders, and a worker would compute with them."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=overlaps))
    made = vllm.scheduler.Scheduler(vllm_config=config, block_size=4)
    assert isinstance(made, vllm.scheduler.Scheduler) and isinstance(made, AsyncScheduler) == overlaps
    assert (made.remap, made._step_tokens) == (None, 4)


@pytest.mark.parametrize("asleep", [True, False])
def test_nothing_touches_the_pool_of_a_scheduler_that_sleeps(vllm: Any, asleep: bool) -> None:
    scheduler: Any = object.__new__(vllm.scheduler.Scheduler)
    wakes = lambda: said.append("wake") is None  # noqa: E731
    scheduler.remap = SimpleNamespace(asleep=asleep, wake=wakes, rest=lambda: said.append("rest"))
    said.clear()
    assert scheduler.reset_prefix_cache()
    assert said == (["wake", "reset", "rest"] if asleep else ["reset"])


def test_requests_wait_while_the_layers_have_no_pages(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the scheduler is looked at, but whether there are requests."""
    scheduler: Any = object.__new__(vllm.scheduler.Scheduler)
    scheduler.remap = SimpleNamespace(asleep=True, wake=lambda: False, turn_over=lambda: False)
    scheduler.has_unfinished_requests = lambda: True
    waits: list[float] = []
    monkeypatch.setattr(vllm.scheduler, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(engine_internals, "nothing_scheduled", lambda: "nothing")
    said.clear()
    assert [scheduler.schedule() for _ in range(3)] == ["nothing"] * 3
    assert len(waits) == 3 and all(waits)  # no busy loop
    assert not scheduler.reset_prefix_cache() and said == []


def test_a_turn_ends_when_no_step_is_in_flight_and_no_request_has_a_block(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler: Any = object.__new__(vllm.scheduler.Scheduler)
    over, did = [False], list[str]()
    link = SimpleNamespace(
        asleep=False,
        turn_over=lambda: over[0],
        wake=lambda: not did,
        give_turn=lambda: did.append("gives"),
        local=False,
        may_be_whole=lambda: None,
    )
    link.group, link.books = SimpleNamespace(target=(0, 1)), SimpleNamespace(leaving=set())
    link.rest = lambda: did.append("rests")
    scheduler.remap, scheduler._in_flight, scheduler._demand, scheduler._failed = link, 0, lambda: 0, {}
    scheduler.has_unfinished_requests = lambda: True
    scheduler.running, scheduler.prev_step_scheduled_req_ids = ["a", "b"], {"a", "b"}
    scheduler._preempt_request = lambda request, now: did.append(request)
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 50))
    monkeypatch.setattr(vllm.scheduler, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(engine_internals, "nothing_scheduled", lambda: "nothing")
    monkeypatch.setattr(SCHEDULED, "total_num_scheduled_tokens", 3)
    assert scheduler.schedule() is scheduler.schedule() is SCHEDULED
    over[0] = True
    for _ in range(2):
        assert scheduler.schedule() == "nothing" and not did
        scheduler.update_from_output(SCHEDULED, object())
    assert scheduler.schedule() == "nothing"
    assert did == ["b", "a", "gives"] and not scheduler.running and not scheduler.prev_step_scheduled_req_ids


@pytest.mark.parametrize("grows", [True, False])
def test_an_allocation_that_fails_is_asked_for_again_and_one_beyond_the_start_is_counted(
    vllm: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    metrics = importlib.import_module("remap.adapters.vllm.metrics")
    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path / "figures"))
    free, asked = [1], []
    pool = SimpleNamespace(num_gpu_blocks=5, get_num_free_blocks=lambda: free[0])

    def allocate_slots(request: Any, tokens: int) -> Any:
        if tokens > free[0]:
            return None
        free[0] -= tokens
        return SimpleNamespace(blocks=([object()] * tokens,))

    def grow(request: Any, tokens: int) -> bool:
        asked.append(tokens)
        pool.num_gpu_blocks, free[0] = pool.num_gpu_blocks + 4 * grows, free[0] + 4 * grows
        return grows

    manager = SimpleNamespace(block_pool=pool, allocate_slots=allocate_slots)
    beyond, refused = metrics.Beyond(4), list[Any]()
    scheduler = SimpleNamespace(kv_cache_manager=manager)
    engine_internals.around_allocations(scheduler, grow, beyond.allocated, refused.append)
    running, waiting = SimpleNamespace(status="running"), SimpleNamespace(status="waiting")
    assert manager.allocate_slots(running, 1) is not None  # the last of the start
    assert manager.allocate_slots(running, 0) is not None and not asked
    assert (beyond.running, beyond.waiting) == (0, 0)
    for request in (running, waiting, running):
        assert (manager.allocate_slots(request, 1) is not None) == grows
    assert asked == ([1] if grows else [1, 1, 1]) and refused == ([] if grows else [running, waiting, running])
    assert (beyond.running, beyond.waiting) == ((2, 1) if grows else (0, 0))


@pytest.mark.parametrize(
    ("short", "free", "sharing", "fails"),
    [(1, 5, False, True), (0, 5, False, False), (1, 4, False, False), (1, 5, True, False)],
)
def test_a_request_for_which_there_can_never_be_enough_ends_with_its_numbers(
    vllm: Any, caplog: Any, short: int, free: int, sharing: bool, fails: bool
) -> None:
    """It waited for ever, and all others behind it, without a line of log. While somebody else has a block, or other engines may
    give some, it waits."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    scheduler: Any = vllm.scheduler.Scheduler(vllm_config=config)
    scheduler.kv_cache_manager = SimpleNamespace(
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
        coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks={"r": ["held"] * 4})]),
    )
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=["all layers"])
    scheduler.num_lookahead_tokens, scheduler.max_model_len = 0, 200
    scheduler.remap = SimpleNamespace(books=SimpleNamespace(opened=set(range(10))), sharing=sharing, rest=lambda: None)
    scheduler.has_unfinished_requests = lambda: True
    request = SimpleNamespace(
        request_id="r",
        num_tokens=160,
        num_tokens_with_spec=160,
        num_output_placeholders=0,
        client_index=3,
        trace_headers=None,
        get_finished_reason=lambda: "error",
        take_events=lambda: None,
    )
    scheduler.finish_requests = lambda ids, status: [request] if (ids, status) == (["r"], "failed") else []
    scheduler._short = short
    with caplog.at_level(logging.INFO, "vllm.remap"):
        scheduler._refused(request)
        scheduler._refused(request)
    outputs: dict[int, Any] = {}
    assert scheduler.update_from_output(SCHEDULED, outputs) is outputs
    assert list(outputs) == [3] * fails and not scheduler._failed
    if fails:
        (answer,) = outputs[3].outputs
        assert (answer.request_id, answer.new_token_ids, answer.finish_reason) == ("r", [], "error")
        assert "160 tokens, which take 11 KV blocks; there are 9 " in answer.stop_reason
    assert [record.levelname for record in caplog.records] == ["ERROR"] * fails + ["WARNING"] * sharing


class Rank:
    """One rank behind remote calls."""

    def __init__(self, arena: str = "", woken: Any = ()) -> None:
        from remap.ranks import RankReport

        self._report, self.arena, self._woken = RankReport(((0, 4),), (0, 0)), arena, list(woken)

    def __call__(self, method: str, args: Any = ()) -> list[Any]:
        if method == "remap_call":
            if args[0] == "wake":
                woken = self._woken.pop(0)
                if isinstance(woken, Exception):
                    raise woken
                return [woken]
            return [self._report if args[0] == "report" else None]
        return [{"arena": self.arena, "first_blocks": 6} if method == "remap_manifest" else False]


def test_a_link_tells_whether_its_rank_is_local() -> None:
    from remap.adapters.vllm.link import RankLink

    books: Any = SimpleNamespace(open_now=lambda runs: [], opened={0, 1, 2, 3})
    parallel = SimpleNamespace(world_size=1)
    assert not RankLink(SimpleNamespace(parallel_config=parallel, collective_rpc=Rank()), books).local
    ask = Rank()
    worker = SimpleNamespace(
        **{name: lambda *args, n=name: ask(n, args)[0] for name in ("remap_call", "remap_manifest", "remap_may_move")}
    )
    driver = SimpleNamespace(worker=worker)
    assert RankLink(SimpleNamespace(parallel_config=parallel, driver_worker=driver), books).local


def test_blocks_that_came_back_without_their_kv_are_found_in_no_prefix_cache() -> None:
    """The engine sleeps while others have the pages of its blocks 1 to 3; two of these are open again when it wakes."""
    from remap.adapters.vllm.link import PoolIds, RankLink
    from remap.ranks import RankReport

    evicted: list[int] = []
    queue: list[int] = []
    blocks = [SimpleNamespace(block_id=each, ref_cnt=0, is_null=each == 0) for each in range(6)]
    free = SimpleNamespace(
        remove=lambda block: queue.remove(block.block_id),
        append_n=lambda more: queue.extend(block.block_id for block in more),
    )
    queue.extend(range(1, 6))
    pool = SimpleNamespace(
        blocks=blocks, free_block_queue=free, _maybe_evict_cached_block=lambda block: evicted.append(block.block_id)
    )
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        scheduler_config=SimpleNamespace(watermark=0.0),
        connector=None,
    )
    woken = [None, InvalidState("a rank's device refuses"), RankReport(((0, 3), (4, 5)), (0, 0), lost=((1, 4),))]
    executor = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1), collective_rpc=Rank("unix:/broker", woken)
    )
    link = RankLink(executor, PoolIds(scheduler))
    assert link.asleep and link.first == 6  # of a model that starts cold fewer are open
    evicted.clear()
    assert not link.wake() and link.asleep  # no pages for its layers: nothing has changed
    assert not evicted and sorted(queue) == [1, 2, 3]
    with pytest.raises(
        InvalidState
    ):  # one of several ranks: of what others have lost they tell once, and nobody has heard it
        link.wake()
    assert link.asleep and set(evicted) == {0, 1, 2, 3}
    evicted.clear()
    assert link.wake() and not link.asleep
    assert set(evicted) == {1, 2, 3}
    assert sorted(queue) == [1, 2, 4] and link.books.opened == {0, 1, 2, 4}


# -- the worker ------------------------------------------------------------------------------------------------------


class Runner:
    """A model runner that warms up as Model Runner V2 does: it writes KV into ids from 1 on, one for each seat."""

    def __init__(self, model: Any, blocks: int) -> None:
        self.model, self.kv_cache_config = model, SimpleNamespace(num_blocks=blocks)

    def get_model(self) -> Any:
        return self.model


class Base:
    """vLLM's worker."""

    seats = 300
    model_runner: Any
    remap_rank: Any

    def compile_or_warm_up_model(self) -> str:
        spec, memory = self.remap_rank.tenant.kv.spec, self.remap_rank.tenant.kv.memory
        for block in range(1, min(self.seats, self.model_runner.kv_cache_config.num_blocks - 1) + 1):
            memory[block * spec.block_bytes : (block + 1) * spec.block_bytes].fill_(0x5A)
        return "warm"


@pytest.fixture
def worker(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An attached worker: 4 blocks are open, and there are addresses for 400."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import models

    made: Any = type("Worker", (vllm.worker.RemapWorker, Base), {})()
    model = models.make("llama", seed=1)
    session = remap.Session(4 << 20, page_bytes=4096)
    spec = models.kv_spec(model, max_blocks=400, min_blocks=4, block_tokens=16)
    tenant = session.attach(model, name="vllm", kv=spec)
    models.logits_of(model, models.ids_for(1, 8))
    made.model_runner, made.remap_rank = Runner(model, 400), SimpleNamespace(session=session, tenant=tenant)
    made._remap_trial, made._remap_settings = False, SimpleNamespace(turn_s=5.0)
    made.remap_offloader, made._remap_before = vllm.worker.RemapOffloader(), []
    made.vllm_config = SimpleNamespace(additional_config={})
    monkeypatch.setattr(vllm.worker, "weights_left_in_place", lambda packed: nullcontext())
    yield made
    session.close()


def test_a_dummy_batch_wakes_an_engine_that_sleeps(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = worker.remap_rank.tenant
    worker.remap_rank = ranks.Rank(worker.remap_rank.session, tenant, 0)

    def execute_dummy_batch(self: Any) -> None:
        assert tenant.active
        for layer in range(tenant.layers):
            tenant.wait(layer)
            tenant.done(layer)

    monkeypatch.setattr(Base, "execute_dummy_batch", execute_dummy_batch, raising=False)
    for asleep in (False, True):
        if asleep:
            worker.remap_rank.sleep()
        worker.execute_dummy_batch()
        assert tenant.active != asleep


def test_warming_up_writes_into_open_blocks_only(worker: Any) -> None:
    opened = worker.remap_rank.tenant.kv.usable_blocks
    assert opened < Base.seats < 400
    assert worker.compile_or_warm_up_model() == "warm"
    assert worker.model_runner.kv_cache_config.num_blocks == 400
    assert advanced.differing(worker.remap_rank.session, "vllm") == {}


def test_a_warm_up_that_writes_into_layers_is_refused(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(self: Any) -> None:
        memory = self.remap_rank.tenant.kv.memory
        memory.fill_(0x5A)

    monkeypatch.setattr(Base, "compile_or_warm_up_model", warm_up)
    with pytest.raises(InvalidState) as caught:
        worker.compile_or_warm_up_model()
    assert caught.value.fields["layers"]
    assert set(caught.value.fields["written"]) == set(caught.value.fields["layers"])


def test_what_a_trainer_loads_is_what_streams(worker: Any) -> None:
    import models
    import torch

    model, other, ids = worker.model_runner.model, models.make("llama", seed=2), models.ids_for(1, 8)
    inner: list[str] = []

    def load_weights(weights: Any) -> None:
        tensors = dict(model.named_parameters())
        for name, tensor in weights:
            tensors[name].data.copy_(tensor)
        model.model.load_weights()  # as vLLM's loaders call those of parts

    model.load_weights, model.model.load_weights = load_weights, lambda: inner.append("called")
    engine_internals.around_loading(model, partial(worker._remap_write, "load_weights"))
    model.load_weights((name, tensor.data) for name, tensor in other.named_parameters())
    assert inner == ["called"]
    for seed, layers in ((2, 3), (3, 3), (4, 0)):
        other = models.make("llama", seed=seed)
        if seed > 2:  # with layers away, of which some are in the ring
            model.load_weights((name, tensor.data) for name, tensor in other.named_parameters())
        advanced.remap(worker.remap_rank.session, "vllm", layers)
        assert torch.equal(models.logits_of(model, ids), models.logits_of(other, ids))


def test_vllms_own_calls_that_write_weights_do_so_with_layers_away(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import models
    import torch

    model, ids, calls, later = worker.model_runner.model, models.ids_for(1, 8), [], []

    def load(tensors: Any, name: str) -> None:
        calls.append(name)
        for mine, new in zip(model.parameters(), tensors.parameters()):
            mine.data.copy_(new)

    for name in ("reload_weights", "reset_weights", "start_weight_update", "start_draft_weight_update"):
        monkeypatch.setattr(Base, name, lambda self, other, name=name: load(other, name), raising=False)
    monkeypatch.setattr(Base, "finish_weight_update", lambda self, o: self.reload_weights(o), raising=False)  # nested
    monkeypatch.setattr(Base, "update_weights", lambda self, other: later.append(other), raising=False)
    drain = SimpleNamespace(drain_pending=lambda: load(later[-1], "drained"))  # an engine that writes in threads
    monkeypatch.setattr(Base, "weight_transfer_engine", drain, raising=False)
    names = ["reload_weights", "reset_weights", "start_weight_update", "start_draft_weight_update"]
    names += ["update_weights", "finish_weight_update"]
    advanced.remap(worker.remap_rank.session, "vllm", 3)
    for seed, name in enumerate(names, 2):
        other = models.make("llama", seed=seed)
        getattr(worker, name)(other)
        assert torch.equal(models.logits_of(model, ids), models.logits_of(other, ids)), name
    assert calls == [*names[:4], "drained", "reload_weights"]
    monkeypatch.setenv("REMAP_CPU_LINEAR", "packed")
    with pytest.raises(InvalidState, match="reload_weights"):
        worker.reload_weights(models.make("llama", seed=1))


@pytest.mark.parametrize(("parts", "moves"), [(None, True), (False, True), (True, False)])
def test_blocks_drain_where_a_table_has_parts_of_blocks(parts: bool | None, moves: bool) -> None:
    """vLLM 0.31, where the kernel's blocks are smaller than the cache's: their ids are others."""
    table = SimpleNamespace() if parts is None else SimpleNamespace(use_hybrid_blocks=parts)
    batch = SimpleNamespace(block_table=SimpleNamespace(block_tables=[table]))
    assert engine_internals.can_rename_blocks(SimpleNamespace(input_batch=batch, requests={})) == moves
    second = SimpleNamespace() if parts is None else SimpleNamespace(blocks_per_kv_block=[1, 1 + parts])
    assert engine_internals.can_rename_blocks(SimpleNamespace(block_tables=second)) == moves


def test_it_sleeps_at_level_1_with_an_arena_and_without_requests(vllm: Any) -> None:
    made: Any = vllm.worker.RemapWorker()
    cold: list[bool] = []
    made.remap_rank = SimpleNamespace(turn_cold=lambda: cold.append(True) is None and not busy)
    busy = False
    for arena in ("unix:/broker", "shared"):
        made._remap_settings = SimpleNamespace(arena=arena)
        made.sleep(level=1)
        made.wake_up(tags=None)
    assert cold == [True, True]
    with pytest.raises(InvalidState, match="level 2"):
        made.sleep(level=2)
    busy = True
    with pytest.raises(InvalidState, match="there are requests"):
        made.sleep()
    made._remap_settings = SimpleNamespace(arena="")
    for call in (made.sleep, made.wake_up):
        with pytest.raises(InvalidState, match="REMAP_ARENA=unix:PATH"):
            call()


def test_packed_weights_are_not_loaded_anew(worker: Any) -> None:
    worker.vllm_config.additional_config = {"remap": {"cpu_linear": "packed"}}
    calls: list[int] = []
    with pytest.raises(InvalidState):
        worker._remap_write("load_weights", lambda: calls.append(1))
    assert calls == []


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_a_newer_version_is_tried_at_home_and_away_before_it_serves(
    worker: Any, wrong: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    passes: list[float] = []

    def dummy_pass(runner: Any, tokens: int) -> Any:
        passes.append(worker.remap_rank.tenant.remapped)
        worker.remap_offloader._waited = 0
        return torch.full((tokens, 4), 2.0 if len(passes) - 1 == wrong else 1.0)

    monkeypatch.setattr(engine_internals, "dummy_pass", dummy_pass)
    monkeypatch.setattr(engine_internals, "installed_version", lambda: "9.9.9")

    def entered(tenant: Any, phase: str, tokens: int) -> Any:

        return nullcontext()

    worker.remap_offloader.entered = entered
    worker._remap_before = [torch.ones(8, 4)] * 2
    if wrong is None:
        worker.compile_or_warm_up_model()
    else:
        with pytest.raises(InvalidState) as caught:
            worker.compile_or_warm_up_model()
        assert caught.value.fields["version"] == "9.9.9"
        assert caught.value.fields["tested"] == engine_internals.TESTED
        assert sorted(caught.value.fields["passes"].values()) == [0.0, 1.0]
    assert passes == [0, 1]
    assert worker.remap_rank.tenant.remapped == 0


@pytest.mark.parametrize(
    ("platform", "newer", "joins", "tried", "lowered"),
    [
        (CPU, False, True, False, False),
        (CPU, True, False, True, False),
        (CUDA, False, False, True, False),
        (CUDA, False, True, True, True),
    ],
)
def test_a_gpu_is_tried_at_every_start_and_beside_a_broker_asked_for_what_is_free(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, platform: Any, newer: bool, joins: bool, tried: bool, lowered: bool
) -> None:
    """vLLM wants 0.92 of all memory, of which the broker has most: the documented line did not start."""
    asked: list[float] = []
    gpu_worker = ModuleType("vllm.v1.worker.gpu_worker")
    original = gpu_worker.request_memory = lambda snapshot, config, external=0: asked.append(
        config.gpu_memory_utilization
    )
    monkeypatch.setitem(sys.modules, "vllm.v1", ModuleType("vllm.v1"))
    workers = ModuleType("vllm.v1.worker")
    workers.gpu_worker = gpu_worker
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", workers)
    config = SimpleNamespace(gpu_memory_utilization=0.92)

    class Started(vllm.worker.RemapWorker, Base):
        def _remap_read(self, capacity: int) -> Any:
            return SimpleNamespace(arena="unix:/broker" if joins else "", joins=joins)

    def init_device(self: Any) -> None:
        workers.gpu_worker.request_memory(SimpleNamespace(free_memory=30, total_memory=120), config, 0)

    monkeypatch.setattr(Base, "init_device", init_device, raising=False)
    monkeypatch.setattr(vllm.worker, "current_platform", platform)
    for name in ("show_logs", "admit_config"):
        monkeypatch.setattr(engine_internals, name, lambda *given: None)
    monkeypatch.setattr(engine_internals, "check_version", lambda: newer)
    made: Any = Started()
    scheduler = SimpleNamespace(get_scheduler_cls=lambda: SimpleNamespace(bind=None))
    made.vllm_config = SimpleNamespace(
        scheduler_config=scheduler, parallel_config=SimpleNamespace(world_size=1), kv_transfer_config=None
    )
    made.rank = 0
    made.init_device()
    assert made._remap_trial is tried
    assert asked == [0.25 if lowered else 0.92]
    assert workers.gpu_worker.request_memory is original  # type: ignore[comparison-overlap]


def test_weights_that_a_kernel_keeps_are_refused(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repacked weights stay where they were: nothing was freed, and passes would not have read the arena."""
    import torch

    model = torch.nn.Linear(64, 64)
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    for kept in (0, nbytes // 2):
        monkeypatch.setattr(torch.accelerator, "memory_allocated", iter((nbytes + 5, kept + 5)).__next__)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        if not kept:
            vllm.worker._to_host(model)
            continue
        with pytest.raises(InvalidState) as caught:
            vllm.worker._to_host(model)
        assert (caught.value.fields["nbytes"], caught.value.fields["kept"]) == (nbytes, kept)


@pytest.mark.parametrize(
    ("scheduled", "drafted", "phase"),
    [
        ({"a": 1, "b": 1}, {}, "decode"),
        ({"a": 4, "b": 1}, {"a": [5, 6, 7]}, "decode"),  # drafts are checked beside the next token
        ({"a": 4, "b": 1}, {}, "prefill"),
        ({"a": 4, "b": 9}, {"a": [5, 6, 7]}, "prefill"),
    ],
)
def test_a_pass_that_checks_drafts_is_a_decode(
    worker: Any, monkeypatch: pytest.MonkeyPatch, scheduled: Any, drafted: Any, phase: str
) -> None:

    entered: list[tuple[str, int]] = []

    def enter(tenant: Any, phase: str, tokens: int, *whole: Any) -> Any:
        entered.append((phase, tokens))
        return nullcontext()

    monkeypatch.setattr(Base, "execute_model", lambda self, output: "computed", raising=False)
    worker.remap_offloader.entered, worker._remap_told, worker._remap_gauges = enter, True, None
    output = SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens=drafted,
    )
    assert worker.execute_model(output) == "computed"
    assert entered == [(phase, sum(scheduled.values()))]


def test_figures_are_written_without_a_pass(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """/metrics of an engine that had gone cold showed the layers away and the blocks of its last pass."""
    metrics = importlib.import_module("remap.adapters.vllm.metrics")
    monkeypatch.setattr(metrics, "EVERY_S", 0.001)
    again, written = threading.Event(), list[int]()

    def write() -> None:
        written.append(1)
        if len(written) == 3:
            again.set()

    repeated = metrics.Repeated(write)
    assert again.wait(60)
    repeated.stop()
    assert not repeated._thread.is_alive()


# -- logs --------------------------------------------------------------------------------------------------------------


def test_the_librarys_messages_are_shown_where_vllms_are():
    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((record.name, record.levelname))

    said: list[tuple[str, str]] = []
    both = [logging.getLogger(name) for name in ("vllm", "remap")]
    before = [(each.level, list(each.handlers), each.propagate) for each in both]
    theirs, ours = both
    try:
        theirs.addHandler(Shown())
        theirs.setLevel(logging.INFO)
        ours.setLevel(logging.ERROR)  # somebody's own
        engine_internals.show_logs()
        logging.getLogger("remap.decisions").error("shown elsewhere, if at all")
        assert said == []
        ours.setLevel(logging.NOTSET)
        for _ in range(2):  # once a worker, and a process may have several
            engine_internals.show_logs()
        logging.getLogger("remap.decisions").info("layers are away")
        logging.getLogger("remap.decisions").debug("nobody asked for this")
        assert said == [("remap.decisions", "INFO")]
    finally:
        for each, (level, handlers, propagate) in zip(both, before):
            each.setLevel(level)
            each.handlers[:], each.propagate = handlers, propagate


@pytest.mark.parametrize(
    ("copy_s", "begins"),
    [
        (0.0, ""),  # the link is not known yet
        (0.004, "remap: this machine hides 1 of 10 layers within 2 %"),
        (0.1, "remap: on this link one model alone gains nothing here"),
    ],
)
def test_it_says_once_what_remap_can_do_here(vllm: Any, caplog: Any, copy_s: float, begins: str) -> None:
    made: Any = vllm.worker.RemapWorker.__new__(vllm.worker.RemapWorker)
    times = SimpleNamespace(compute_s=(0.001,) * 10, transfer_s=(copy_s,) * 10)
    tenant = SimpleNamespace(copy_seconds=lambda: copy_s, times=lambda: times, prefill_times=lambda: times)
    made.remap_rank, made._remap_told = SimpleNamespace(tenant=tenant), False
    made._remap_settings = Settings(capacity=1)
    with caplog.at_level(logging.INFO, "vllm.remap"):
        made._remap_tell()
    assert made._remap_told == bool(begins)
    assert [record.getMessage().startswith(begins) for record in caplog.records] == [True] * bool(begins)
