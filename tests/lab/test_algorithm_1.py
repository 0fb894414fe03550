"""Oneiros' Algorithm 1: its choice against the pseudo-code written out slowly, and a run of it over a session."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest
from bench.lab.paper import algorithm_1
from bench.lab.paper.algorithm_1 import POLICY, AlgorithmOne, Remappable, buffers_for, next_to_give
from bench.lab.paper.experiment_list import C2
from bench.lab.paper.runs import Run, Settings, run_one, serve

LAYERS = {"a": 40, "b": 32, "c": 8}


class Slow:
    """Lines 15 to 23, with a list that is popped and sorted, one model after another. caps: of each model, when it is active and
    when it is not."""

    def __init__(self, caps: Mapping[str, tuple[int, int]]) -> None:
        self.caps = caps
        self.remapped = dict.fromkeys(caps, 0)
        self.recent: list[str] = []  # the last activated last
        self.active = ""

    def activate(self, name: str) -> None:
        self.recent = [each for each in self.recent if each != name] + [name]
        self.active = name

    def remapping(self) -> None:
        inactive_model_list = [name for name in self.recent if name != self.active]
        never = [name for name in self.caps if name not in self.recent and name != self.active]
        inactive_model_list = never[::-1] + inactive_model_list  # sorted: the most recently used is popped first
        while inactive_model_list:
            model = inactive_model_list.pop()
            if self.remapped[model] < self.caps[model][1]:
                self.remapped[model] += 1
                return
        if self.remapped[self.active] < self.caps[self.active][0]:
            self.remapped[self.active] += 1


@pytest.mark.parametrize("seed", range(20))
def test_who_gives_next_is_the_pseudo_codes_choice(seed: int) -> None:
    rng = random.Random(seed)
    transfer_s = {name: rng.uniform(0.5e-3, 3e-3) for name in LAYERS}
    compute_s = {name: (rng.uniform(0.0, 0.03), rng.uniform(0.0, 0.1)) for name in LAYERS}
    caps = {name: tuple(_slow_cap(LAYERS[name], transfer_s[name], each) for each in compute_s[name]) for name in LAYERS}
    slow = Slow(caps)  # type: ignore[arg-type]
    used = dict.fromkeys(LAYERS, -1)
    for step in range(200):
        if not step or rng.random() < 0.1:
            slow.activate(rng.choice(list(LAYERS)))
            used[slow.active] = step
        if rng.random() < 0.2:  # something came home
            name = rng.choice(list(LAYERS))
            slow.remapped[name] = max(0, slow.remapped[name] - 1)
        models = [
            Remappable(
                name,
                name == slow.active,
                used[name],
                LAYERS[name],
                slow.remapped[name],
                transfer_s[name],
                compute_s[name][name != slow.active],
            )
            for name in LAYERS
        ]
        before = dict(slow.remapped)
        slow.remapping()
        giver = next_to_give(models, slow.active)
        grown = {name for name in LAYERS if slow.remapped[name] > before[name]}
        assert grown == ({giver.name} if giver is not None else set())


def _slow_cap(layers: int, transfer_s: float, compute_s: float) -> int:
    """T_T N <= T_Compute, layer by layer; one before anything was measured; never the whole model."""
    if not compute_s:
        return min(1, layers - 2)
    most = 0
    while most < layers - 2 and transfer_s * (most + 1) <= compute_s:
        most += 1
    return most


def test_one_buffer_while_equation_4_holds() -> None:
    """r = 4, 40 layers: 4 (alpha + 1) <= 39 - alpha up to alpha = 7."""
    model = Remappable("a", True, 0, 40, 0, 4e-3, 40e-3)
    assert [buffers_for(model, alpha) for alpha in (0, 6, 7, 8, 20)] == [1, 1, 1, 2, 2]
    assert model.cap == 10


def test_a_run_grows_a_layer_a_step_within_the_cap_and_brings_layers_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2 beyond saturation. Every request is answered; no step remaps two layers; nobody is asked beyond its cap."""
    made: list[Any] = []
    grown: list[int] = []
    ends: list[str] = []

    class Watched(AlgorithmOne):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            made.append(self)

        def _grow(self, tenants: Any, out: str) -> bool:
            refused, before = self.refused, {name: int(each.remapped) for name, each in tenants.items()}
            caps = {name: self._model(each).cap for name, each in tenants.items()}
            done = super()._grow(tenants, out)
            after = {name: int(each.remapped) for name, each in tenants.items()}
            grown.append(sum(after.values()) - sum(before.values()))
            assert all(after[name] <= max(caps[name], before[name]) for name in after)
            assert self.refused == refused
            return done

        def _restore(self, tenants: Any, short: Any) -> bool:
            done = super()._restore(tenants, short)
            ends.extend(["home"] * done)
            return done

    monkeypatch.setattr("bench.lab.paper.runs.POLICY", dataclasses.replace(POLICY, manager=Watched))
    run = Run(C2[1], POLICY.name, "x1.5", 2.2, 0)
    _, items, result = serve(run, Settings(requests=60))
    assert result.requests_finished == len(items) == 60
    assert set(grown) <= {0, 1} and sum(grown) > 10 and ends
    assert len(made) == 1


def test_it_depends_on_its_arguments_alone() -> None:
    run = Run(C2[1], POLICY.name, "x1", 1.5, 1)
    assert run_one(run, Settings(requests=30)) == run_one(run, Settings(requests=30))
    assert algorithm_1.POLICY.config == type(algorithm_1.POLICY.config)()
