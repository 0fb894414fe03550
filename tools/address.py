"""Write the repository's address into what is published: `python tools/address.py https://host/owner/name`.

The sources name no address: a clone or a fork has its own. Who publishes knows it (wheels.yml): this puts `[project.urls]` into
pyproject.toml, and makes the links of README.md, which is the long description, absolute. For a working tree that is
thrown away.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(
    r"(!?)(\[[^\[\]]*\]\()([^()\s]+)\)|(\]\()([^()\s]+)\)"
)  # a picture or a link; the end of one with brackets inside


def absolute(readme: str, address: str, version: str) -> str:
    """README.md with absolute links, to the files of that version."""

    def link(found: re.Match[str]) -> str:
        picture, target = found[1], found[3] or found[5]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        return f"{picture or ''}{found[2] or found[4]}{address}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return _LINK.sub(link, readme)


def with_urls(pyproject: str, address: str) -> str:
    """pyproject.toml with `[project.urls]`. Raises SystemExit if it has some."""
    if "\n[project.urls]\n" in pyproject:
        raise SystemExit("pyproject.toml has [project.urls] already; nothing was written")
    urls = {
        "Homepage": address,
        "Documentation": f"{address}/tree/main/docs",
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return pyproject.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n", 1)


def main() -> None:
    if len(sys.argv) != 2 or not re.fullmatch(r"https://[\w.-]+/[\w./-]+", sys.argv[1]):
        raise SystemExit(__doc__)
    address = sys.argv[1].rstrip("/")
    project, readme = ROOT / "pyproject.toml", ROOT / "README.md"
    text = project.read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.*)"$', text, re.MULTILINE)
    project.write_text(with_urls(text, address), encoding="utf-8")
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), address, version), encoding="utf-8")


if __name__ == "__main__":
    main()
