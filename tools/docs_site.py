"""MkDocs' hook for `make docs`: pages of the site that lie outside of docs/, and links from page to page.

The pages are read on GitHub as well, so their links are those of the repository. Here a link to a page of the site leads there,
and one to another file to the repository (`repo_url` in mkdocs.yml); as long as that has no address, its text alone stays.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# name in the site -> file
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "cpp.md": "examples/cpp/README.md",
}
# Those that lie in docs/ have their name there.
PAGES = {path.relative_to(ROOT / "docs").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^()\s]+)\)")
_PICTURE = re.compile(r"!\[([^\[\]]*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def rewritten(text: str, source: str, repository: str = "") -> str:
    """The page with links as the site has them. source: its file, from the root. Raises ValueError for a link to a file that is
    not there."""
    site = {file: name for name, file in ELSEWHERE.items()}
    site.update({path.relative_to(ROOT).as_posix(): name for name, path in PAGES.items()})
    here = os.path.dirname(site.get(source, source.removeprefix("docs/")))

    def link(found: re.Match[str]) -> str:
        shown, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        file = os.path.relpath((ROOT / source).parent / path, ROOT)
        if not (ROOT / file).exists():
            raise ValueError(f"{source} links to {target}, which is not there")
        if file in site:
            return f"[{shown}]({os.path.relpath(site[file], here)}{mark}{anchor})"
        return f"[{shown}]({repository.rstrip('/')}/blob/main/{file}{mark}{anchor})" if repository else shown

    def picture(found: re.Match[str]) -> str:
        file = os.path.relpath((ROOT / source).parent / found[2], ROOT)
        return f"![{found[1]}]({os.path.relpath(file.removeprefix('docs/'), here)})"

    parts = _FENCE.split(text)
    return "".join(
        part if number % 2 else _PICTURE.sub(picture, _LINK.sub(link, part)) for number, part in enumerate(parts)
    )


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for name, file in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / file).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    source = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return rewritten(markdown, source, config.repo_url or "")
