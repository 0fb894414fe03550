"""A version of transformers that nobody has tested is tried once, before the first request."""

from __future__ import annotations

from typing import Any

import pytest

import remap

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attached_models import EAGER, PAGE, llama, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from remap.adapters import touched, transformers_trial  # noqa: E402
from remap.adapters import transformers as adapter  # noqa: E402
from remap.adapters.paged_cache import BlockLayer  # noqa: E402
from remap.errors import InvalidState  # noqa: E402

BRIEF = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed version is newer than the tested ones."""
    monkeypatch.setattr(adapter, "TESTED", ("5.0", "5.1"))
    monkeypatch.setattr(touched, "_warned", set())


def attach(model: Any, **options: Any) -> Any:
    return remap.attach(model, "2MiB", config=EAGER, block_tokens=4, session_options={"page_bytes": PAGE}, **options)


def refused(model: Any, **options: Any) -> InvalidState:
    """The refusal; the model is then as it was."""
    given = prompts(2, 9)
    before = {name: value for name, value in model.__dict__.items() if name not in ("_modules", "_parameters")}
    expected = model.generate(**given, **BRIEF)
    with pytest.raises(InvalidState) as caught:
        attach(model, **options)
    assert {name: value for name, value in model.__dict__.items() if name not in ("_modules", "_parameters")} == before
    assert torch.equal(model.generate(**given, **BRIEF), expected)
    assert caught.value.version == transformers.__version__ and caught.value.tested == "5.0 to 5.1"
    return caught.value


@pytest.mark.parametrize("implicit", [True, False])
def test_a_version_that_does_the_same_serves(implicit: bool) -> None:
    model, given = llama(), prompts(2, 9)
    expected = model.generate(**given, **BRIEF)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with attach(model, implicit=implicit) as attached:
        assert [module.training for module in model.modules()] == modes
        attached.step()
        assert attached.blocks.held == 0, "the trial's blocks are free again"
        model.eval()
        mine = {} if implicit else {adapter.CACHE: attached.cache()}
        assert torch.equal(model.generate(**given, **BRIEF, **mine), expected)


def test_a_model_without_a_head_is_tried_by_calls() -> None:
    model = llama().model
    ids = prompts(2, 9)["input_ids"]
    expected = model(ids)[0]
    with attach(model, implicit=False) as attached, torch.no_grad():
        assert torch.equal(model(ids, **{adapter.CACHE: attached.cache()})[0], expected)


@pytest.mark.parametrize("implicit", [True, False])
def test_a_cache_under_another_name_is_refused(implicit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "CACHE", "renamed")
    found = refused(llama(), implicit=implicit)
    assert found.difference is None and found.__cause__ is not None


def test_a_cache_that_is_not_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: Any, prepare: Any) -> Any:
        def prepared(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            model_kwargs[adapter.CACHE] = DynamicCache(config=self.model.config)

        return prepared

    monkeypatch.setattr(adapter.Attached, "_factory", own)
    found = refused(llama())
    assert found.difference is None and isinstance(found.__cause__, InvalidState)


def test_other_numbers_are_refused_with_how_far_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlockLayer.update

    def shifted(self: BlockLayer, *args: Any, **kwargs: Any) -> Any:
        keys, values = real(self, *args, **kwargs)
        return keys.roll(1, -2), values  # as if positions were counted otherwise

    monkeypatch.setattr(BlockLayer, "update", shifted)
    found = refused(llama())
    assert found.difference is not None and found.difference > transformers_trial.TOLERANCE[torch.float32]


def test_an_interrupted_trial_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model, given = llama(), prompts(2, 9)
    expected = model.generate(**given, **BRIEF)
    with monkeypatch.context() as patched:
        patched.setattr(BlockLayer, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attach(model)
    assert "forward" not in model.__dict__
    assert torch.equal(model.generate(**given, **BRIEF), expected)
