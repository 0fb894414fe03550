"""The pages as Chromium lays them out and paints them: on a phone and on a desk, light, dark and on paper.

What is compared is what must hold with any font: nothing is wider than the window but tables, which scroll by themselves; charts
stack where two would be too small, and something is drawn in each; no text is cut off; it can be told from its background; paper
is white. And each chart, as coarse greys, with data/pages: with other fonts it differed by 0.0007 of black to white, without
what is drawn in it by 0.09.

    PYTHONPATH=tests:. python tests/serve/test_pages_in_a_browser.py       writes these anew; look at the pages before
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs typer")
numpy = pytest.importorskip("numpy", reason="screenshots are compared by it")
image = pytest.importorskip(
    "matplotlib.image", reason="matplotlib is not installed: it draws, and it reads screenshots"
)


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]
WIDTHS = (390, 1280)
HEIGHT = 7000  # of the longest page, on a phone
ROWS, COLUMNS = 8, 24  # of a chart
STORED = Path(__file__).parent / "data" / "pages"
# Its own folder each time, and nothing in the background that would look for a network.
FLAGS = (
    *("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic", "--hide-scrollbars", "--run-all-compositor-stages-before-draw"),
    *(["--no-sandbox"] if os.geteuid() == 0 else []),  # which root has none of
)
MEASURE = """
const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
const style = element => { const s = getComputedStyle(element); return [s.color, s.backgroundColor]; };
const within = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
const cut = e => getComputedStyle(e).overflow !== "visible" &&
  (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1);
const drawn = svg => [...svg.querySelectorAll("path, polyline, rect, circle, use")].filter(e => {
  const b = e.getBoundingClientRect(); return b.width + b.height > 20; }).length;
const words = [...document.querySelectorAll("figure svg text")].filter(e => e.getBoundingClientRect().width > 0);
const found = {
  width: innerWidth, scrolls: document.documentElement.scrollWidth,
  charts: [...document.querySelectorAll("figure svg")].map(box),
  letters: [...document.querySelectorAll("figure svg")].map(e =>
    (e.querySelector("text") ? parseFloat(getComputedStyle(e.querySelector("text")).fontSize) : 10)
    * e.clientWidth / e.viewBox.baseVal.width / parseFloat(getComputedStyle(document.body).fontSize)),
  remap: [...document.querySelectorAll("table")].slice(0, 1).flatMap(e => {
    const column = [...e.tHead.rows[0].cells].findIndex(cell => cell.textContent === "remap");
    return [...e.rows].map(row => row.cells[column].getBoundingClientRect().right); }),
  regions: [...document.querySelectorAll(".scroll")].map(e => [e.clientWidth, e.scrollWidth]),
  drawn: [...document.querySelectorAll("figure svg")].map(drawn),
  cut: [...document.querySelectorAll("h1, h2, h3, p, th, td, dt, dd, figcaption, .tile *")].filter(cut).map(e => e.textContent),
  outside: words.filter(e => !within(e.getBoundingClientRect(), e.ownerSVGElement.getBoundingClientRect()))
    .map(e => e.textContent),
  labels: words.map(e => getComputedStyle(e).fill),
  page: style(document.body), text: [...document.querySelectorAll("h1, p, td, th, dd, dt")].map(e => style(e)[0]),
};
parent.document.body.textContent = "@@" + JSON.stringify(found) + "@@";
"""


def chromium(folder: Path, page: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    for last in (False, True):
        with tempfile.TemporaryDirectory(dir=folder) as profile:
            command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            except subprocess.TimeoutExpired:  # seen on a busy machine: it had painted, and did not end
                if last:
                    raise
                continue
        break
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def scheme(dark: bool) -> str:
    return f"--blink-settings=preferredColorScheme={0 if dark else 1}"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return made()


def made() -> dict[str, str]:
    from test_demo_report import make_result
    from test_simulate_cli import results_of

    from remap_serve.cli import demo_html, simulate_html

    results = results_of(["recompute", "remap", "ideal"])
    # A chart of one tenant is alone in its row.
    one = [
        replace(
            each,
            tenants=each.tenants[:1],
            timeline=tuple(p for p in each.timeline if p.tenant == each.tenants[0].tenant),
        )
        for each in results
    ]
    return {
        "one": simulate_html.page({"machine": "GH200"}, one, "C2 on GH200"),
        "demo": demo_html.page(make_result()),
        "simulate": simulate_html.page({"machine": "GH200"}, results, "C2 on GH200"),
    }


def seen(folder: Path, text: str, width: int, dark: bool) -> dict[str, Any]:
    """What the page's own document measures. In a frame: Chromium's windows are at least 500 pixels wide."""
    inner = html.escape(text.replace("</body>", f"<script>{MEASURE}</script></body>"))
    page = folder / "page.html"
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{inner}"></iframe>'
    page.write_text(f"<!doctype html><body>{frame}</body>", encoding="utf-8")
    said = chromium(folder, page, "--window-size=1400,1000", scheme(dark), "--dump-dom")
    found: dict[str, Any] = json.loads(said.split("@@")[1])
    assert found["width"] == width
    return found


def greys(folder: Path, text: str, width: int, dark: bool) -> Any:
    """The top of the page as a window of that width paints it, from 0 to 1."""
    page, shot = folder / "shown.html", folder / "shot.png"
    frame = f'<iframe width="{width}" height="{HEIGHT}" style="border:0" srcdoc="{html.escape(text)}"></iframe>'
    page.write_text(f'<!doctype html><body style="margin:0">{frame}</body>', encoding="utf-8")
    chromium(folder, page, f"--window-size=1400,{HEIGHT}", scheme(dark), f"--screenshot={shot}")
    return image.imread(shot)[:HEIGHT, :width, :3].mean(axis=2)


def charts_of(folder: Path, text: str, width: int, dark: bool) -> Any:
    """Each chart as a few greys, one chart below the other: where they lie depends on the font, what they show does not."""
    shown, boxes = greys(folder, text, width, dark), seen(folder, text, width, dark)["charts"]
    small = []
    for left, top, right, bottom in boxes:
        chart = shown[round(top) : round(bottom), round(left) : round(right)]
        rows, columns = (
            [size * part // parts for part in range(parts + 1)] for size, parts in zip(chart.shape, (ROWS, COLUMNS))
        )
        for above, below in zip(rows, rows[1:]):
            small.append([float(chart[above:below, a:b].mean()) for a, b in zip(columns, columns[1:])])
    return numpy.array(small)


def stored_at(name: str, width: int, dark: bool) -> Path:
    return STORED / f"{name}-{width}-{'dark' if dark else 'light'}.png"


def luminance(colour: str) -> float:
    """Of CSS's "rgb(1, 2, 3)", as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", ["demo", "simulate"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_its_window_and_charts_stack_on_a_phone(
    pages: dict[str, str], name: str, width: int, tmp_path: Path
) -> None:
    found = seen(tmp_path, pages[name], width, dark=width == WIDTHS[0])
    assert found["scrolls"] <= width
    assert all(client <= width for client, _ in found["regions"])
    charts = found["charts"]
    assert len(charts) >= 6 and all(
        left >= 0 and right <= width and right - left >= 300 for left, _, right, _ in charts
    )
    assert min(found["drawn"]) > 0 and found["cut"] == found["outside"] == []
    rows = len({round(top) for _, top, _, _ in charts})
    assert rows == len(charts) if width == WIDTHS[0] else rows <= (len(charts) + 3) // 2


@pytest.mark.parametrize("width", [*WIDTHS, 840])
@pytest.mark.parametrize("name", ["demo", "one"])
def test_letters_of_charts_are_no_larger_than_the_texts_and_a_phone_shows_remap(
    pages: dict[str, str], name: str, width: int, tmp_path: Path
) -> None:
    """A chart that was alone in its row had letters of twice the size; on a phone the column "remap" was off the screen."""
    found = seen(tmp_path, pages[name], width, dark=False)
    assert all(0.6 <= size <= 1.15 for size in found["letters"])
    assert len(found["remap"]) > 10 and max(found["remap"]) <= width


@pytest.mark.parametrize("name", ["demo", "simulate"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_on_its_background_and_screenshots_are_of_that_colour(
    pages: dict[str, str], name: str, dark: bool, tmp_path: Path
) -> None:
    found = seen(tmp_path, pages[name], WIDTHS[1], dark)
    behind = luminance(found["page"][1])
    assert (behind < 0.05) if dark else (behind > 0.9)
    for colour in {*found["text"], *found["labels"]}:
        light, deep = sorted((luminance(colour), behind), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5, colour  # WCAG's least for text
    shot, page = tmp_path / "shot.png", tmp_path / "plain.html"
    page.write_text(pages[name], encoding="utf-8")
    chromium(tmp_path, page, f"--window-size={WIDTHS[1]},1800", scheme(dark), f"--screenshot={shot}")
    painted = image.imread(shot)[..., :3]
    assert painted.shape[1] == WIDTHS[1]
    pixels = painted.reshape(-1, 3).mean(axis=1)
    share = float((pixels < 0.2).mean() if dark else (pixels > 0.9).mean())
    # Most is background, and something is not.
    assert 0.6 < share < 0.999


@pytest.mark.parametrize("name", ["demo", "simulate"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_look_as_they_did(pages: dict[str, str], name: str, width: int, dark: bool, tmp_path: Path) -> None:
    stored = image.imread(stored_at(name, width, dark))[..., 0]
    found = charts_of(tmp_path, pages[name], width, dark)
    assert found.shape == stored.shape
    apart = abs(found - stored).reshape(-1, ROWS * COLUMNS).mean(axis=1)
    assert apart.max() < 0.02, f"chart {apart.argmax()} of {name}"


def test_a_chart_without_what_is_drawn_in_it_looks_otherwise(pages: dict[str, str], tmp_path: Path) -> None:
    empty = pages["demo"].replace("</style>", "figure:last-of-type svg path{display:none}</style>", 1)
    found = charts_of(tmp_path, empty, 1280, dark=False)
    stored = image.imread(stored_at("demo", 1280, dark=False))[..., 0]
    apart = abs(found - stored).reshape(-1, ROWS * COLUMNS).mean(axis=1)
    assert apart.max() > 0.05 and apart.min() < 0.02


@pytest.mark.parametrize("name", ["demo", "simulate"])
def test_paper_is_white_on_a_dark_screen_too(pages: dict[str, str], name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    # Chromium paints print rules only into a PDF: here they are made the screen's.
    text = pages[name]
    assert text.count("@media print") == 1 and text.count("@media screen and (prefers-color-scheme:dark)") == 1
    page.write_text(text, encoding="utf-8")
    written = tmp_path / "page.pdf"
    chromium(tmp_path, page, scheme(dark=True), "--no-pdf-header-footer", f"--print-to-pdf={written}")
    assert written.read_bytes()[:5] == b"%PDF-" and written.stat().st_size > 10_000
    swapped = text.replace("@media screen and", "@media print and").replace("@media print{", "@media screen{")
    found = seen(tmp_path, swapped, WIDTHS[1], dark=True)
    assert luminance(found["page"][1]) > 0.9 and max(luminance(colour) for colour in found["text"]) < 0.25
    assert found["scrolls"] <= WIDTHS[1]


if __name__ == "__main__":
    STORED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for name, text in made().items():
            if name == "one":
                continue
            for width in WIDTHS:
                for dark in (False, True):
                    greys_of = charts_of(Path(work), text, width, dark)
                    image.imsave(stored_at(name, width, dark), greys_of, cmap="gray", vmin=0.0, vmax=1.0)
