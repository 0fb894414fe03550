"""A pass gives the same bits with and without remap, whatever is remapped and whenever (promises 4 and 5).

Free usable KV blocks are poisoned and live ones hold random bytes all the time, in pages that were weights a moment ago:
a stale read of weights or a stray write of a copy shows at once.
"""

from __future__ import annotations

import random

import pytest
from effort import LONG

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import KINDS, LAYERS, Rig, addresses_of, bytes_of, generate, ids_for, kv_spec, logits_of, make, state_of  # noqa: E402

MODES = ("aliased", "strict")
PAGES = {"aliased": 16384, "strict": 65536}
EVERY = [(alpha, beta) for beta in (1, 2) for alpha in range(LAYERS - beta + 1)]


def uneven():
    """The ring's buffers are as large as the largest layer; smaller layers use a part of one."""
    model, generator = make("llama"), torch.Generator().manual_seed(0)
    for index, width in ((0, 33), (2, 300), (5, 90)):
        for name, (rows, columns) in {"gate": (width, 64), "up": (width, 64), "down": (64, width)}.items():
            linear = torch.nn.Linear(columns, rows, bias=False)
            linear.weight.data = torch.randn(rows, columns, generator=generator) * 0.1
            setattr(model.model.layers[index].mlp, f"{name}_proj", linear)
    return model


MAKERS = {kind: lambda kind=kind: make(kind) for kind in KINDS}
MAKERS |= {f"qwen3-{dtype}": lambda dtype=dtype: make("qwen3", dtype=dtype) for dtype in (torch.bfloat16, torch.half)}
MAKERS["uneven"] = uneven


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_alpha_and_both_betas(kind, mode):
    model, ids = MAKERS[kind](), ids_for(2, 9)
    expected = logits_of(model, ids)
    assert torch.isfinite(expected).all()
    tokens, scores = generate(model, ids)
    before, addresses = bytes_of(model), addresses_of(model)
    with Rig(model, mode=mode, page_bytes=PAGES[mode]) as rig:
        assert set(addresses_of(model).values()).isdisjoint(addresses.values())
        start = rig.kv.usable_blocks
        for place, selection in enumerate(("uniform", "nested")):
            # In the short form each selection has every second pair, the others in the other mode.
            pairs = EVERY if LONG else EVERY[(place + MODES.index(mode)) % 2 :: 2]
            for alpha, beta in pairs if kind != "uneven" else ((4, 1), (3, 1), (5, 1), (0, 1), (4, 1)):
                rig.remap(alpha, beta, selection)
                assert rig.tenant.remapped == alpha
                assert len(rig.tenant.streamed) == (alpha + beta if alpha else 0)
                assert (rig.kv.usable_blocks > start) == (alpha > 0) or kind == "uneven"
                for _ in range(2):  # the first pass after a change, and one in the steady state
                    assert torch.equal(logits_of(model, ids), expected), (selection, alpha, beta)
                rig.check()
            got, rows = generate(model, ids)
            assert torch.equal(got, tokens)
            assert torch.equal(rows, scores)
        assert rig.session.snapshot().tenants["m"].copies > 0
    assert torch.equal(logits_of(model, ids), expected)
    assert all(torch.equal(value, before[name]) for name, value in bytes_of(model).items())


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama-odd", "opt-odd"])
def test_kv_is_written_into_pages_that_were_weights(kind, mode, layout):
    """Grow, fill the new pages with KV, shrink (live blocks move), and so on: neither KV nor weights are ever damaged.

    Down as well as up, any selection, several changes without a pass between, passes of different batches.
    """
    rng = random.Random(f"{kind}{mode}{layout}")
    model = make(kind, rng.randrange(3))
    moves = refused = 0
    with Rig(model, mode=mode, kv=kv_spec(model, layout=layout), spare=1) as rig:
        for number in range(30):
            before = state_of(rig.session)
            try:
                report = rig.remap(*rng.choice(EVERY), rng.choice(["uniform", "nested"]))
                moves += len(report.moved.get("m", {}))
            except remap.OutOfBlocks:
                refused += 1
                rig.check()
                assert state_of(rig.session) == before
            if rng.random() < 0.7:
                rig.right()
            full = number % 3 == 2  # then most shrinks must be refused
            if rig.kv.free_blocks:
                rig.fill_blocks(rig.kv.free_blocks if full else rng.randint(1, rig.kv.free_blocks), rng)
            if rig.live and not full:
                rig.free_blocks(rng.randint(0, len(rig.live)), rng)
            rig.whole()
        rig.drop(rig.live)
        rig.remap(0)
        remap.advanced.settle(rig.session)
        rig.right()
        rig.check()
    assert moves > 0
    assert refused > 0


@pytest.mark.parametrize("alpha", [0, 3])
def test_an_abandoned_pass_does_no_harm(alpha):
    model, ids = make("llama"), ids_for(2, 5)
    expected = logits_of(model, ids)

    def fail(*args):
        raise RuntimeError("broken layer")

    with Rig(model) as rig:
        rig.remap(alpha, 2)
        for broken in (0, 2, 5, 3):
            handle = model.model.layers[broken].mlp.register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="broken layer"):
                logits_of(model, ids)
            handle.remove()
            if broken == 2:
                rig.remap(max(0, alpha - 1), 1)
            assert torch.equal(logits_of(model, ids), expected)
            rig.check()
