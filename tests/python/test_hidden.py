"""What a machine hides of a model, in one line: with figures put in, and by the same arithmetic as `remap plan`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.first_layers_des import ends_at
from reference.first_layers_des import first_kept as slow_first_kept
from remap.policy.hardware import machine, model
from remap.policy.hidden import first_kept, lateness, lateness_beyond, most_hidden, most_lent, verdict
from remap_serve.sim.planning import limit, plan
from remap_serve.sim.roofline import Roofline


@pytest.mark.parametrize("name", ["GH200", "H100-PCIe"])
def test_the_plan_and_the_line_agree(name: str) -> None:
    on, llama = machine(name), model("llama-3-8b")
    planned = limit(Roofline(on, llama), 32, 512)
    compute, copies = [planned.layer_s] * llama.layers, [planned.copy_s] * llama.layers
    assert most_hidden(compute, copies) == (planned.remapped, planned.buffers, planned.selection)
    said = verdict(compute, copies, 0.0, compute, 0.0)
    assert (f"hides {planned.remapped} of {llama.layers} layers" in said) == (planned.remapped > 0)
    reload = plan(on, llama).reload
    tokens, hidden = reload.hidden[0]
    assert tokens and 0 <= hidden <= llama.layers - 2


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
    assert most_lent(compute, late) == 0
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


def test_what_a_first_token_within_a_second_takes_over_pcie() -> None:
    """A Llama-3-8B on an H100: 16 GB over 55 GB/s take a third of a second."""
    on, llama = machine("H100-SXM"), model("llama-3-8b")
    roofline = Roofline(on, llama)
    compute = [roofline.layer_s(512, 512 * 513 // 2, 0, 0)] * llama.layers
    copies = [llama.layer_bytes / on.h2d_bytes_per_s] * llama.layers
    second, hidden = first_kept(compute, copies, 1.0 - sum(compute)), first_kept(compute, copies)
    assert second == 0 and 0.8 * llama.layers < hidden < llama.layers
    tenth = first_kept(compute, copies, 0.1 - sum(compute))
    assert 0 < tenth < hidden and first_kept(compute, copies, -1.0) == llama.layers


def test_the_pages_table_of_pieces_at_every_second_and_fourth_layer() -> None:
    """In docs/notes/vllm.md: a piece of so many layers computes as one, and at best 1, 2, ... of its layers stream."""
    copy = model("llama-3-8b").layer_bytes / machine("GH200-96GB").h2d_bytes_per_s
    hidden = {
        layers: [
            max(most_hidden(layers * each, some * copy, layers=32 // layers)[0] * some for some in range(1, layers + 1))
            for each in (0.179e-3, 0.231e-3, 0.469e-3, 0.356e-3, 0.558e-3, 0.972e-3)
        ]
        for layers in (1, 2, 4)
    }
    page = (Path(__file__).resolve().parents[2] / "docs/notes/vllm.md").read_text(encoding="utf-8")
    for row in (0, 3):
        cells = " | ".join(", ".join(map(str, counts[row : row + 3])) for counts in hidden.values())
        assert f"| {cells} |" in page
