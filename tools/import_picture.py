"""Who imports whom, and the wall between the packages: `python tools/import_picture.py` draws docs/pictures/imports.svg.

A box is a package; `modules` are those that stand in `remap` itself, `base` those of them that everything imports
(`import_rules.BASE`). Arrows go from who imports to what is imported; imports for annotations count.
tests/python/test_import_picture.py compares the stored picture with what is drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as a test loads it

import import_rules as rules

PICTURE = Path("docs/pictures/imports.svg")
WIDTH, HEIGHT, WALL, TALL = 1000, 980, 392, 36
# Box: the middle of it, its width and the colour of its arrows.
BOXES = {
    "remap_serve.cli": (500, 80, 120, "#7a3e9d"),
    "remap_serve.cluster": (250, 170, 130, "#b3541e"),
    "remap_serve.sim": (750, 170, 120, "#0f766e"),
    "remap_serve.engine": (430, 260, 130, "#1d4ed8"),
    "remap_serve.policy": (620, 340, 130, "#a21caf"),
    "remap.cli": (160, 470, 110, "#7a3e9d"),
    "remap.adapters": (420, 470, 130, "#b3541e"),
    "remap.modules": (700, 560, 150, "#1d4ed8"),
    "remap.broker": (200, 620, 110, "#0f766e"),
    "remap.memory": (480, 700, 130, "#b91c1c"),
    "remap.model": (740, 790, 110, "#a16207"),
    "remap.policy": (330, 800, 110, "#a21caf"),
    "remap.kv": (560, 860, 100, "#334155"),
    "remap.base": (250, 930, 320, "#334155"),
    "remap._core": (820, 930, 160, "#334155"),
}
SAID = {
    "remap.modules": "session, tenant, …",
    "remap.base": "errors, config, sizes, …: imported by all",
    "remap._core": "_core, in C++",
}


def box_of(module: str) -> str | None:
    """The box that a module is in; None for a package's own `__init__`."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if not first:
        return None
    if package == rules.SERVE or f"{package}.{first}" in BOXES:
        return f"{package}.{first}"
    return "remap.base" if first in rules.BASE else "remap.modules"


def arrows(src: Path) -> list[tuple[str, str]]:
    """(who imports, what), each once, by name."""
    modules = rules.read_package(src)
    found = {(box_of(name), box_of(other)) for name, wanted in rules.imports_of(modules).items() for other in wanted}
    # It has no source in Python.
    core = f"{rules.PACKAGE}._core"
    found |= {(box_of(name), core) for name, (_, its) in modules.items() if any(one.module == core for one in its)}
    return sorted((one, other) for one, other in found if one and other and one != other)


def _port(box: str, place: int, count: int) -> float:
    x, _, wide, _ = BOXES[box]
    return x + (wide - 24) * ((place + 1) / (count + 1) - 0.5)


def picture(src: Path) -> str:
    """The SVG."""
    drawn = [(one, other) for one, other in arrows(src) if other != "remap.base"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="15">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<line x1="20" y1="{WALL}" x2="{WIDTH - 20}" y2="{WALL}" stroke="#111827" stroke-width="5"/>',
        f'<text x="24" y="{WALL - 14}" font-size="18">remap_serve: what is built on the library</text>',
        f'<text x="24" y="{WALL + 28}" font-size="18">remap: the library, which imports nothing from above the wall</text>',
    ]
    # Arrows of one box leave and arrive beside each other, in the order in which their other ends stand.
    ends: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    for one, other in drawn:
        down = BOXES[one][1] < BOXES[other][1]
        ends.setdefault((one, down), []).append((one, other))
        ends.setdefault((other, not down), []).append((one, other))
    for one, other in drawn:
        colour, sign = BOXES[one][3], 1 if BOXES[one][1] < BOXES[other][1] else -1
        at = []
        for box, below in ((one, sign > 0), (other, sign < 0)):
            side = sorted(ends[box, below], key=lambda pair: BOXES[pair[pair[0] == box]][0])
            at.append(_port(box, side.index((one, other)), len(side)))
        begin, end = BOXES[one][1] + sign * TALL / 2, BOXES[other][1] - sign * TALL / 2
        bend, tip = (end - begin) / 2, end - sign * 8
        curve = f"M{at[0]:.1f} {begin:g}C{at[0]:.1f} {begin + bend:g} {at[1]:.1f} {tip - bend:g} {at[1]:.1f} {tip:g}"
        lines.append(f'<path d="{curve}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.75"/>')
        head = f"M{at[1] - 4:.1f} {tip:g}L{at[1] + 4:.1f} {tip:g}L{at[1]:.1f} {end:g}Z"
        lines.append(f'<path d="{head}" fill="{colour}"/>')
    for name, (x, y, wide, colour) in BOXES.items():
        place = f'x="{x - wide / 2:g}" y="{y - TALL / 2:g}" width="{wide}" height="{TALL}"'
        lines.append(f'<rect {place} rx="6" fill="#f8fafc" stroke="{colour}" stroke-width="2"/>')
        said = SAID.get(name, name.partition(".")[2])
        lines.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle">{said}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    (root / PICTURE).write_text(picture(root / "src"), encoding="utf-8")
