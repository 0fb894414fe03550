"""docs/pictures/imports.svg is what tools/import_picture.py draws of the sources."""

from __future__ import annotations

from subprocesses import ROOT, load_tool

tool = load_tool("import_picture")


def test_the_stored_picture_is_of_these_sources() -> None:
    assert (ROOT / tool.PICTURE).read_text(encoding="utf-8") == tool.picture(ROOT / "src"), (
        "run python tools/import_picture.py"
    )


def test_everything_imports_the_base_and_nothing_goes_up_through_the_wall() -> None:
    arrows = tool.arrows(ROOT / "src")
    assert {one for one, other in arrows if other == "remap.base"} == {*tool.BOXES} - {"remap.base", "remap._core"}
    above = {box for box, (_, y, *_) in tool.BOXES.items() if y < tool.WALL}
    assert above == {box for box in tool.BOXES if box.startswith("remap_serve.")}
    assert not [pair for pair in arrows if pair[1] in above and pair[0] not in above]
