"""remap.attach of models whose layers keep a state instead of keys and values: what a cache promises of both."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attached_models import as_cache, prompts, randomised, watched  # noqa: E402
from test_transformers_families import make, one_thread  # noqa: E402, F401  (the fixture: for every test)
from transformers.cache_utils import DynamicCache, LinearAttentionLayer  # noqa: E402

import families  # noqa: E402
import remap  # noqa: E402
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks  # noqa: E402

GREEDY = {"max_new_tokens": 30, "do_sample": False}
BRIEF = {"max_new_tokens": 2, "do_sample": False}
HYBRIDS = ["qwen3.5", "lfm2", "falcon-h1"]  # recurrent states; convolutions only; both beside keys and values


def bare_cache(model):
    return DynamicCache(config=model.config)


def logits(model, ids, cache, **more):
    with torch.no_grad():
        return model(ids, **as_cache(cache), **more).logits


def decode(model, token, cache, count=6):
    """Greedy tokens after `token`, by calls of the model."""
    out = [token]
    for _ in range(count):
        out.append(logits(model, out[-1], cache)[:, -1:].argmax(-1))
    return torch.cat(out, 1)


@pytest.mark.parametrize("family", HYBRIDS)
def test_turns_selections_and_a_reset_are_those_of_a_dynamic_cache(family):
    """transformers has no batch_select_indices and no batch_repeat_interleave for states: there a batch begins as it ends."""
    model = make(family)
    turns = [prompts(3, 7, seed=seed)["input_ids"] for seed in (1, 2)]
    chosen = torch.tensor([2, 2, 0, 0, 1, 1])
    padded = prompts(2, 9, padded=4)

    def run(cache, select):
        got = [logits(model, turns[0], cache), logits(model, turns[1], cache)]
        select(cache)
        got.append(decode(model, turns[0][chosen, :1], cache))
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.has_previous_state()
        return got

    def ours(cache):
        cache.batch_select_indices(torch.tensor([2, 0, 1]))
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 6

    expected = run(bare_cache(model), lambda cache: cache.reorder_cache(chosen))
    expected.append(model.generate(**padded, **GREEDY))
    with watched(model, spare=40) as rig:
        cache = rig.attached.cache()
        got = run(cache, ours)
        rig.attached.step()
        assert rig.attached.snapshot.live_blocks == 0
        got.append(model.generate(**padded, **GREEDY, **as_cache(cache)))  # another number of sequences
        assert all(torch.equal(mine, bare) for mine, bare in zip(got, expected))
        for layer, kept in zip(cache.layers, bare_cache(model).layers):
            assert isinstance(layer, LinearAttentionLayer) is hasattr(kept, "conv_states")
        with pytest.raises(InvalidArgument):
            cache.batch_select_indices(torch.tensor([2]))
        assert cache.batch_size == 2 and len(cache.layers[0].conv_states[0]) == 2


@pytest.mark.parametrize("family", HYBRIDS)
def test_copies_of_a_cache_share_blocks_and_no_state(family):
    model, prefix = make(family), prompts(1, 21)["input_ids"]
    texts = [prompts(1, 4, seed=seed)["input_ids"] for seed in (4, 5)]

    def run(cache):
        logits(model, prefix, cache)
        caches = [copy.deepcopy(cache) for _ in texts] + [cache]
        return [logits(model, text, one) for text, one in zip([*texts, texts[0]], caches)]

    expected = run(bare_cache(model))
    with watched(model) as rig:
        assert all(torch.equal(mine, bare) for mine, bare in zip(run(rig.attached.cache()), expected))


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_fails_spoils_a_cache_with_tokens_until_it_is_reset(family, error):
    model, text = make(family), prompts(2, 6)["input_ids"]
    expected = decode(model, text[:, :1], bare_cache(model))
    with watched(model) as rig:

        def fail(*args):
            raise error("stop")

        def failing(ids, cache):
            hook = model.model.layers[-1].register_forward_pre_hook(fail)
            with pytest.raises(error, match="stop"):
                logits(model, ids, cache)
            hook.remove()

        cache = rig.attached.cache()
        failing(text, cache)  # without tokens nothing is lost
        assert not cache.has_previous_state()
        assert torch.equal(decode(model, text[:, :1], cache), expected)
        failing(text[:, :1], cache)
        held, live = cache.get_seq_length(), rig.attached.snapshot.live_blocks
        for call in (
            lambda: logits(model, text[:, :1], cache),
            lambda: logits(model, text[:, :1], copy.deepcopy(cache)),
            lambda: model.generate(text, **BRIEF, **as_cache(cache)),
            lambda: cache.crop(0),
        ):
            with pytest.raises(InvalidState, match="reset the cache") as refused:
                call()
            assert refused.value.tokens == held == 6 and 0 in refused.value.layers
        rig.attached.step()
        assert rig.attached.snapshot.live_blocks == live
        cache.reset()
        assert torch.equal(decode(model, text[:, :1], cache), expected)
        cache.crop(-cache.get_seq_length())  # all of it: there is nothing left to be spoiled
        assert torch.equal(decode(model, text[:, :1], cache), expected)
        rig.attached.step()
        remap.advanced.check(rig.session)


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_fails_before_a_pass_leaves_the_states_as_they_were(family):
    model, text = make(family), prompts(2, 6)["input_ids"]
    expected = decode(model, text[:, :1], bare_cache(model), 12)
    with watched(model) as rig:
        cache = rig.attached.cache()
        start = decode(model, text[:, :1], cache, 6)
        with pytest.raises(OutOfBlocks):
            logits(model, prompts(2, 4000)["input_ids"], cache)
        with pytest.raises(InvalidState, match="another batch"):
            logits(model, prompts(3, 2)["input_ids"], cache)
        with pytest.raises(InvalidArgument, match="neither input_ids"):
            model(**as_cache(cache))
        assert torch.equal(decode(model, start[:, -1:], cache, 6), expected[:, 6:])


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_pass_that_an_interrupt_kept_from_its_end_spoils_the_cache(family, monkeypatch):
    """The states have gone on, and nobody has told the cache: it knew before the pass."""
    model, text = make(family), prompts(2, 6)["input_ids"]
    expected = decode(model, text[:, :1], bare_cache(model))
    with watched(model) as rig:
        cache = rig.attached.cache()
        logits(model, text, cache)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(type(cache), "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                logits(model, text[:, :1], cache)
        for _ in range(2):
            with pytest.raises(InvalidState, match="reset the cache"):
                logits(model, text[:, :1], cache)
        cache.reset()
        assert torch.equal(decode(model, text[:, :1], cache), expected)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("held", [0, 6])
def test_a_call_of_a_part_of_the_model_spoils_the_cache(family, held):
    """Its first layers go on, and only the first one with keys and values notices."""
    model, text = make(family), prompts(2, 6)["input_ids"]
    with watched(model) as rig, torch.no_grad():
        cache = rig.attached.cache()
        if held:
            logits(model, text, cache)
        with pytest.raises(InvalidState, match="call the attached model itself"):
            model.model(text[:, :1], **as_cache(cache))
        with pytest.raises(InvalidState, match="reset the cache"):
            logits(model, text, cache)


def test_a_recurrent_state_cannot_be_cropped():
    model, text = make("qwen3.5"), prompts(1, 12)["input_ids"]
    expected = decode(model, text[:, :1], bare_cache(model), 12)
    with watched(model) as rig:
        cache = rig.attached.cache()
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model.generate(text, **GREEDY, prompt_lookup_num_tokens=3, **as_cache(cache))
        assert cache.get_seq_length() == 0 and rig.attached.snapshot.passes == 0
        start = decode(model, text[:, :1], cache, 6)
        for record in (False, True):
            for gone in (-2, 4):
                with pytest.raises(InvalidState, match=r"layers \[0, 1, 2\] keep a state of all 6 tokens") as refused:
                    cache.crop(gone)
                assert (refused.value.layers, refused.value.tokens) == ([0, 1, 2], 2)
            cache.crop(0)
            cache.crop(99)
            if not record:
                assert torch.equal(decode(model, start[:, -1:], cache, 6), expected[:, 6:])
                cache.reset()
                decode(model, text[:, :1], cache, 6)
                cache.activate_past_recording()


def test_convolutions_are_cropped_where_their_past_is_recorded():
    """Assisted decoding records it, also with an assistant that is attached itself."""
    model, given = make("lfm2"), prompts(1, 12)
    ways = [{"prompt_lookup_num_tokens": 3}, {"assistant_model": randomised(families.made("lfm2", small=True), 1)}]
    expected = [model.generate(**given, **GREEDY, **how) for how in ways]
    with watched(model) as rig:
        for how, tokens in zip(ways, expected):
            cache = rig.attached.cache()
            assert torch.equal(model.generate(**given, **GREEDY, **how, **as_cache(cache)), tokens)
            assert cache.get_seq_length() == 12 + 30 - 1
            assert torch.equal(model.generate(**given, **GREEDY, **how), tokens)
        with watched(ways[1]["assistant_model"]) as helper:
            assert torch.equal(model.generate(**given, **GREEDY, **ways[1]), expected[1])
            assert helper.attached.cached_tokens > 0
        cache = rig.attached.cache()
        logits(model, given["input_ids"], cache)
        with pytest.raises(InvalidState, match=r"layers \[0, 2, 4, 6\] keep a state"):
            cache.crop(-1)
        assert cache.get_seq_length() == 12
        cache.activate_past_recording()
        cache.reset()
        logits(model, given["input_ids"], cache)  # a reset does not end the recording
        assert cache.layers[0].conv_states[0].shape[-1] == 12
        cache.crop(0)  # no token, but what has been recorded
        assert cache.layers[0].conv_states[0].shape[-1] == model.config.conv_L_cache
        bare = bare_cache(model)
        logits(model, given["input_ids"], bare)
        token = given["input_ids"][:, :1]
        for _ in range(2):  # back by one, and on from there
            got = logits(model, token, cache)
            cache.crop(-1)
        assert torch.equal(got, logits(model, token, bare)) and cache.get_seq_length() == 12


def test_layers_that_read_anothers_keys_find_them_under_pressure():
    """They lay in the workspace that the next layer's update writes over."""
    model, text = make("gemma4-shared"), prompts(4, 40)["input_ids"]
    bare = bare_cache(model)
    expected = [logits(model, text, bare), logits(model, text[:, :2], bare)]
    with watched(model, spare=40) as rig:
        cache = rig.attached.cache()
        assert torch.equal(logits(model, text, cache), expected[0])
        assert torch.equal(logits(model, text[:, :2], cache), expected[1])
        rig.assert_moved()
        full = [layer for layer, window in zip(cache._layers, rig.attached.shape.windows) if window is None]
        (theirs,) = [layer for layer in bare.layers if type(layer).__name__ == "DynamicLayer"]
        assert torch.equal(full[0].keys, theirs.keys) and torch.equal(full[0].values, theirs.values)
        assert {layer.keys.shape[-1] for layer in cache._layers} == {16, 32}


def test_a_dtype_of_the_cache_is_that_of_the_blocks_and_not_of_the_states():
    model, text = make("qwen3.5").to(torch.bfloat16), prompts(2, 9)
    expected = model.generate(**text, **GREEDY)
    for dtype in (None, "float32"):
        with watched(model, dtype=dtype) as rig:
            assert torch.equal(model.generate(**text, **GREEDY), expected)
            assert rig.attached._store.dtype == getattr(torch, dtype or "bfloat16")
    with pytest.raises(InvalidArgument, match="dtype must be one of"):
        remap.attach(model, "64MiB", dtype="float64")


def test_generate_batch_is_refused():
    with watched(make("lfm2")) as rig, pytest.raises(InvalidArgument, match="with a state"):
        rig.attached.continuous_batching()
    with watched(make("gemma4-heads")) as rig, pytest.raises(InvalidArgument, match="other heads"):
        rig.attached.continuous_batching()
