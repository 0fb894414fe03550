"""generate_batch of transformers over the tenant's blocks: the tokens of generate(), under pressure, and nothing lost."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attached_models import llama, prompts, watched  # noqa: E402
from test_transformers_families import make, one_thread  # noqa: E402, F401  (the fixture: for every test)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING  # noqa: E402

from remap.errors import InvalidArgument  # noqa: E402

TOKENS = 40


def _texts(count):
    return [prompts(1, 5 + 3 * index, seed=index)["input_ids"][0].tolist() for index in range(count)]


WINDOWS = [
    ("gpt-oss", {"spare": 12}, 8),
    ("gemma3-7-1", {"block_tokens": 6, "spare": 40}, 7),
    ("mistral-windows", {"spare": 8}, 4),
]


def _alone(model, text, tokens=TOKENS):
    ids = torch.tensor([text])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, len(text) :].tolist()


def _done(model, texts, how, tokens):
    asked = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.generate_batch(texts, generation_config=asked, continuous_batching_config=how)


def _served_bare(model, text):
    """Whether this version of transformers serves the model by itself: 5.24.0 does not serve OPT and GPT-NeoX."""
    how = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, use_cuda_graph=False)
    return all(output.error is None for output in _done(model, [text], how, 2).values())


def _batch(model, texts, how, tokens=TOKENS):
    done = _done(model, texts, how, tokens)
    assert all(output.error is None for output in done.values()), [output.error for output in done.values()]
    by_prompt = {tuple(output.prompt_ids): list(output.generated_tokens) for output in done.values()}
    return [by_prompt[tuple(text)] for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_tokens_are_those_of_each_prompt_alone_under_pressure(family):
    model, texts = make(family), _texts(6)
    if family != "llama" and not _served_bare(make(family), texts[0]):
        pytest.skip(
            f"transformers {transformers.__version__} does not serve {family} by generate_batch, attached or not"
        )
    expected = [_alone(model, text) for text in texts]
    with watched(model, spare=60) as rig:
        got = _batch(model, texts, rig.attached.continuous_batching(max_batch_tokens=32))
        assert got == expected
        rig.assert_moved()
        gc.collect()  # the manager's cycles, which hold the padding's blocks
        rig.assert_home(lambda: _alone(model, texts[0], 2))
        # generate() and generate_batch take turns over the same blocks.
        assert _alone(model, texts[1]) == expected[1]
        assert _batch(model, texts, rig.attached.continuous_batching(max_batch_tokens=32)) == expected


@pytest.mark.parametrize(("family", "options", "page"), WINDOWS)
def test_layers_with_windows_have_sectors_of_their_own(family, options, page):
    """A sector is a block; what it holds a page of is the layers with a window, or the others."""
    model, texts = make(family), _texts(6)
    expected = [_alone(model, text) for text in texts]
    with watched(model, **options) as rig:
        how = rig.attached.continuous_batching(max_batch_tokens=32)
        assert how.page_size == page
        assert _batch(model, texts, how) == expected
        rig.assert_moved()
        gc.collect()
        rig.assert_home(lambda: _alone(model, texts[0], 2))
        assert _alone(model, texts[1]) == expected[1]


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {"spare": 70}), ("gemma3-7-1", {"block_tokens": 6, "spare": 70})]
)
def test_blocks_move_between_batches_while_requests_run(family, options):
    """A cache takes the low blocks before the first request, and goes between two batches: requests' blocks move then."""
    model, texts = llama() if family == "llama" else make(family), _texts(2)
    expected = [_alone(model, text, 100) for text in texts]
    with watched(model, **options) as rig:
        attached, moved, batches = rig.attached, [], []
        relocate, ask = attached.blocks.relocate, attached.ask
        filler = attached.cache()

        def asked(blocks):
            batches.append(blocks)
            if len(batches) == 2:  # the first is for the padding's blocks
                filler.prepare(6, 60)
                filler.finish(False)
            if len(batches) == 20:
                filler.reset()
            return ask(blocks)

        def relocating(ids):
            moved.extend(ids)
            relocate(ids)

        attached.ask, attached.blocks.relocate = asked, relocating
        assert _batch(model, texts, attached.continuous_batching(max_batch_tokens=32), 100) == expected
        assert moved, "no block has moved: the test shows nothing"
        rig.assert_moved(2)


def test_more_requests_than_blocks_wait_and_lose_nothing():
    model, texts = llama(), _texts(10)
    expected = [_alone(model, text) for text in texts]
    with watched(model, spare=4) as rig:
        assert _batch(model, texts, rig.attached.continuous_batching(max_batch_tokens=32)) == expected
        rig.assert_moved()


def test_what_a_paged_cache_lays_out_otherwise_is_refused():
    model = llama()
    before = dict(SCHEDULER_MAPPING)
    with watched(model) as rig:
        with pytest.raises(InvalidArgument) as refused:
            rig.attached.continuous_batching(num_blocks=7, use_cuda_graph=True)
        assert refused.value.options == ["num_blocks", "use_cuda_graph"]
        assert before == SCHEDULER_MAPPING
        rig.attached.continuous_batching()
        assert len(SCHEDULER_MAPPING) == len(before) + 1
    assert before == SCHEDULER_MAPPING
    with (
        watched(make("gemma3-7-1")) as rig,
        pytest.raises(InvalidArgument, match="attach with block_tokens=6") as refused,
    ):
        rig.attached.continuous_batching()
    assert (refused.value.block_tokens, set(refused.value.windows)) == (6, {16, None})
    with watched(make("llama4")) as rig, pytest.raises(InvalidArgument, match="chunked attention"):
        rig.attached.continuous_batching()
