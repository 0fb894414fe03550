"""remap.attach: generate() gives the tokens of the bare model while layers go and come by pressure alone."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import runpy
import weakref
from pathlib import Path

import pytest

import remap

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attached_models import EAGER, PAGE, as_cache, llama, prompts, watched  # noqa: E402
from test_transformers_families import one_thread  # noqa: E402, F401  (for every test)
from transformers import DynamicCache  # noqa: E402

from remap.adapters.paged_cache import PagedCache  # noqa: E402
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks, OutOfMemory  # noqa: E402

LONG, SHORT = 60, 3
GREEDY = {"max_new_tokens": LONG, "do_sample": False}
BRIEF = {"max_new_tokens": SHORT, "do_sample": False}


LOOKUP = {"max_new_tokens": 200, "do_sample": False, "prompt_lookup_num_tokens": 3}
ASSISTED = {"max_new_tokens": 200, "do_sample": False, "assistant_model": 2}
WAYS = {  # assisted decoding crops
    "lookup": LOOKUP,
    "assistant": ASSISTED,
    "greedy": GREEDY,
    "sampled": {"max_new_tokens": LONG, "do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"max_new_tokens": 24, "do_sample": False, "num_beams": 3},
    "beams-returned": {"max_new_tokens": 24, "do_sample": False, "num_beams": 3, "num_return_sequences": 3},
    "sampled-beams": {"max_new_tokens": 50, "do_sample": True, "num_beams": 2},
    "returned": {"max_new_tokens": 30, "do_sample": True, "num_return_sequences": 2},
    "chunked-prefill": {"max_new_tokens": LONG, "do_sample": False, "prefill_chunk_size": 4},
}


def _generate(model, given, **how):
    torch.manual_seed(11)
    return model.generate(**given, **how)


def _cache_of(out):
    (name,) = as_cache(None)
    return out[name]


def _goes_on(model, text, cache, tokens):
    """Greedily, with all of the text in view."""
    return model.generate(
        text, attention_mask=torch.ones_like(text), **as_cache(cache), max_new_tokens=tokens, do_sample=False
    )


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_bare_models_while_layers_go_and_come(way):
    model, how = llama(), dict(WAYS[way])
    given = prompts(3, 9, padded=4) if how["max_new_tokens"] < 200 else prompts(1, 12)
    if layers := how.get("assistant_model"):
        how["assistant_model"] = llama(layers=layers)
    expected, brief = _generate(model, given, **how), _generate(model, given, **BRIEF)
    # Beams share what they have in common: less room makes as much pressure.
    with watched(model, spare=32 if "beams" in way else 52) as rig:
        assert rig.tenant.remapped == 0
        assert torch.equal(_generate(model, given, **how), expected)
        rig.assert_moved()
        rig.assert_home(lambda: model.generate(**given, **BRIEF))
        # Once more, from where the first one left it.
        assert torch.equal(_generate(model, given, **BRIEF), brief)
        assert torch.equal(_generate(model, given, **how), expected)
    assert torch.equal(_generate(model, given, **how), expected), "the model came back changed"


def test_logits_and_keys_are_bit_identical_to_those_of_a_dynamic_cache():
    model, given = llama(), prompts(3, 9, padded=2)
    asked = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**given, **asked)
    with watched(model) as rig:
        got = model.generate(**given, **asked)
        rig.assert_moved()
        assert all(torch.equal(one, other) for one, other in zip(got.logits, expected.logits))
        for layer, other in zip(_cache_of(got).layers, _cache_of(expected).layers):
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)
        held = rig.attached.snapshot.live_blocks
        assert held == 3 * -(-(9 + LONG - 1) // 4)
        del got, layer
        rig.attached.step()
        assert rig.attached.snapshot.live_blocks == 0


def test_blocks_move_when_layers_come_home_under_a_live_cache():
    """The long cache's blocks end where the layers' pages are; when it is gone, those of the other one have to move."""
    model, given = llama(), prompts(2, 6)
    kept = DynamicCache(config=model.config)
    expected = model.generate(**given, **BRIEF, **as_cache(kept))
    further = _goes_on(model, expected, kept, LONG)
    with watched(model) as rig:
        filler = rig.attached.cache()
        model.generate(**prompts(6, 40), max_new_tokens=20, do_sample=False, **as_cache(filler))
        rig.assert_moved(2)
        cache = rig.attached.cache()
        ours = model.generate(**given, **BRIEF, **as_cache(cache))
        assert torch.equal(ours, expected)
        before = [list(row) for row in cache.table.rows]
        filler.reset()
        for _ in range(60):
            rig.attached.step()
        assert rig.tenant.remapped == 0
        assert [list(row) for row in cache.table.rows] != before, "no block has moved: the test shows nothing"
        got = _goes_on(model, ours, cache, LONG)
        assert torch.equal(got, further)


def test_crop_select_repeat_and_reset_are_those_of_a_dynamic_cache():
    model, given = llama(), prompts(3, 10)["input_ids"]
    reference = DynamicCache(config=model.config)
    with watched(model) as rig, torch.no_grad():
        cache = rig.attached.cache()

        def both(step):
            return [step(each) for each in (cache, reference)]

        def passed(ids):
            def run(each):
                held = each.get_seq_length()
                mask = torch.ones(len(ids), held + ids.shape[1], dtype=torch.long)
                return model(ids, **as_cache(each), attention_mask=mask).logits

            one, other = both(run)
            assert torch.equal(one, other)

        passed(given)
        both(lambda each: each.crop(-3))
        passed(given[:, :6])
        both(lambda each: each.batch_repeat_interleave(2))
        passed(given.repeat(2, 1)[:, :1])
        both(lambda each: each.batch_select_indices(torch.tensor([5, 0, 0, 3])))
        passed(torch.arange(20, 28).view(4, 2))
        both(lambda each: each.reorder_cache(torch.tensor([1, 1, 0, 2])))
        passed(torch.arange(30, 34).view(4, 1))
        reference.crop(5 - reference.get_seq_length())
        cache.crop(5)  # "keep 5": transformers no longer takes it since 5.23, and we do
        passed(torch.arange(40, 60).view(4, 5))
        assert [layer.get_seq_length() for layer in cache.layers] == [10] * 6
        for layer, other in zip(cache.layers, reference.layers):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
        both(lambda each: each.reset())
        assert rig.attached.snapshot.live_blocks == 0
        passed(given)
        assert cache.is_croppable and not cache.is_compileable and cache.get_seq_length() == 10


def test_the_first_call_of_all_may_need_many_layers():
    """Without a measurement the controller gives one layer at most; the prompt of the first call needs three."""
    model, given = llama(), prompts(3, 150)
    expected = model.generate(**given, **BRIEF)
    with watched(model, spare=20) as rig:
        assert torch.equal(model.generate(**given, **BRIEF), expected)
        rig.assert_moved(3)


@pytest.mark.parametrize("error", [OutOfBlocks, RuntimeError, KeyboardInterrupt])
def test_a_pass_that_fails_leaves_the_cache_as_it_was_and_it_goes_on(error):
    model, given = llama(), prompts(2, 6)
    expected = model.generate(**given, **GREEDY)
    with watched(model) as rig:
        cache = rig.attached.cache()
        start = model.generate(**given, **BRIEF, **as_cache(cache))
        live = rig.attached.snapshot.live_blocks

        def fail(*args):
            raise error("stop")

        hook = model.model.layers[3].mlp.register_forward_pre_hook(fail)
        with torch.no_grad(), pytest.raises(error) as failed:
            model(prompts(2, 2000 if error is OutOfBlocks else 11)["input_ids"], **as_cache(cache))
        hook.remove()
        if error is OutOfBlocks:
            after = rig.attached.snapshot
            assert (failed.value.requested, failed.value.free) == (2 * 500, after.free_blocks)
            assert after.live_blocks == live
        assert [layer.get_seq_length() for layer in cache.layers] == [8] * 6
        assert torch.equal(_goes_on(model, start, cache, LONG - SHORT), expected)


def test_without_blocks_the_error_names_the_layers_that_were_written():
    """It said that no more layers may be given, and not why."""
    model = llama()
    with watched(model) as rig, torch.no_grad():
        model.generate(**prompts(2, 6), **BRIEF)
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
        with pytest.raises(OutOfBlocks, match=r"layers \[1\] stay: something wrote") as failed:
            model(prompts(2, 2000)["input_ids"], **as_cache(rig.attached.cache()))
        assert failed.value.written == (1,)


def test_two_models_share_a_session():
    models = [llama(seed=0), llama(seed=1)]
    given = [prompts(3, 9, seed=3), prompts(3, 9, seed=4)]
    expected = [model.generate(**ids, **GREEDY) for model, ids in zip(models, given)]
    size = 620 * PAGE
    with remap.Session(size, page_bytes=PAGE, config=EAGER) as session:
        options = {"session": session, "block_tokens": 4, "config": EAGER}
        with remap.attach(models[0], name="a", **options) as a, remap.attach(models[1], name="b", **options) as b:
            hog, caches = b.cache(), [a.cache(), b.cache()]
            models[1].generate(**prompts(6, 40), **BRIEF, **as_cache(hog))
            half = [
                model.generate(**ids, max_new_tokens=30, do_sample=False, **as_cache(cache))
                for model, ids, cache in zip(models, given, caches)
            ]
            assert a.snapshot.remapped + b.snapshot.remapped + a.snapshot.lent_pages + b.snapshot.lent_pages > 0
            hog.reset()
            for _ in range(60):
                a.step()
                b.step()
            for model, text, cache, all_of_it in zip(models, half, caches, expected):
                assert torch.equal(_goes_on(model, text, cache, 30), all_of_it)
            remap.advanced.check(session)
        assert session.snapshot().tenants == {}
    assert all(torch.equal(m.generate(**ids, **GREEDY), e) for m, ids, e in zip(models, given, expected))


def test_a_step_of_one_model_tells_the_other_one_which_blocks_moved(monkeypatch):
    with remap.Session(620 * PAGE, page_bytes=PAGE) as session:
        options = {"session": session, "block_tokens": 4}
        with remap.attach(llama(), name="a", **options) as a, remap.attach(llama(), name="b", **options) as b:
            cache = b.cache()
            cache.prepare(1, 8)
            cache.finish(False)
            first, second = cache.table.rows[0]
            report = remap.StepReport(changed=True, moved={"b": {first: 400}})
            monkeypatch.setattr(session, "step", lambda demand: report)
            a.step()
            assert cache.table.rows == [[400, second]]
            monkeypatch.undo()
            b.blocks.relocate({400: first})  # it was the test's own report
            assert cache.table.rows == [[first, second]]


def test_a_cache_by_hand_and_calls_without_one():
    model, given = llama(), prompts(3, 6)
    expected = model.generate(**given, **GREEDY)
    with watched(model, implicit=False) as rig:
        assert "_prepare_cache_for_generation" not in model.__dict__
        assert torch.equal(model.generate(**given, **GREEDY), expected)  # transformers' own cache, outside of the arena
        assert rig.peak == 0
        assert torch.equal(model.generate(**given, **GREEDY, **as_cache(rig.attached.cache())), expected)
        rig.assert_moved()
        assert torch.equal(model.generate(**given, **GREEDY, use_cache=False), expected)


def test_a_cache_goes_by_any_name_and_place_that_the_model_takes():
    """Under the old name, the new one, by position: it is found by its type. What the model does not take is refused."""
    model, ids = llama(), prompts(2, 6)["input_ids"]
    place = list(inspect.signature(model.forward).parameters).index(next(iter(as_cache(None))))
    with torch.no_grad():
        expected = model(ids).logits
    with watched(model) as rig, torch.no_grad():

        def passed(*args, **kwargs):
            (cache,) = [each for each in (*args, *kwargs.values()) if each is not None]
            try:
                logits = model(ids, *args, **kwargs).logits
            except (InvalidState, TypeError):
                assert "cache" in kwargs and "cache" not in as_cache(None), "only an unknown name is refused"
                assert cache.get_seq_length() == 0
            else:
                assert torch.equal(logits, expected) and cache.get_seq_length() == 6

        passed(past_key_values=rig.attached.cache())
        passed(cache=rig.attached.cache())
        passed(*[None] * (place - 1), rig.attached.cache())
        with pytest.raises(InvalidArgument) as refused:
            model(ids, past_key_values=rig.attached.cache(), cache=rig.attached.cache())
        assert refused.value.caches == 2


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": 2}])
def test_assisted_decoding_crops_a_cache_of_the_callers_and_an_attached_assistants(how):
    model, given, how = llama(), prompts(1, 12), dict(how)
    if layers := how.get("assistant_model"):
        how["assistant_model"] = llama(layers=layers)
    expected = model.generate(**given, **GREEDY, **how)
    with watched(model) as rig:
        cache = rig.attached.cache()
        if assistant := how.get("assistant_model"):
            options = {"config": EAGER, "block_tokens": 4, "session_options": {"page_bytes": PAGE}}
            with remap.attach(assistant, "2MiB", **options) as helper:
                assert torch.equal(model.generate(**given, **GREEDY, **how, **as_cache(cache)), expected)
                assert helper.cached_tokens > 0
        else:
            assert torch.equal(model.generate(**given, **GREEDY, **how, **as_cache(cache)), expected)
        assert cache.get_seq_length() == 12 + LONG - 1


@pytest.mark.parametrize(("implementation", "ours"), [("static", False), ("offloaded", False), ("dynamic", True)])
def test_caches_that_the_caller_chooses_stay_his(implementation, ours):
    model, given = llama(), prompts(2, 6)
    asked = {**BRIEF, "return_dict_in_generate": True, "disable_compile": True, "cache_implementation": implementation}
    if implementation == "offloaded" and not torch.cuda.is_available():
        pytest.skip("an offloaded cache needs an accelerator")
    expected = model.generate(**given, **asked)
    with watched(model):
        got = model.generate(**given, **asked)
        own = model.generate(**given, **BRIEF, return_dict_in_generate=True, **as_cache(DynamicCache()))
        assert isinstance(_cache_of(got), PagedCache) is ours
        assert type(_cache_of(own)) is DynamicCache
        assert torch.equal(got.sequences, expected.sequences) and torch.equal(own.sequences, expected.sequences)


def test_what_is_refused_changes_nothing():
    model, given = llama(), prompts(2, 6)
    tensors = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    for refused, arguments, options in (
        (InvalidArgument, (model,), {}),
        (InvalidArgument, (model, "64MiB"), {"min_tokens": -1}),
        (OutOfMemory, (model, 2 * PAGE), {"session_options": {"page_bytes": PAGE}}),
        (InvalidArgument, (torch.nn.Sequential(torch.nn.Linear(3, 3)), "64MiB"), {"implicit": False, "layers": "0"}),
    ):
        with pytest.raises(refused):
            remap.attach(*arguments, **options)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == tensors
    assert "forward" not in model.__dict__
    with watched(model) as rig:
        with pytest.raises(InvalidState):
            remap.attach(model, "64MiB")
        cache = rig.attached.cache()
        with pytest.raises(InvalidState, match="gradients"):
            model(**given, **as_cache(cache))
        with torch.no_grad():
            with pytest.raises(InvalidState, match="no pass was prepared"):
                cache.update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), 0)
            model(**given, **as_cache(cache))
            with pytest.raises(InvalidState, match="sequences"):
                model(prompts(3, 1)["input_ids"], **as_cache(cache))
            with pytest.raises(InvalidState):
                cache.layers[0].crop(-1)
        assert cache.get_seq_length() == 6
    with pytest.raises(InvalidState):
        rig.attached.cache()
    rig.attached.close()


def test_a_cache_of_another_shape_than_the_configuration_says_is_refused():
    model, given = llama(), prompts(2, 6)
    with watched(model) as rig, torch.no_grad():
        cache = rig.attached.cache()
        hook = model.model.layers[2].self_attn.v_proj.register_forward_hook(lambda module, args, out: out[..., :16])
        with pytest.raises((InvalidArgument, RuntimeError)):
            model(**given, **as_cache(cache))
        hook.remove()
        assert cache.get_seq_length() == 0
        cache.prepare(2, 1)
        with pytest.raises(InvalidArgument) as refused:
            cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0)
        assert (refused.value.expected, refused.value.keys) == ((2, 2, 1, 16), (2, 2, 1, 8))
        cache.finish(False)


def _functools(model):
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))


def _accelerate(model):
    hooks = pytest.importorskip("accelerate").hooks
    hooks.add_hook_to_module(model, hooks.ModelHook())


def _cache_factory(model):
    prepare = model._prepare_cache_for_generation
    model._prepare_cache_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)


@pytest.mark.parametrize("wrap", [_functools, _accelerate, _cache_factory])
@pytest.mark.parametrize("end", ["close", "session.close", "session.detach"])
def test_a_model_outlives_wrappers_around_what_attach_put_in(wrap, end):
    """Every call said that the session was closed, for ever, and attach refused it too."""
    model, given = llama(), prompts(2, 6)
    expected = model.generate(**given, **BRIEF)
    for turn in range(2):  # the second time the wrapper is there before
        with watched(model) as rig:
            if not turn:
                wrap(model)
            assert torch.equal(model.generate(**given, **BRIEF), expected)
            {"close": rig.attached.close, "session.close": rig.session.close}.get(
                end, lambda: rig.session.detach("model")
            )()
            assert torch.equal(model.generate(**given, **BRIEF), expected)
        assert torch.equal(model.generate(**given, **BRIEF), expected)


def test_a_cache_whose_model_was_detached_says_so():
    """`close` between two passes of generate() was told as a pass that nobody had prepared."""
    model, given = llama(), prompts(2, 6)
    with watched(model) as rig:
        cache = rig.attached.cache()

        class Stop(transformers.StoppingCriteria):
            def __call__(self, ids, scores, **kwargs):
                rig.attached.close()
                return torch.zeros(len(ids), dtype=torch.bool)

        with pytest.raises(InvalidState, match="detached"):
            model.generate(**given, **BRIEF, **as_cache(cache), stopping_criteria=[Stop()])
        with pytest.raises(InvalidState, match="detached"):
            cache.layers[0].keys  # noqa: B018


def test_early_exit_is_refused_before_the_first_pass():
    """It failed inside of a pass, and transformers left the model with two layers."""
    model, given = llama(), prompts(1, 9)
    expected = model.generate(**given, **BRIEF)
    with watched(model):
        with pytest.raises(InvalidArgument) as refused:
            model.generate(**given, **BRIEF, assistant_early_exit=2)
        assert refused.value.assistant_early_exit == 2
        assert model.config.num_hidden_layers == 6
        assert torch.equal(model.generate(**given, **BRIEF), expected)


@pytest.mark.parametrize("first", [True, False])
def test_autocast_is_that_of_the_bare_model(first):
    """Its values are bfloat16 and its keys float32: it was refused, with float32 as the reason."""
    model, given = llama(), prompts(3, 9, padded=2)
    caches = [DynamicCache(config=model.config)]

    def run(cache):
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            text = model.generate(**given, **BRIEF, **as_cache(cache))
        with torch.autocast("cpu", torch.bfloat16):
            return _goes_on(model, text, cache, LONG)

    expected = run(caches[0])
    with watched(model) as rig:
        caches.append(rig.attached.cache())
        assert torch.equal(run(caches[1]), expected)
        rig.assert_moved()
        for layer, other in zip(caches[1].layers, caches[0].layers):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
        with torch.no_grad(), pytest.raises(InvalidArgument, match="float64") as refused:
            cache = rig.attached.cache()
            cache.prepare(2, 1)
            cache.update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16).double(), 0)
        assert refused.value.keys == refused.value.expected


def test_a_copy_of_a_cache_continues_by_itself():
    """transformers' recipe for a common prefix, `copy.deepcopy(cache)`, was a TypeError about the session's backend."""
    model, prefix = llama(), prompts(1, 21)["input_ids"]
    texts = [torch.cat([prefix, prompts(1, 4, seed=seed)["input_ids"]], 1) for seed in (4, 5, 6)]

    def run(cache):
        with torch.no_grad():
            model(prefix, **as_cache(cache))
        caches = [copy.deepcopy(cache) for _ in texts] + [cache]
        return [_goes_on(model, text, one, 30) for text, one in zip([*texts, texts[0]], caches)]

    expected = run(DynamicCache(config=model.config))
    with watched(model) as rig:
        assert all(torch.equal(mine, bare) for mine, bare in zip(run(rig.attached.cache()), expected))
        rig.attached.step()
        assert rig.attached.snapshot.live_blocks == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_dynamically_quantised_model_is_attached_as_it_is():
    """Its Linear's `weight` is a method: attach ended in an AttributeError."""
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        pytest.skip("this torch has no quantised kernels")
    model, given = llama(), prompts(2, 6)
    model.model.layers = torch.ao.quantization.quantize_dynamic(model.model.layers, {torch.nn.Linear})
    expected = model.generate(**given, **GREEDY)
    with watched(model):
        assert torch.equal(model.generate(**given, **GREEDY), expected)


def test_a_model_that_nobody_closes_is_collected():
    model = llama()
    attached = remap.attach(model, "8MiB", session_options={"page_bytes": PAGE})
    model.generate(**prompts(2, 6), **BRIEF)
    session = weakref.ref(attached.session)
    del attached, model
    gc.collect()
    assert session() is None


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_answers_as_before_under_pressure():
    from remap.cli import smollm2

    if smollm2.importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"the model's package is not installed: {smollm2.INSTALL}")
    model, tokenizer, folder = smollm2.load("bfloat16")
    chats = [
        "What is the capital of France?",
        "Write a poem about the sea.",
        "Count to thirty.",
        "Who was Ada Lovelace?",
    ]
    chats = [[{"role": "user", "content": chat}] for chat in chats]
    texts = 2 * [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    tokenizer.padding_side = "left"
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    given.pop("token_type_ids", None)
    how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    expected = model.generate(**given, **how)
    assert "Paris" in tokenizer.decode(expected[0])
    # 8 sequences of some 64 tokens take 12 MiB of KV cache; beside the weights there is little.
    with remap.attach(model, capacity="300MiB", weights=folder) as attached:
        out = model.generate(**given, **how, return_dict_in_generate=True)
        snapshot = attached.snapshot
        assert torch.equal(out.sequences, expected)
        assert snapshot.remapped >= 2 and snapshot.copies > 0
        remap.advanced.check(attached.session)


@pytest.mark.slow
def test_the_example_runs(capsys):
    runpy.run_path(
        str(Path(__file__).resolve().parents[2] / "examples" / "transformers_generate.py"), run_name="__main__"
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tokens identical: True"
    assert int(lines[1].split()[0]) >= 1, "no layer has become KV cache"
    assert lines[2] == "generate_batch: [8, 8] tokens"
    assert lines[3].startswith("0 layers are away")
