"""What a machine hides of a model, in one line: with figures put in, and by the same arithmetic as `remap plan`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.first_layers_des import ends_at
from reference.first_layers_des import first_kept as slow_first_kept
from remap.policy.hardware import machine, model
from remap.policy.hidden import first_kept, lateness, lateness_beyond, most_hidden, most_lent, verdict
from remap_serve.sim.planning import limit
from remap_serve.sim.roofline import Roofline


@pytest.mark.parametrize("name", ["GH200", "H100-PCIe"])
def test_the_plan_and_the_line_agree(name: str) -> None:
    on, llama = machine(name), model("llama-3-8b")
    planned = limit(Roofline(on, llama), 32, 512)
    compute, copies = [planned.layer_s] * llama.layers, [planned.copy_s] * llama.layers
    assert most_hidden(compute, copies) == (planned.remapped, planned.buffers, planned.selection)
    said = verdict(compute, copies, 0.0, compute, 0.0)
    assert (f"hides {planned.remapped} of {llama.layers} layers" in said) == (planned.remapped > 0)


@pytest.mark.parametrize(
    ("copy_s", "slowdown", "begins"),
    [
        (0.0001, 0.0, "this machine hides 8 of 10 layers within 0 %"),  # all but the two buffers
        (0.004, 0.02, "this machine hides 1 of 10 layers within 2 %"),  # two copies in 10 ms, one of them the ring's
        (0.1, 0.02, "on this link one model alone gains nothing here"),
    ],
)
def test_one_line_for_each_kind_of_link(copy_s: float, slowdown: float, begins: str) -> None:
    """A pass of 10 layers, a millisecond each."""
    said = verdict([0.001] * 10, [copy_s] * 10, slowdown, [0.01] * 10, 0.0)
    assert said.startswith(begins), said


def test_what_an_idle_model_lends_depends_on_how_late_it_may_be() -> None:
    compute, copies = [0.001] * 10, [0.1] * 10
    late = lateness(compute, copies)
    assert late == sorted(late) and len(late) == 9
    assert most_lent(compute, late, 0.35) == 2  # three copies: those of two layers, and of the ring's
    assert most_lent(compute, late, 10.0) == 8
    assert "lends all of its layers" in verdict(compute, copies, 0.0, compute, 10.0)
    assert "lends 2 of its layers and is late by 350 ms at most" in verdict(compute, copies, 0.0, compute, 0.35)


SECONDS = st.integers(0, 12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9), st.integers(0, 40), st.integers(0, 6))
def test_the_certificate_of_first_layers_is_what_the_passes_show(
    layers: list[tuple[int, int]], late: int, setup: int
) -> None:
    """Against passes that are played one layer after another; to keep more is never later."""
    compute, transfer = [one for one, _ in layers], [other for _, other in layers]
    played = [ends_at(compute, transfer, kept, setup) - sum(compute) for kept in range(len(layers) + 1)]
    assert lateness_beyond(compute, transfer, setup) == played == sorted(played, reverse=True)
    assert first_kept(compute, transfer, late, setup) == slow_first_kept(compute, transfer, late, setup)
