"""docs/tune.md, from the code: every field of Config, Knobs and Platform, and every REMAP_* variable that the library reads.

python tools/tune_page.py          write the page
python tools/tune_page.py check    exit code 1: the page is not what this would write

A setting without a description is an error: whoever adds one describes it in its class, in remap.adapters.settings, or here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/tune.md"
# Read outside of remap.adapters.settings.
ELSEWHERE = {
    "REMAP_DEVICE": "the device of sessions that name none: cpu, cuda:N, sim:NAME or unix:PATH",
    "REMAP_MODE": "the mode of sessions that name none: aliased or strict",
    "REMAP_HOST_BUDGET": "most bytes of page-locked host memory of sessions that name none, on cuda",
    "REMAP_LIBCUDA": "the driver's library, instead of libcuda.so.1",
    "REMAP_CACHE": "folder for the demo's dequantised model; by default `remap` in XDG_CACHE_HOME or ~/.cache",
    "REMAP_TOP": "path of a socket at which the process's session shows itself to `remap top --socket PATH`; `{pid}` in it is "
    "the process",
    "REMAP_NVTX": "1: ranges for Nsight around steps and passes; needs the package nvtx",
}
# The library sets it for its own processes.
INTERNAL = {"REMAP_METRICS_FILE", "REMAP_VLLM_OWNER"}
HEAD = """# Tune

*Written by `tools/tune_page.py` from the sources; a test compares.*

Leave everything as it is: the defaults are the product. What operators decide is `slowdown` (how much waiting
is allowed), the targets `ttft_s` and `tbt_s`, and `lends`. `remap advise` and `remap plan` print
the lines for a machine and its models.
"""

TURNS = """## Turns

Of models that share memory, each one's demand for it is met first for `quantum_s` (`SharedEngines`), or
`--quantum` (`remap serve-many`): 1 second. Give twice what its layers need to come home, or more: shorter turns copy
more. A request that has begun waits for 4 s or 20 rounds, then for its model's turn.
"""


def described(text: str, names: list[str]) -> dict[str, str]:
    """What a docstring says of each name: "name: sentence", up to the next name or an empty line."""
    found: dict[str, str] = {}
    marks = "|".join(names)
    for part in re.split(rf"(?:(?<=\n)|(?<=\. ))(?=(?:{marks})(?:, (?:{marks}))*(?: \([^)]*\)(?: and \w+)?)?: )", text):
        head, colon, said = part.partition(": ")
        if colon:
            sentence = " ".join(said.split("\n\n")[0].split())
            for name in re.findall(rf"\b(?:{marks})\b", head):
                found[name] = f"{found[name]} {sentence}" if name in found else sentence
    return found


def fields(kind: type, without: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """(name, default, description) of each field of a dataclass. Raises SystemExit for one that its docstring leaves out."""
    own = [each for each in dataclasses.fields(kind) if each.name not in without]
    said = described(inspect.cleandoc(kind.__doc__ or ""), [each.name for each in own])
    if missing := [each.name for each in own if each.name not in said]:
        raise SystemExit(f"{kind.__name__}: its docstring does not describe {', '.join(missing)}")
    return [(each.name, repr(each.default), said[each.name]) for each in own]


def variables() -> dict[str, str]:
    """What sets each variable, with the example of its line. Raises SystemExit for one that nobody describes."""
    from remap.adapters import settings

    text = re.sub(r"\n {10,}", " ", settings.__doc__ or "")
    found: dict[str, str] = {}
    for name, example, said in re.findall(r"^    (REMAP_\w+)=(\S+)\s+(.*)$", text, re.MULTILINE):
        found[name] = "; ".join(filter(None, (found.get(name), f"{said.strip()} (`{name}={example}`)")))
    found.update(ELSEWHERE)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r'"(REMAP_[A-Z0-9_]+)"', sources)) - INTERNAL
    if read != set(found):
        raise SystemExit(
            f"read and not described: {sorted(read - set(found))}; the other way: {sorted(set(found) - read)}"
        )
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def settings_table(kind: type, without: Sequence[str] = ()) -> str:
    rows = [(f"`{name}`", f"`{default}`", said) for name, default, said in fields(kind, without)]
    return table(("setting", "default", "what it does"), rows)


def page() -> str:
    """The whole page."""
    from remap.config import Config, Knobs
    from remap.memory.device import Platform

    config = [each.name for each in dataclasses.fields(Config)]
    variable_rows: Mapping[str, str] = variables()
    elsewhere = [(f"`{name}`", said) for name, said in variable_rows.items() if name in ELSEWHERE]
    engines = [(f"`{name}`", said) for name, said in variable_rows.items() if name not in ELSEWHERE]
    parts = (
        HEAD,
        TURNS,
        "## What operators set\n\n`remap.Config`, of a session or of one tenant (`Session(config=)`, `attach(config=)`).\n",
        settings_table(Config),
        "## Knobs\n\n`remap.advanced.Knobs` has the above and these, for ablations and experts; it goes where a `Config` goes.\n",
        settings_table(Knobs, config),
        "## How pages are made and copied\n\n`remap.advanced.Platform`, of a session (`Session(platform=)`).\n",
        settings_table(Platform),
        "## Variables of the engines' adapters\n\nRead by the adapters of vLLM and SGLang, if `REMAP_ENABLE` is set.\n",
        table(("variable", "what it does"), engines),
        "## Other variables\n",
        table(("variable", "what it does"), elsewhere),
    )
    return "\n".join(parts)


def main() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    made = page()
    if sys.argv[1:] == ["check"]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made:
            raise SystemExit(f"{PAGE.name} is not what the sources say: python tools/tune_page.py")
        return
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
