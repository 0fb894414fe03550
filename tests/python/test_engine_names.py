"""What tools/engine_names.py says of an engine's release."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from engine_names import lines

from remap.adapters.touched import Touched

THERE = (Touched("json", "dumps", "obj *"), Touched("json", "JSONDecoder.decode", "self s *"))
GONE = (Touched("json", "dump_all"), Touched("json", "loads", "text"))


def test_a_release_that_was_tested_and_fits() -> None:
    assert list(lines("vLLM", "0.32.1", ("0.31", "0.32"), THERE)) == [
        "vLLM 0.32.1 (tested: 0.31 to 0.32): 2 of 2 names fit"
    ]


def test_what_has_changed_in_a_newer_one() -> None:
    first, gone, other = lines("SGLang", "9.0", ("0.5.23",), (*THERE, *GONE))
    assert first == "SGLang 9.0 (tested: 0.5.23, not among them): 2 of 4 names fit"
    assert gone == "  json:dump_all is not there" and other.startswith("  json:loads takes (s, ")


def test_one_that_is_not_installed() -> None:
    assert list(lines("vLLM", None, ("0.32",), THERE)) == ["vLLM: not installed"]
