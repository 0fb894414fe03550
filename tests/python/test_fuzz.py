"""Random walks over whole sessions (fuzz_world.py): a few always; REMAP_FUZZ=minutes for so long, from a fresh seed."""

from __future__ import annotations

import os
import time
from typing import Any

import fuzz_world
import odd_arguments
import pytest
from effort import some
from subprocesses import run

MINUTES = float(os.environ.get("REMAP_FUZZ") or 0)
WALKS = some(6, 20)
SEED = f"{int(time.time())}-" if MINUTES else ""


@pytest.mark.parametrize("kind", fuzz_world.KINDS)
def test_random_walks_find_nothing(kind: str) -> None:
    seconds = MINUTES * 60 / len(fuzz_world.KINDS)
    amount = ["--seconds", str(seconds)] if MINUTES else ["--seconds", "1e9", "--walks", str(WALKS)]
    arguments = ["fuzz_world.py", "--kinds", kind, "--seed", SEED, *amount]
    program = f"import fuzz_world, sys; sys.argv = {arguments!r}; fuzz_world.main()"
    done = run(program, timeout_s=seconds + 600)
    assert done.returncode == 0, f"seed {SEED!r}\n{done.stdout}\n{done.stderr}"


def test_every_public_verb_is_drawn_or_says_why_not() -> None:
    """Nobody drew a verb of `kv.host`: its faults were found by hand."""
    owners = ("Session", "Tenant", "KVCache", "HostKV", "advanced")
    verbs = {f"{owner}.{name}" for owner, name in odd_arguments.public() if owner in owners}
    assert verbs == {*fuzz_world.VERBS, *fuzz_world.NOT_DRAWN}
    drawn = {op[0] for seed in range(20) for op in fuzz_world.make_walk(f"{seed}", "plain")["ops"]}
    assert {*fuzz_world.VERBS.values()} - {"end"} <= drawn


def test_a_walk_uses_host_memory() -> None:
    """Copies go out and come back in a good part of the walks, and some are in flight across other operations."""
    program = """
import collections, fuzz_world
done = collections.Counter()
class Counting(fuzz_world.World):
    def do(self, op):
        super().do(op)
        done["out"] += any(engine.stored for engine in self.engines.values())
        done["in flight"] += any(engine.flying for engine in self.engines.values())
        done[op[0]] += 1
fuzz_world.World = Counting
for seed in range(4):
    assert fuzz_world.run(fuzz_world.make_walk(f"{seed}", "plain")) is None
assert min(done[each] for each in ("out", "in flight", "copy_in", "join", "arrived", "forget")) > 3, done
"""
    done = run(program, timeout_s=300)
    assert done.returncode == 0, (done.stdout, done.stderr)


def tenant(layers: list[int], block: list[int], **kv: Any) -> dict[str, Any]:
    """layers: bytes of each. block: KV heads, their dimension, tokens."""
    heads, dim, tokens = block
    spec = {"layers": len(layers), "kv_heads": heads, "head_dim": dim, "block_tokens": tokens, "dtype": "bfloat16"}
    spec |= {"min_blocks": 0, "max_blocks": 200, "layout": "block_major", **kv}
    return {"layers": layers, "headed": False, "kv": spec, "priority": 0, "active": True, "times": [1.0, 0.1]}


EAGER = {"dwell": 1, "hysteresis_blocks": 0}
# What the fuzzer found, made small: name -> (mode, page, pages, settings, operations).
FOUND: dict[str, tuple[str, int, int, dict[str, Any], list[Any]]] = {
    # Activated, the tenant keeps pages lent: what its ring does not need of two unequal layers never comes home.
    "activate leaves pages of ring layers lent": ("aliased", 4096, 33, {}, [
        ["attach", "t1", tenant([8185, 8192, 8092, 1], [1, 8, 4], min_blocks=1, max_blocks=41)],
        ["attach", "t2", {**tenant([16377, 16383, 6144, 8192], [2, 16, 1], min_blocks=1), "active": False}],
        ["step", {"t1": 20, "t2": 7}],
        ["remap", "t2", 1.0, 1, "nested", False],
        ["activate", "t2", False, False],
    ]),
    # One layer comes home, and with layer_major all 64 blocks go with it although 7 are wanted: unsaid in the report.
    "a layer comes home, and demand is unmet in silence": ("strict", 8192, 39, {"dwell": 1, "slowdown": 5.0}, [
        ["attach", "t0", tenant([16383] * 8, [1, 24, 16], dtype="float32", max_blocks=5)],
        ["attach", "t1", tenant([0, 16284, 8192, 24576, 1, 32768, 8191, 24476], [1, 16, 4], layout="layer_major")],
        ["deactivate", "t0"],
        *(["step", {"t1": blocks}] for blocks in (60, 20, 7)),
    ]),
    # A backend call fails for t2; t3, whose turn comes after it, is not in the report at all.
    "a step that ends early is silent about those behind": ("aliased", 4096, 100, {}, [
        ["attach", "t0", tenant([16284, 24543], [2, 100, 16], min_blocks=2)],
        ["attach", "t2", tenant([12188, 12289], [2, 16, 16], min_blocks=1, max_blocks=6)],
        ["attach", "t3", tenant([12288], [2, 24, 1], dtype="float32", min_blocks=2, max_blocks=3)],
        ["step", {"t0": 60, "t2": 20}],
        ["deactivate", "t0"],
        ["fault", 3, False, False],
        ["step", {"t0": 0, "t2": 60, "t3": 7}],
    ]),
    # Undoing fails as well: the arena is broken, and check() finds books that disagree instead of what is left.
    "the books of an arena that broke while layers came home": ("aliased", 8192, 61, {}, [
        ["attach", "t2", tenant([24476] * 4, [2, 24, 16], dtype="float32", min_blocks=2, max_blocks=3)],
        ["attach", "t3", tenant([16284] * 3, [2, 8, 4], dtype="float32", max_blocks=40)],
        ["lend", "t3", 0.7, 2, "t2"],
        ["fault", 3, True, False],
        ["activate", "t3", False, False],
    ]),
    # An activation tells t1's own allocator that blocks are its again, and is undone: to the pool they were nobody's then, so
    # their pages could go while the engine used them.
    "an engine was told to have blocks that nobody has": ("aliased", 4096, 18, {
        **EAGER, "min_idle": 1.0, "reserve_blocks": 2, "contention": 9.0, "slowdown": 5.0,
    }, [
        ["attach", "t0", tenant([4095] * 3, [1, 8, 16], dtype="float32", min_blocks=2, max_blocks=7, layout="layer_major")],
        ["attach", "t1", {**tenant([8191] * 4, [2, 24, 4], dtype="int8", min_blocks=1), "external": "late"}],
        ["step", {"t0": 60, "t1": 7}],
        ["step", {"t0": 2, "t1": 0}],
        ["crowd", "t3", 0.3, 3, True],
    ]),
    # The same: withdrawn again in the same change, and what the engine has was nobody's still.
    "an engine was told to have blocks, and to give them": ("strict", 4096, 21, {
        **EAGER, "selection": "slices", "buffers": 2, "contention": 0.0, "slowdown": 0.02,
    }, [
        ["attach", "t0", {
            **tenant([8192] * 6, [2, 24, 1], min_blocks=5, max_blocks=805), "pages": "none", "external": "late",
            "config": {**EAGER, "max_layers": 2, "reserve_blocks": 0, "slowdown": 5.0},
        }],
        ["remap", "t0", 0.7, 1, "slices", False],
        ["step", {"t0": 0}],
        ["free", "t0", 1, 0],
        ["remap", "t0", 0.09, 2, "nested", False],
    ]),
    # t2 streams slices of less than a layer in all, with a page lent: it was active, and that page did not come home.
    "a tenant with few slices is active, and its layers are lent": ("strict", 4096, 36, {
        **EAGER, "selection": "uniform", "reserve_blocks": 0, "contention": 0.0, "slowdown": 5.0,
    }, [
        ["attach", "t0", {
            **tenant([16384, 8092, 16383, 6144, 8185], [2, 8, 1], min_blocks=5, max_blocks=805), "active": False,
        }],
        ["attach", "t1", {
            **tenant([0, 4096, 12281, 1, 4096, 8191, 16377, 6144], [2, 16, 4], dtype="int8", max_blocks=1),
            "config": {**EAGER, "max_layers": 0, "reserve_blocks": 3, "slowdown": 0.0}, "external": "late",
        }],
        ["attach", "t2", {
            **tenant([4089, 8185, 8092], [1, 8, 16], dtype="int8", min_blocks=5, max_blocks=6),
            "active": False, "external": "late",
        }],
        ["lend", "t2", 1.0, 2, "t0"],
        ["step", {"t0": 2, "t1": 7}],
        ["remap", "t2", 0.37, 2, "slices", False],
        ["crowd", "t1", 1.0, 1, True],
    ]),
    # Slices of all layers that have pages, then six whole layers: the same pages, and the report still counted in slices.
    "whole layers by hand are counted as slices": ("aliased", 4096, 77, {
        "selection": "nested", "dwell": 4, "contention": 0.1, "slowdown": 0.02,
    }, [
        ["attach", "t0", tenant([8185, 16384, 0, 14336, 14336, 4089, 4089, 12255], [2, 100, 16])],
        ["remap", "t0", 0.56, 1, "slices", False],
        ["remap", "t0", 1.0, 1, "uniform", False],
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    mode, page, pages, settings, ops = FOUND[name]
    walk = {"kind": "plain", "mode": mode, "page": page, "pages": pages, "config": settings, "ops": ops}
    done = run(f"import fuzz_world; found = fuzz_world.isolated({walk!r}); print(found.what if found else '')")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@pytest.mark.slow
def test_the_fuzzer_finds_what_is_broken_and_makes_it_small() -> None:
    """Blocks move without their bytes: a walk finds it, and a shorter one says how."""
    program = """
import fuzz_world, remap.kv.cache
remap.kv.cache.TenantKV.move = lambda self, pairs: None
for number in range(100):
    walk = fuzz_world.make_walk(f"planted{number}", "plain")
    found = fuzz_world.isolated(walk)
    if found is not None and ": block # has changed" in found.signature:
        break
else:
    raise SystemExit("not found")
small, again = fuzz_world.smaller(walk, found)
assert again.signature == found.signature, again
assert len(small["ops"]) < len(walk["ops"]) / 2, small
assert fuzz_world.isolated(small).signature == found.signature
"""
    done = run(program, timeout_s=300)
    assert done.returncode == 0, (done.stdout, done.stderr)


def test_a_crash_and_a_hang_are_findings() -> None:
    program = """
import ctypes, time, fuzz_world
fuzz_world.HANG_S = 1
walk = fuzz_world.make_walk("0", "plain", 0)
fuzz_world.World.op_settle = lambda self: ctypes.string_at(16)
crash = fuzz_world.isolated({**walk, "ops": [*walk["ops"], ["settle"]]})
assert crash.signature.startswith("SIGSEGV") and crash.at == len(walk["ops"]), crash
fuzz_world.World.op_settle = lambda self: time.sleep(60)
hang = fuzz_world.isolated({**walk, "ops": [*walk["ops"], ["settle"]]})
assert hang.signature.startswith("hang") and hang.at == len(walk["ops"]), hang
"""
    done = run(program, timeout_s=100)
    assert done.returncode == 0, (done.stdout, done.stderr)
