"""What the adapters use in the installed vLLM and SGLang, and whether it is there: python tools/engine_names.py vllm sglang

Prints the version, those that were tested, how many names fit, and each that does not. Exit code 1: one does not, or an engine is
not installed. `make test-engines-newest` runs it with the newest releases: what has changed is then known before somebody's
engine does not start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from remap.adapters.touched import Touched, known, unlike


def lines(what: str, found: str | None, tested: Sequence[str], touched: Sequence[Touched]) -> Iterator[str]:
    """The report; one line alone if all is well. found: the installed version."""
    if found is None:
        yield f"{what}: not installed"
        return
    wrong = unlike(touched)
    span = " to ".join(dict.fromkeys((tested[0], tested[-1])))
    news = "" if known(found, tested) else ", not among them"
    yield f"{what} {found} (tested: {span}{news}): {len(touched) - len(wrong)} of {len(touched)} names fit"
    for each in wrong:
        yield f"  {each}"


def _vllm() -> list[str]:
    from remap.adapters.vllm import engine_internals

    return list(lines("vLLM", engine_internals.installed_version(), engine_internals.TESTED, engine_internals.TOUCHED))


def _sglang() -> list[str]:
    from remap.adapters.sglang import versions

    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = None
    return list(lines("SGLang", found, (versions.TESTED,), versions.touched()))


def main(engines: Sequence[str]) -> int:
    said = {"vllm": _vllm, "sglang": _sglang}
    reports = [said[engine]() for engine in engines or said]
    for report in reports:
        print("\n".join(report))
    return int(any(len(report) > 1 or "not installed" in report[0] for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
