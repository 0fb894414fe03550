"""What a user of torch naturally does with an attached model: each is right, or raises; nothing computes with other bytes.

Each test replays one failure of the first inspection: what its docstring says happened, silently, before it was mended.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models import LAYERS, addresses_of, bytes_of, generate, ids_for, kv_spec, layers_of, logits_of, make  # noqa: E402
from torch import nn  # noqa: E402

import remap  # noqa: E402
from remap import InvalidArgument, InvalidState  # noqa: E402
from remap.adapters.hooks import attach_hooks  # noqa: E402
from remap.model.hooks import OURS  # noqa: E402

PAGE = 16384
MODES = pytest.mark.parametrize("mode", ["aliased", "strict"])


class World:
    """A model in a session, with the hooks that attach puts in, and its twin outside. A context manager."""

    def __init__(self, kind="llama", *, mode="aliased", remapped=0, prove=True, model=None, **attach):
        self.model = model or make(kind)
        self.bare = copy.deepcopy(self.model)
        self.ids = ids_for(2, 7)
        self.expected = logits_of(self.bare, self.ids)
        spec = kv_spec(self.model, max_blocks=1200)
        self.session = remap.Session(180 * PAGE, page_bytes=PAGE, mode=mode)
        self.tenant = self.session.attach(self.model, kv=spec, name="m", **attach)
        if prove:
            self.right()
        if remapped:
            remap.advanced.remap(self.session, "m", remapped)
            assert len(self.tenant.streamed) == remapped + 1

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.session.close()
        if kind is None:
            assert torch.equal(logits_of(self.model, self.ids), self.expected)
            for owner in (*self.model.modules(), *self.model.parameters()):
                assert not any(getattr(value, OURS, False) for value in owner.__dict__.values())

    def right(self):
        assert torch.equal(logits_of(self.model, self.ids), self.expected)

    def bypassed(self, call, layers=None):
        """The pass raises when it is left, names the layers, and the next one is right again."""
        with pytest.raises(InvalidState) as caught:
            call()
        away = layers or self.tenant.streamed
        assert (caught.value.tenant, caught.value.layer, caught.value.layers) == ("m", away[0], tuple(away))
        assert "discarded" in str(caught.value)
        assert not self.tenant.in_pass


def equal(state, expected):
    assert list(state) == list(expected)
    wrong = [name for name in expected if not torch.equal(state[name], expected[name])]
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors differ: {wrong[:3]}"


# --- item 5: a pass that does not wait for its layers -----------------------------------------------------------------


@MODES
def test_hooks_are_attached_by_attach_and_go_with_the_tenant(mode):
    """A model whose user forgot attach_hooks computed with whatever the ring held."""
    model = make("llama")
    before = {module: dict(module.__dict__) for module in model.modules()}
    with World(model=model, mode=mode, remapped=4) as world:
        world.right()
        assert world.session.snapshot().tenants["m"].copies > 0
        tokens = generate(world.bare, world.ids)[0]
        assert torch.equal(generate(world.model, world.ids)[0], tokens)
    after = {module: dict(module.__dict__) for module in model.modules()}
    assert [list(each) for each in after.values()] == [list(each) for each in before.values()]
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._state_dict_hooks


@MODES
def test_a_pass_without_hooks_raises(mode):
    """hooks=False was said, and then nobody called wait."""
    with World(mode=mode, prove=False, hooks=False, remapped=3) as world:

        def unhooked():
            with world.tenant.forward():
                logits_of(world.model, world.ids)

        world.bypassed(unhooked)
        hooks = attach_hooks(layers_of(world.model), world.tenant, model=world.model)
        world.right()
        hooks.remove()
        hooks.remove()
        world.bypassed(unhooked)
        remap.advanced.remap(world.session, "m", 0)
        with attach_hooks(layers_of(world.model), world.tenant, model=world.model):
            world.right()
        unhooked()  # everything is at home, and was waited for: nothing is needed


@MODES
def test_hooks_that_somebody_cleared_are_missed(mode):
    """`module._forward_pre_hooks.clear()`, on one streamed layer or on all."""
    with World(mode=mode, remapped=3) as world:
        victim = world.tenant.streamed[1]
        layers_of(world.model)[victim]._forward_pre_hooks.clear()
        world.bypassed(lambda: logits_of(world.model, world.ids), [victim])
        for layer in layers_of(world.model):
            layer._forward_pre_hooks.clear()
        world.bypassed(lambda: logits_of(world.model, world.ids))


@MODES
@pytest.mark.parametrize("which", ["called by forward", "forward replaced", "skipped", "all resident ones skipped"])
def test_a_layer_that_runs_past_its_hooks_is_missed(mode, which, monkeypatch):
    """A layer called as `layer.forward(...)`, a replaced `layer.__call__`, a layer that early exit skips."""
    with World(mode=mode, remapped=2) as world:
        layers, streamed = layers_of(world.model), world.tenant.streamed
        victims = streamed[-1:] if which != "all resident ones skipped" else set(range(LAYERS)) - set(streamed)

        class Around(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.__dict__["inner"] = inner
                self.attention_type = getattr(inner, "attention_type", None)

            def forward(self, hidden, *args, **kwargs):
                return hidden if "skipped" in which else self.inner.forward(hidden, *args, **kwargs)

        kept = list(layers)
        for victim in victims:
            layers._modules[str(victim)] = Around(kept[victim])
        if which == "all resident ones skipped":
            logits_of(world.model, world.ids)  # harmless, and not the library's business
        else:
            world.bypassed(lambda: logits_of(world.model, world.ids), streamed[-1:])
        for index, layer in enumerate(kept):
            layers._modules[str(index)] = layer
        world.right()


@MODES
def test_an_abandoned_pass_raises_nothing_of_its_own(mode):
    """The caller's exception is what is told, not that the layers behind it were not waited for."""
    with World(mode=mode, remapped=3) as world:
        with pytest.raises(KeyError), world.tenant.forward():
            raise KeyError
        world.right()


@MODES
def test_loading_layers_are_missed_as_well(mode):
    """Not streamed any more, and still on its way home: no less wrong."""
    with World(mode=mode, prove=False, hooks=False, remapped=3) as world:
        away = world.tenant.streamed
        remap.advanced.remap(world.session, "m", 0)
        assert world.tenant.streamed == ()

        def unhooked():
            with world.tenant.forward():
                pass

        world.bypassed(unhooked, away)


def test_a_missed_pass_teaches_no_times():
    """What it took says nothing about a pass."""
    with World(prove=False, hooks=False, remapped=3) as world:
        with pytest.raises(InvalidState), world.tenant.forward():
            pass
        assert world.tenant.times() is None


def test_attach_hooks_wants_the_layers_themselves_all_and_in_order():
    """Hooks on other modules, in another order, or twice were accepted, and waited for the wrong layers."""
    with World(prove=False, hooks=False) as world:
        layers, other = list(layers_of(world.model)), list(layers_of(world.bare))
        swapped = [layers[1], layers[0], *layers[2:]]
        wrong = {
            "none": ([], None),
            "half": (layers[: LAYERS // 2], None),
            "one more": ([*layers, world.model.lm_head], None),
            "twice": ([layers[0], *layers[:-1]], 1),
            "swapped": (swapped, 0),
            "another model's": (other, 0),
        }
        for name, (modules, index) in wrong.items():
            with pytest.raises(InvalidArgument) as caught:
                attach_hooks(modules, world.tenant, model=world.model)
            assert caught.value.fields.get("index") == index, name
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        assert "forward" not in world.model.__dict__
        with attach_hooks(layers, world.tenant, model=world.model), pytest.raises(InvalidState):
            attach_hooks(layers, world.tenant)
    with World() as world, pytest.raises(InvalidState):
        attach_hooks(layers_of(world.model), world.tenant)


@MODES
def test_nothing_is_streamed_before_a_whole_pass_was_seen(mode):
    """A model that runs past its hooks was streamed, and found out in wrong tokens, if at all."""
    with World(mode=mode, prove=False, active=True) as world:
        session = world.session
        for call in (
            lambda: remap.advanced.remap(session, "m", 1),
            lambda: remap.advanced.remap(session, "m", 0.5, 1, "slices"),
        ):
            with pytest.raises(InvalidState) as caught:
                call()
            assert caught.value.layers == tuple(range(LAYERS))
        with pytest.raises(InvalidState):
            remap.advanced.lend(session, "m", 1)
        remap.advanced.remap(session, "m", 0)
        everything = remap.Demand(blocks=world.tenant.kv.max_blocks)
        report = session.step({"m": everything})
        assert report.unmet_blocks["m"] > 0 and world.tenant.streamed == ()
        assert "no pass has waited for every layer" in report.reason["m"]

        layers = layers_of(world.model)
        cleared = dict(layers[2]._forward_pre_hooks)
        layers[2]._forward_pre_hooks.clear()
        world.right()
        with pytest.raises(InvalidState) as caught:
            remap.advanced.remap(session, "m", 1)
        assert caught.value.layers == (2,)
        layers[2]._forward_pre_hooks.update(cleared)
        world.right()
        session.step({"m": everything})
        assert world.tenant.streamed
        world.right()


def test_an_idle_tenant_lends_before_its_first_pass():
    """What it lends comes home before that pass, or is looked for in it."""
    with World(prove=False, active=False) as world:
        remap.advanced.lend(world.session, "m", 3)
        assert len(world.tenant.streamed) == 4
        assert world.session.activate("m").activated
        world.right()
        remap.advanced.remap(world.session, "m", 2)
        world.right()


def test_layers_called_outside_of_a_pass_are_refused_while_layers_stream():
    """`model.model(...)` runs the layers without the bracket: a change that was not settled yet would not be either."""
    with World() as world:
        hidden = world.model.model(world.ids).last_hidden_state
        remap.advanced.remap(world.session, "m", 3)
        with pytest.raises(InvalidState) as caught:
            world.model.model(world.ids)
        assert (caught.value.tenant, caught.value.layer) == ("m", 0)
        with world.tenant.forward("prefill", 14):
            assert torch.equal(world.model.model(world.ids).last_hidden_state, hidden)


def test_the_head_streams_through_its_own_hook():
    """`extra_layers` are hooked like the others."""
    with World(extra_layers=["lm_head"]) as world:
        remap.advanced.remap(world.session, "m", LAYERS)
        assert LAYERS in world.tenant.streamed
        world.right()
        world.model.lm_head._forward_pre_hooks.clear()
        world.bypassed(lambda: logits_of(world.model, world.ids), [LAYERS])


def test_the_reference_engine_proves_itself_without_hooks_false():
    """It calls wait and done by itself, and never calls a layer as a module: the hooks see nothing."""
    from remap.engine import LLMEngine, Request, SamplingParams

    prompt = tuple(world_ids := ids_for(1, 9)[0].tolist())
    with World() as fresh:
        expected = generate(fresh.bare, torch.tensor([world_ids]), 8)[0][0, 9:].tolist()
    with World(prove=False) as world:
        engine = LLMEngine(world.model, world.tenant, session=world.session)
        for turn in range(3):
            request = Request(f"r{turn}", prompt, SamplingParams(max_tokens=8))
            assert list(engine.run([request]).outputs[f"r{turn}"].tokens) == expected
            remap.advanced.remap(world.session, "m", turn + 2)


def test_backward_through_streamed_layers_is_refused():
    """Autograd keeps the tensor, not its bytes: gradients were computed with another layer's weights."""
    with World() as world:
        world.model(world.ids).logits.sum().backward()  # resident: as ever
        world.bare(world.ids).logits.sum().backward()
        pairs = zip(world.model.parameters(), world.bare.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
        world.model.zero_grad()
        out = world.model(world.ids).logits
        remap.advanced.remap(world.session, "m", 3)
        with pytest.raises(InvalidState, match="backward"):
            out.sum().backward()
        with pytest.raises(InvalidState, match="backward"):
            world.model(world.ids).logits.sum().backward()
        world.model.zero_grad()


@pytest.mark.filterwarnings("ignore")  # that dynamo cannot trace the core
@pytest.mark.parametrize("compile", ["model", "layers", "in place"])
def test_a_compiled_model_waits_or_raises(compile):
    """torch.compile traces hooks, or runs past them."""
    with World() as world:
        called = world.model
        if compile == "model":
            called = torch.compile(world.model, backend="eager")
        elif compile == "in place":
            world.model.compile(backend="eager")
        else:
            for layer in layers_of(world.model):
                layer.compile(backend="eager")
        with torch.no_grad():
            for remapped in (0, 3):
                remap.advanced.remap(world.session, "m", remapped)
                for _ in range(2):
                    assert torch.equal(called(world.ids, use_cache=False).logits, world.expected)
        torch._dynamo.reset()
        for module in world.model.modules():
            module._compiled_call_impl = None


def test_a_traced_model_is_refused():
    """What is traced computes with the tensors' memory and knows no hooks."""

    class Plain(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids, use_cache=False).logits

    with World() as world, pytest.raises(InvalidState, match="trace"):
        torch.jit.trace(Plain(world.model), (world.ids,), check_trace=False)


def test_data_parallel_on_the_cpu_is_the_model_itself():
    """Its replicas would share hooks and memory; without devices there are none."""
    with World(remapped=3) as world, torch.no_grad():
        assert torch.equal(nn.DataParallel(world.model)(world.ids, use_cache=False).logits, world.expected)


# --- item 6: what torch does with the weights of a model -------------------------------------------------------------


@MODES
@pytest.mark.parametrize("kind", ["llama", "llama-odd", "opt"])
@pytest.mark.parametrize("remapped", [0, 3, 5])
def test_state_dict_has_the_model_s_bytes(kind, mode, remapped):
    """28 of 75 tensors were the ring's."""
    with World(kind, mode=mode, remapped=remapped) as world:
        expected = world.bare.state_dict()
        equal(world.model.state_dict(), expected)
        world.right()
        equal(world.model.state_dict(), expected)
        part = layers_of(world.model)
        equal(part.state_dict(prefix="p."), layers_of(world.bare).state_dict(prefix="p."))
        equal(part[3].self_attn.state_dict(), layers_of(world.bare)[3].self_attn.state_dict())
        state = world.model.state_dict()
        for name in state:
            state[name] = state[name].clone().zero_()
        world.right()
        remap.advanced.remap(world.session, "m", 0)  # loading
        equal(world.model.state_dict(), expected)
        file = io.BytesIO()
        torch.save(world.model.state_dict(), file)
        file.seek(0)
        equal(torch.load(file), expected)


@MODES
@pytest.mark.parametrize("kind", ["llama", "llama-odd"])
def test_save_pretrained_writes_the_model(kind, mode, tmp_path):
    """The checkpoint was corrupt, and nothing said so. llama-odd ties its head to its embedding."""
    with World(kind, mode=mode, remapped=3) as world:
        world.model.save_pretrained(tmp_path / "attached")
        world.bare.save_pretrained(tmp_path / "bare")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "attached").eval()
        equal(again.state_dict(), world.bare.state_dict())
        assert torch.equal(logits_of(again, world.ids), world.expected)
        sizes = [(tmp_path / which / "model.safetensors").stat().st_size for which in ("attached", "bare")]
        assert sizes[0] == sizes[1]
        world.right()


def duplicates():
    def pickled(model):
        return pickle.loads(pickle.dumps(model))

    def saved(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


@MODES
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", ["llama", "llama-odd"])
def test_a_copy_is_a_model_that_is_not_attached(kind, mode, way):
    """deepcopy copied garbage, and the copy's calls were passes of the original."""
    duplicate = duplicates()[way]
    with World(kind, mode=mode, remapped=4) as world:
        passes = world.session.snapshot().tenants["m"].passes
        copies = duplicate(world.model)
        parts = duplicate(layers_of(world.model)[2].mlp)
        equal(copies.state_dict(), world.bare.state_dict())
        equal(parts.state_dict(), layers_of(world.bare)[2].mlp.state_dict())
        weight = duplicate(layers_of(world.model)[2].mlp.up_proj.weight)
        assert torch.equal(weight, layers_of(world.bare)[2].mlp.up_proj.weight)
        assert isinstance(weight, nn.Parameter) and weight.requires_grad
        assert torch.equal(logits_of(copies, world.ids), world.expected)
        assert world.session.snapshot().tenants["m"].passes == passes
        assert (copies.lm_head.weight is copies.model.embed_tokens.weight) == (kind == "llama-odd")
        for module in copies.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
            assert not {"forward", "_apply", "__deepcopy__"} & set(module.__dict__)
        copies.half()
        world.right()
    assert torch.equal(logits_of(copies.float(), world.ids).argmax(-1), world.expected.argmax(-1))


@MODES
def test_load_state_dict_raises_while_layers_are_away(mode):
    """It wrote into the ring, mixed old and new weights, and was found 28 passes later."""
    other = make("llama", seed=5)
    with World(mode=mode, remapped=3) as world:
        before = addresses_of(world.model)
        streamed = world.tenant.streamed
        for module, state, layers in (
            (world.model, other.state_dict(), streamed),
            (layers_of(world.model)[streamed[1]].mlp, layers_of(other)[streamed[1]].mlp.state_dict(), streamed[1:2]),
        ):
            for assign in (False, True):
                with pytest.raises(InvalidState) as caught:
                    module.load_state_dict(state, assign=assign)
                assert caught.value.layers == layers
        assert addresses_of(world.model) == before
        world.right()
        remap.advanced.remap(world.session, "m", 0)
        with pytest.raises(InvalidState):
            world.model.load_state_dict(other.state_dict())  # loading
        world.right()
        world.model.load_state_dict(other.state_dict())
        world.expected = logits_of(other, world.ids)
        world.right()
        with pytest.raises(InvalidArgument) as refused:
            remap.advanced.remap(world.session, "m", 1)
        assert len(refused.value.pinned) >= LAYERS - 1  # they are not what their master copies are any more
        world.right()


MOVES = {
    "half": lambda model: model.half(),
    "to dtype": lambda model: model.to(torch.bfloat16),
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "double": lambda model: model.double(),
}


@MODES
@pytest.mark.parametrize("remapped", [0, 3])
def test_moving_or_converting_raises_and_changes_nothing(mode, remapped):
    """Its addresses changed under the session, and streamed layers were converted from the ring."""
    with World(mode=mode, remapped=remapped) as world:
        before = addresses_of(world.model)
        for module in (world.model, layers_of(world.model), layers_of(world.model)[1].mlp, world.model.lm_head):
            for way, move in MOVES.items():
                with pytest.raises(InvalidState) as caught:
                    move(module)
                assert caught.value.tenant == "m", way
        assert addresses_of(world.model) == before
        world.right()
        assert world.model.to("cpu") is world.model
        world.model.float().to(torch.float32).train().eval().requires_grad_(False).requires_grad_(True)
        world.right()
        assert world.tenant.written == {}
        remap.advanced.remap(world.session, "m", 2)
        world.right()
    world.model.bfloat16()  # once detached it is a model like any other


@MODES
def test_an_optimiser_s_step_is_found_in_the_next_pass(mode):
    """parameters() gives tensors that may be written at any time; a write into the ring was found 28 passes later."""
    with World(mode=mode, remapped=3) as world:
        optimiser = torch.optim.SGD(world.model.parameters(), lr=0.5)
        for parameter in world.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimiser.step()
        for _ in range(2):
            with pytest.raises(InvalidState) as caught:
                logits_of(world.model, world.ids)
            assert set(caught.value.written) == set(world.tenant.streamed)
        for call in (world.model.state_dict, lambda: copy.deepcopy(world.model)):
            with pytest.raises(InvalidState):
                call()
        with pytest.warns(RuntimeWarning, match="lost"):
            world.session.close()
        world.expected = logits_of(world.model, world.ids)
        for parameter in world.model.parameters():
            parameter.grad = None


@MODES
def test_weights_that_are_replaced_in_place_are_found_in_the_next_pass(mode):
    """Quantisers and FSDP exchange parameters, computed from the bytes that they found there."""
    with World(mode=mode, remapped=3) as world:
        layer = layers_of(world.model)[world.tenant.streamed[0]].mlp
        kept = layer.up_proj
        layer.up_proj = nn.Linear(kept.in_features, kept.out_features, bias=False)
        with pytest.raises(InvalidState) as caught:
            logits_of(world.model, world.ids)
        assert list(caught.value.written) == [world.tenant.streamed[0]]
        layer.up_proj = kept
        world.right()


def test_dynamic_quantisation_of_a_copy_sees_the_right_bytes():
    """quantize_dynamic makes a deepcopy first."""
    with World(remapped=4) as world:
        engine = torch.backends.quantized.supported_engines
        if "fbgemm" not in engine and "x86" not in engine:
            pytest.skip("this torch has no quantised kernels")
        quantised = torch.ao.quantization.quantize_dynamic(world.model, {nn.Linear})
        expected = torch.ao.quantization.quantize_dynamic(world.bare, {nn.Linear})
        assert torch.equal(logits_of(quantised, world.ids), logits_of(expected, world.ids))


def run(source, *arguments):
    """A script in an interpreter of its own, with its sessions on the CPU."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "REMAP_DEVICE": "cpu"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_wrapping_for_distributed_training_is_refused_or_found():
    """DistributedDataParallel sends rank 0's parameters to all the others: it would have sent the ring."""
    done = run(
        """
        import torch, tempfile, os
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from test_museum_torch import World
        from remap import InvalidState
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        with World(remapped=3) as world:
            try:
                DistributedDataParallel(world.model)
            except RuntimeError as error:
                assert "parameter" in str(error), error
            else:
                raise SystemExit("it was wrapped")
            world.right()
            layer = world.model.model.layers[world.tenant.streamed[0]]
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.device_mesh import init_device_mesh
            try:
                fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
                from torch import no_grad
                with no_grad():
                    world.model(world.ids)
            except InvalidState as error:
                print("found", error.fields)
            else:
                raise SystemExit("it was sharded")
            os._exit(0)
        """
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- item 7: the weights file -----------------------------------------------------------------------------------------


def saved(folder, kind="llama"):
    from safetensors.torch import save_file

    model = make(kind)
    path = folder / "model.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, path)
    return path


def from_file(path, **options):
    world = World(weights=path, **options)
    if world.session.device != "cpu":
        world.session.close()
        pytest.skip("on a device master copies are page-locked copies: the file is not used after attach")
    master = world.tenant._state.source.keep_alive[0]
    assert {master.range(layer).source for layer in range(LAYERS)} == {"file"}, master.reason
    world.tenant._state.prefetcher.drain()  # what the last pass has issued ahead has been read
    return world


def refused(world, path, *calls):
    for call in calls:
        with pytest.raises(InvalidState) as caught:
            call()
        assert caught.value.file == str(path)
        assert caught.value.expected != caught.value.found


def put_back(path, content, found):
    """The same bytes into the same file, with its old time of modification."""
    with path.open("r+b") as file:
        file.truncate(len(content))
        file.write(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@MODES
@pytest.mark.parametrize("way", ["overwrite", "truncate", "grow", "touch"])
def test_a_weights_file_that_changes_is_refused(mode, way, tmp_path):
    """Overwriting it changed the weights silently; truncating it ended the process."""
    path = saved(tmp_path)
    content, found = path.read_bytes(), path.stat()
    world = from_file(path, mode=mode, remapped=3)
    world.right()
    world.tenant._state.prefetcher.drain()
    if way == "touch":
        os.utime(path)
    else:
        with path.open("r+b") as file:
            if way == "truncate":
                file.truncate(5000)
            elif way == "grow":
                file.write(content + b"x")
            else:
                file.write(bytes(len(content)))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + (0 if way in ("truncate", "grow") else 10**9)))
    refused(
        world,
        path,
        lambda: logits_of(world.model, world.ids),
        lambda: logits_of(world.model, world.ids),
        lambda: remap.advanced.remap(world.session, "m", 0),
        world.model.state_dict,
        lambda: copy.deepcopy(world.model),
        lambda: world.session.detach("m"),
        world.session.close,
    )
    home = next(layer for layer in range(LAYERS) if layer not in world.tenant.streamed)
    equal(layers_of(world.model)[home].mlp.state_dict(), layers_of(world.bare)[home].mlp.state_dict())
    put_back(path, content, found)
    refused_again = pytest.raises(InvalidState)  # what was read in between is not known: it can only go
    with refused_again:
        logits_of(world.model, world.ids)
    world.session.detach("m")
    equal(bytes_of(world.model), bytes_of(world.bare))
    with world:
        pass


@MODES
@pytest.mark.parametrize("way", ["rename", "delete", "chmod"])
def test_a_weights_file_that_is_replaced_or_deleted_lives_on(mode, way, tmp_path):
    """The mapping is of the old file, which stays as it is until it is unmapped."""
    path = saved(tmp_path)
    with from_file(path, mode=mode, remapped=3) as world:
        if way == "rename":
            other = tmp_path / "other"
            other.write_bytes(b"something else")
            other.rename(path)
        elif way == "delete":
            path.unlink()
        else:
            path.chmod(0o400)
        for remapped in (4, 1, 0, 5):
            remap.advanced.remap(world.session, "m", remapped)
            world.right()
            equal(world.model.state_dict(), world.bare.state_dict())


@MODES
def test_a_weights_file_that_changes_while_all_is_resident_costs_only_the_remapping(mode, tmp_path):
    """Its layers are pinned, as written ones are, and passes go on."""
    path = saved(tmp_path)
    with from_file(path, mode=mode, remapped=2) as world:
        remap.advanced.remap(world.session, "m", 0)
        world.right()
        path.write_bytes(b"")
        world.right()
        with pytest.raises(InvalidArgument) as caught:
            remap.advanced.remap(world.session, "m", 2)
        assert caught.value.pinned
        assert set(map(tuple, world.tenant.written.values())) == {(str(path),)}
        report = world.session.step({"m": remap.Demand(blocks=world.tenant.kv.max_blocks)})
        assert report.unmet_blocks["m"] > 0 and world.tenant.streamed == ()
        world.right()
        equal(world.model.state_dict(), world.bare.state_dict())


@MODES
def test_a_weights_file_that_changes_inside_a_pass_is_told_when_it_ends(mode, tmp_path):
    """Bytes that were copied then may be either: the pass's results go, and so do layers that came home in it."""
    path = saved(tmp_path)
    content, found = path.read_bytes(), path.stat()
    world = from_file(path, mode=mode, remapped=3)
    remap.advanced.remap(world.session, "m", 1)  # some layers load in this pass

    def touch(*_):
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 10**9))

    handle = layers_of(world.model)[2].register_forward_hook(touch)
    refused(world, path, lambda: logits_of(world.model, world.ids))
    handle.remove()
    refused(world, path, lambda: world.session.detach("m"))
    put_back(path, content, found)
    world.session.detach("m")
    equal(bytes_of(world.model), bytes_of(world.bare))
    with world:
        pass


@pytest.mark.slow
def test_truncating_the_weights_file_does_not_end_the_process(tmp_path):
    """SIGBUS in the copy thread."""
    folders = [tmp_path / mode for mode in ("aliased", "strict")]
    for folder in folders:
        folder.mkdir()
    done = run(
        """
        import sys
        from test_museum_torch import from_file, logits_of
        import remap
        for mode, path in zip(("aliased", "strict"), sys.argv[1:]):
            world = from_file(path, mode=mode, remapped=3)
            with open(path, "r+b") as file:
                file.truncate(100)
            for call in (lambda: logits_of(world.model, world.ids), world.model.state_dict, world.session.close):
                try:
                    call()
                except remap.InvalidState as error:
                    print(error.fields["found"])
        """,
        *(saved(folder) for folder in folders),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(100, ") == 6
