"""Random walks over whole sessions (fuzz_world.py): a few always; REMAP_FUZZ=minutes for so long, from a fresh seed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz_world
import pytest
from subprocesses import run

MINUTES = float(os.environ.get("REMAP_FUZZ") or 0)
WALKS = 12
SEED = f"{int(time.time())}-" if MINUTES else ""


@pytest.mark.parametrize("kind", fuzz_world.KINDS)
def test_random_walks_find_nothing(kind: str) -> None:
    seconds = MINUTES * 60 / len(fuzz_world.KINDS)
    amount = ["--seconds", str(seconds), "--keep-going"] if MINUTES else ["--seconds", "1e9", "--walks", str(WALKS)]
    here = Path(fuzz_world.__file__).resolve()
    paths = [str(here.parent), str(here.parent.parent), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, str(here), "--kinds", kind, "--seed", SEED, *amount],
        capture_output=True,
        text=True,
        timeout=seconds + 600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"seed {SEED!r}\n{done.stdout}\n{done.stderr}"


def test_the_fuzzer_finds_what_is_broken_and_makes_it_small() -> None:
    """Blocks move without their bytes: a walk finds it, and a shorter one says how."""
    program = """
import fuzz_world, remap.kv_cache
remap.kv_cache.KVCache.move = lambda self, pairs: None
for number in range(100):
    walk = fuzz_world.make_walk(f"planted{number}", "plain")
    walk["ops"] = [op for op in walk["ops"] if op[0] != "bad_attach"]
    walk["tolerated"] = ["InvalidArgument"]
    found = fuzz_world.isolated(walk)
    if found is not None and "a live block of # has changed" in found.signature:
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
