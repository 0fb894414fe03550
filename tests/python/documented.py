"""What the pages tell a reader to type: commands, options, and Python, each with the page and line where it stands.

A block of commands is marked `sh`, and every line of it is a command. In a sentence code is a command if it has several
words and begins with a program's name (`PROGRAMS`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / name
        for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", ".github/PULL_REQUEST_TEMPLATE.md")
    ),
    *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/notes/0.1.0.md"}),  # history: much of it has gone
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "bench/results").rglob("*.md")),
)
MAKEFILE = ROOT / "Makefile"
PROGRAMS = ("remap", "python", "pip", "make", "vllm", "ray", "cmake", "bench/gpu/run.sh")
_SETTING = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Code:
    """Text of a page. kind: the language of its block, or "" in a sentence."""

    page: str
    line: int
    text: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Command:
    """A command without its comment. whole: it stands in a block, with all that it needs. variables: set before it."""

    place: str
    words: tuple[str, ...]
    whole: bool = True
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def blocks(page: Path) -> Iterator[Code]:
    """The page's fenced blocks."""
    name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Code(name, text[: found.start(2)].count("\n") + 1, found[2], found[1] or "no language")


def inline(page: Path) -> Iterator[Code]:
    """Code in the page's sentences, each on one line however the page breaks it."""
    name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    for found in re.finditer(r"`([^`]+)`", prose):
        yield Code(name, prose[: found.start()].count("\n") + 1, " ".join(found[1].split()))


def commands_of(text: str, place: str, whole: bool = True) -> Iterator[Command]:
    """The commands of one line, which `&&` joins."""
    words = shlex.split(text, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        given, words = words[:end], words[end + 1 :]
        count = next((i for i, word in enumerate(given) if not _SETTING.match(word)), len(given))
        variables = tuple((name, value) for name, _, value in (word.partition("=") for word in given[:count]))
        yield Command(place, tuple(given[count:]), whole, variables)


def commands() -> Iterator[Command]:
    """Every command of the pages and of `make help`, each once; those that stand in blocks first."""
    seen: dict[tuple[str, ...], Command] = {}
    for found in (*_in_blocks(), *_of_make_help(), *_in_sentences()):
        seen.setdefault(found.words, found)
    yield from seen.values()


def _in_blocks() -> Iterator[Command]:
    for page in PAGES:
        for block in blocks(page):
            text, first = "", 0
            for number, line in enumerate(block.text.split("\n") if block.kind == "sh" else ()):
                first, text = (first, text + line) if text else (number, line)
                if text.endswith("\\"):  # it goes on in the next line
                    text = text[:-1]
                    continue
                yield from commands_of(text, f"{block.page}:{block.line + first}")
                text = ""


def _in_sentences() -> Iterator[Command]:
    for page in PAGES:
        for code in inline(page):
            first = code.text.split()
            while first and _SETTING.match(first[0]):
                first = first[1:]
            if len(first) > 1 and first[0] in PROGRAMS:
                yield from commands_of(code.text, f"{code.page}:{code.line}", whole=False)


def _of_make_help() -> Iterator[Command]:
    """`make help` names a target, and its variables in parentheses; sometimes a second target."""
    for number, line in enumerate(MAKEFILE.read_text(encoding="utf-8").splitlines(), 1):
        if said := re.search(r"@echo '(.*)'$", line):
            variables = " ".join(re.findall(r'[A-Z_]+=(?:"[^"]*"|[^\s;,)"]+)', said[1]))
            for target in re.findall(r"make ([\w-]+)", said[1]):
                yield from commands_of(f"make {target} {variables}", f"{MAKEFILE.name}:{number}")
