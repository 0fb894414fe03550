"""What is published: the description's links are absolute, the metadata names the address, and the sdist has no experiments."""

from __future__ import annotations

import re

import pytest
from subprocesses import ROOT, load_tool

tomllib = load_tool("extras").tomllib
address = load_tool("address")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
HOST = "https://host.example/owner/remap"


def test_the_descriptions_links_lead_somewhere_from_an_index() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = address.absolute(readme, HOST, "1.2.3")
    targets = re.findall(r"\]\(([^()\s]+)\)", made)
    assert len(targets) == len(re.findall(r"\]\(([^()\s]+)\)", readme)) > 30
    assert [target for target in targets if not target.startswith("https://")] == []
    assert f"]({HOST}/blob/v1.2.3/docs/results.md)" in made
    assert (
        address.absolute("![a](docs/a.png) [`b[0]`](c.md)", HOST, "1")
        == f"![a]({HOST}/raw/v1/docs/a.png) [`b[0]`]({HOST}/blob/v1/c.md)"
    )
    assert re.sub(r"\]\(.*?\)", "", made) == re.sub(r"\]\(.*?\)", "", readme)


def test_the_metadata_names_the_address_and_the_license_by_its_spdx_name() -> None:
    before, after = (tomllib.loads(text)["project"] for text in (PYPROJECT, address.with_urls(PYPROJECT, HOST)))
    urls = after.pop("urls")
    assert after == before and {"Homepage", "Source", "Issues", "Documentation", "Changelog"} == set(urls)
    assert all(url.startswith(HOST) for url in urls.values())
    assert before["license"] == "Apache-2.0" and before["license-files"] == ["LICENSE"]
    assert not [one for one in before["classifiers"] if one.startswith("License ::")]  # it would say it twice
    with pytest.raises(SystemExit, match="already"):
        address.with_urls(address.with_urls(PYPROJECT, HOST), HOST)


def test_each_source_names_its_license() -> None:
    assert [str(path) for path in load_tool("spdx").lacking()] == [], "python tools/spdx.py"


def test_the_sdist_leaves_out_what_is_of_the_repository() -> None:
    left_out = set(tomllib.loads(PYPROJECT)["tool"]["scikit-build"]["sdist"]["exclude"])
    suites = {
        f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert {"bench", *suites} - {"tests/cpp", "tests/emulated_driver"} <= left_out
    cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    needed = set(re.findall(r"CMAKE_CURRENT_SOURCE_DIR\}/([\w/]*\w)", cmake))
    assert {"tests/cpp", "tests/emulated_driver"} < {each.removesuffix("/main") for each in needed}
    assert not [each for each in needed if any(each == one or each.startswith(f"{one}/") for one in left_out)]
