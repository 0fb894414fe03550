"""The trial that attach makes with a version of transformers newer than the tested ones, before the first request."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

import remap

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import extras  # noqa: E402
from attached_models import PAGE, as_cache, llama, prompts  # noqa: E402
from test_transformers_families import one_thread  # noqa: E402, F401  (for every test)
from transformers import DynamicCache  # noqa: E402
from transformers.generation.utils import GenerationMixin  # noqa: E402

from remap.adapters import touched  # noqa: E402
from remap.adapters import transformers as adapter  # noqa: E402
from remap.errors import InvalidState  # noqa: E402

BRIEF = {"max_new_tokens": 5, "do_sample": False}
SMALL = {"capacity": "8MiB", "session_options": {"page_bytes": PAGE}}
(CACHE,) = as_cache(None)


class Envelope:
    """A cache of the library as a later version might pass it: inside of something else."""

    def __init__(self, cache):
        self.cache = cache


def _in_an_envelope(self, *args, cache_in=None, **kwargs):
    return _forward(self, *args, **{CACHE: getattr(cache_in, "cache", None), **kwargs})


def _prepared_in_an_envelope(self, *args, **kwargs):
    inputs = _inputs(self, *args, **kwargs)
    inputs["cache_in"] = Envelope(inputs.pop(CACHE, None))
    return inputs


def _made_elsewhere(self, *args, **kwargs):
    """generate() makes its cache on the way to the model, and does not ask the function that attach replaces."""
    inputs = _inputs(self, *args, **kwargs)
    if not isinstance(inputs.get(CACHE), DynamicCache):
        self.__dict__["_elsewhere"] = inputs[CACHE] = self.__dict__.get("_elsewhere") or DynamicCache(
            config=self.config
        )
    return inputs


def _one_off(self, *args, **kwargs):
    """A pass with a cache of ours counts its positions from another start."""
    if any("PagedCache" in type(value).__name__ for value in kwargs.values()):
        ids = kwargs["input_ids"]
        kwargs["position_ids"] = 7 * torch.arange(ids.shape[1]).flip(0)[None]
    return _forward(self, *args, **kwargs)


_forward = transformers.LlamaForCausalLM.forward
_inputs = GenerationMixin.prepare_inputs_for_generation
LATER = {  # what a later version changes: a name of the class, and what it is then
    "cache in an envelope": {"forward": _in_an_envelope, "prepare_inputs_for_generation": _prepared_in_an_envelope},
    "cache made elsewhere": {"prepare_inputs_for_generation": _made_elsewhere},
    "other logits": {"forward": _one_off},
}


def _change(patch, change):
    """As a later version does. generate() looks at the functions' parameters, so they keep those that they had."""
    for name, double in LATER[change].items():
        was = getattr(transformers.LlamaForCausalLM, name)
        patch.setattr(transformers.LlamaForCausalLM, name, functools.wraps(was)(double))


@pytest.fixture
def later(monkeypatch):
    """A version newer than the tested ones, of which nobody was warned yet."""
    monkeypatch.setattr(touched, "_warned", set())
    monkeypatch.setattr(adapter.transformers, "__version__", "7.1.0")
    return "7.1.0"


def _places(model):
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}


def _assert_bare(model, given, expected, before):
    """The model is in ordinary memory, without hooks of ours, and answers as before."""
    assert {"forward", "_prepare_cache_for_generation"}.isdisjoint(model.__dict__)
    assert all(torch.equal(tensor, before[name][1]) for name, tensor in model.named_parameters())
    assert torch.equal(model.generate(**given, **BRIEF), expected)


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("shared", [False, True])
def test_a_version_that_passes_the_cache_otherwise_is_refused_before_the_first_request(
    later, monkeypatch, change, shared
):
    model, given = llama(), prompts(2, 6)
    expected, before = model.generate(**given, **BRIEF), _places(model)
    with monkeypatch.context() as patch, remap.Session("8MiB", page_bytes=PAGE) as session:
        _change(patch, change)
        with pytest.raises(InvalidState) as refusal:
            remap.attach(model, **({"session": session} if shared else SMALL))
        assert (refusal.value.version, refusal.value.tested) == (later, adapter.TESTED)
        assert refusal.value.differed
        assert session.snapshot().tenants == {}
    _assert_bare(model, given, expected, before)


def test_the_oldest_version_that_the_extras_admit_is_the_oldest_tested_one(monkeypatch):
    """Older ones have another paged cache; attach refuses them, before anything changes."""
    for extra in ("transformers", "demo"):
        asked = map(requirements.Requirement, extras.requirements(ROOT / "pyproject.toml", [extra]))
        (ours,) = (one.specifier for one in asked if one.name == "transformers")
        assert [spec.version for spec in ours if spec.operator == ">="] == [adapter.TESTED[0]]
    major, minor = adapter.TESTED[0].split(".")
    older = f"{major}.{int(minor) - 1}.9"
    monkeypatch.setattr(adapter.transformers, "__version__", older)
    model = llama()
    before = _places(model)
    with pytest.raises(InvalidState) as refusal:
        remap.attach(model, **SMALL)
    assert (refusal.value.version, refusal.value.tested) == (older, adapter.TESTED)
    assert all(tensor.data_ptr() == before[name][0] for name, tensor in model.named_parameters())


def test_without_the_trial_such_a_version_fails_with_the_first_request(later, monkeypatch):
    """The doubles change something that matters: with them, a model that was attached does not serve."""
    monkeypatch.setattr(adapter, "TESTED", (adapter.TESTED[0], later))
    _change(monkeypatch, "cache in an envelope")
    with remap.attach(llama(), **SMALL) as attached, pytest.raises(InvalidState):
        attached.model.generate(**prompts(2, 6), **BRIEF)


@pytest.mark.parametrize("implicit", [True, False])
def test_a_version_in_which_all_is_right_serves_and_the_trial_leaves_nothing(later, implicit):
    model, given = llama(), prompts(2, 6)
    expected = model.generate(**given, **BRIEF)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    with remap.attach(model.train(), implicit=implicit, **SMALL) as attached:
        assert attached.cached_tokens > 0, "no trial was made"
        assert torch.equal(torch.rand(3), drawn)
        attached.step()
        assert attached.snapshot.live_blocks == len(attached.blocks._shown) == 0
        assert model.training
        own = {} if implicit else as_cache(attached.cache())
        assert torch.equal(model.eval().generate(**given, **BRIEF, **own), expected)


def test_the_models_own_generation_settings_do_not_matter(later):
    model = llama()
    model.generation_config.update(cache_implementation="static", num_beams=3, max_length=2, eos_token_id=[*range(50)])
    with remap.attach(model, **SMALL) as attached:
        assert attached.cached_tokens > 0


def test_a_tested_version_pays_for_no_trial():
    with remap.attach(llama(), **SMALL) as attached:
        assert attached.cached_tokens == 0
        assert attached.snapshot.passes == 0


def test_an_error_of_the_trial_is_the_cause(later, monkeypatch):
    failure = ArithmeticError("7")

    def failing(*args, **kwargs):
        raise failure

    model = llama()
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_prepare_cache_for_generation", failing)
    monkeypatch.setattr(adapter, "TOUCHED", ())
    with pytest.raises(InvalidState) as refusal:
        remap.attach(model, **SMALL)
    assert refusal.value.__cause__ is failure
    assert "forward" not in model.__dict__


def test_an_interrupt_takes_the_attach_back(later, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    model = llama()
    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remap.attach(model, **SMALL)
    assert "forward" not in model.__dict__
