"""What a run has found so far, on disk: results.json, and results.tar.gz with the logs.

Both are written at least every ten seconds and whenever a part ends, each under another name first and then renamed: a process
that is killed leaves what it had, whole. A later run reads results.json and goes on from there.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .results import Figure

__all__ = ["ARCHIVE", "DOCUMENT", "Part", "Record", "Unusable"]

SCHEMA = 2
DOCUMENT, ARCHIVE = "results.json", "results.tar.gz"
EVERY_S = 8.0
MEMBER_BYTES = 1 << 20  # of a longer log the end is kept
FINISHED = ("ok", "failed")


class Unusable(Exception):
    """results.json cannot be gone on from. Its text says why."""


@dataclass
class Part:
    """One thing that a call does: a step (build, a file of tests), a measure, or a problem that kept others from running.

    state: "running" (in the file of a process that was killed: it was at this), "ok", "failed", "skipped" or "cut off" (running
    when an earlier run was killed). summary: of a step what came out, else why it failed or was skipped, or why a measure that
    is ok has left out some of its figures. origin: what it was run on; a part is kept by a later run with the same origin.
    """

    name: str
    call: str
    kind: str
    state: str = "running"
    seconds: float = 0.0
    ended: str = ""  # UTC
    summary: str = ""
    traceback: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    @property
    def left_out(self) -> bool:
        """Whether all of it or some of its figures were left out; the summary says why."""
        return self.state == "skipped" or (self.kind == "measure" and self.state == "ok" and self.summary != "")


class Record:
    """The parts of all calls, in the order in which they were begun. `logs`: the folder whose files the archive holds.

    Calls may come from any thread. facts: what else belongs into results.json (machine, packages, ...). It and `calls` are
    changed with `lock` held, since a thread of its own may be writing them down.
    """

    def __init__(self, folder: Path, logs: Path, *, emulated: bool) -> None:
        self.folder, self.logs, self.emulated = folder, logs, emulated
        self.parts: dict[str, Part] = {}
        self.calls: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self.lock = threading.RLock()
        self._archived: object = None

    # -- parts -----------------------------------------------------------------------------------------------------

    def begin(self, name: str, call: str, kind: str, origin: Mapping[str, Any]) -> None:
        """It runs from now on. What an earlier run found of it is forgotten."""
        with self.lock:
            self.parts.pop(name, None)
            self.parts[name] = Part(name, call, kind, origin=dict(origin))

    def add(self, name: str, figure: Figure) -> None:
        """A figure that stays, whatever becomes of its part."""
        with self.lock:
            self.parts[name].figures.append(figure)

    def end(self, name: str, state: str, seconds: float, summary: str = "", **more: Any) -> None:
        """It has ended. more: detail, traceback."""
        with self.lock:
            part = self.parts[name]
            part.state, part.seconds, part.summary = state, seconds, summary
            part.ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            for key, value in more.items():
                setattr(part, key, value)

    def skip(self, name: str, call: str, kind: str, why: str) -> None:
        """It was left out; the next run tries it again. Figures that there are already stay."""
        with self.lock:
            known = self.parts.pop(name, None) or Part(name, call, kind)
            self.parts[name] = replace(known, state="skipped", seconds=0.0, summary=why, traceback=None)

    def problem(self, name: str, call: str, why: str) -> None:
        """Something that is no part and keeps parts from running. The next run forgets it."""
        with self.lock:
            self.parts[name] = Part(name, call, "problem", "failed", summary=why)

    def kept(self, name: str, origin: Mapping[str, Any]) -> bool:
        """Whether an earlier run has finished it on the same origin."""
        part = self.parts.get(name)
        return part is not None and part.state in FINISHED and part.origin == dict(origin)

    # -- on disk ---------------------------------------------------------------------------------------------------

    def load(self, path: Path) -> None:
        """Go on from this results.json. Raises Unusable if it is none, or of the other driver (emulated or not)."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if given["schema"] != SCHEMA:
                raise Unusable(f"{path} has schema {given['schema']}, expected {SCHEMA}")
            if given["emulated"] != self.emulated:
                ran = "the emulated driver" if given["emulated"] else "a GPU"
                raise Unusable(f"{path} holds results of {ran}: give another --out")
            parts = {entry["name"]: Part(**entry) for entry in given["parts"]}
            for entry in given["results"]:
                parts[entry["measure"]].figures.append(Figure.from_json(entry))
            calls, facts = dict(given["calls"]), {key: given[key] for key in given["facts"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unusable(f"{path} cannot be read ({type(error).__name__}: {error}): give another --out") from error
        for part in parts.values():
            if part.state == "running":
                part.state = "cut off"
        self.parts = {name: part for name, part in parts.items() if part.kind != "problem"}
        self.calls, self.facts = calls, facts

    def document(self) -> dict[str, Any]:
        """results.json."""
        with self.lock:
            parts = list(self.parts.values())
            steps = [each for each in parts if each.kind == "step" and each.state != "skipped"]
            failed = [each for each in parts if each.kind != "step" and each.state == "failed"]
            return {
                "schema": SCHEMA,
                "emulated": self.emulated,
                **self.facts,
                "facts": list(self.facts),
                "calls": {name: dict(call) for name, call in self.calls.items()},
                "results": [
                    {"measure": part.name, **each.to_json(emulated=self.emulated)}
                    for part in parts
                    for each in part.figures
                ],
                "errors": [{"what": each.name, "error": each.summary} for each in failed],
                "skipped": [{"what": each.name, "why": each.summary} for each in parts if each.left_out],
                "steps": [
                    {"name": each.name, "ok": each.state == "ok", "seconds": each.seconds, "summary": each.summary}
                    for each in steps
                ],
                "measure_seconds": {
                    each.name: each.seconds for each in parts if each.kind == "measure" and each.state == "ok"
                },
                "parts": [_without_figures(each) for each in parts],
            }

    def save(self) -> None:
        """Write both files. Raises OSError."""
        with self.lock:
            text = json.dumps(self.document(), indent=1) + "\n"
            self.folder.mkdir(parents=True, exist_ok=True)
            self._archive()  # first: whoever sees the document finds the archive
            _replace(self.folder / DOCUMENT, text.encode())

    def _archive(self) -> None:
        """All logs, if any of them has changed."""
        files = sorted(path for path in self.logs.rglob("*") if path.is_file()) if self.logs.is_dir() else []
        state = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        target = self.folder / ARCHIVE
        if state == self._archived and target.exists():
            return
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as archive:
            for path in files:
                data = _end_of(path)
                member = tarfile.TarInfo(f"logs/{path.relative_to(self.logs)}")
                member.size, member.mtime = len(data), int(path.stat().st_mtime)
                archive.addfile(member, io.BytesIO(data))
        _replace(target, buffer.getvalue())
        self._archived = state

    @contextmanager
    def saved_regularly(self, every_s: float = EVERY_S) -> Iterator[None]:
        """Saves at once, every so many seconds, and at the end."""
        self.save()
        over = threading.Event()

        def keep() -> None:
            while not over.wait(every_s):
                try:
                    self.save()
                except OSError as error:  # a full disk, say: later may be better, and the last save tells
                    print(f"{self.folder / DOCUMENT} could not be written: {error}", flush=True)

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.save()


def _without_figures(part: Part) -> dict[str, Any]:
    """They stand under `results`."""
    entry = {key: value for key, value in vars(part).items() if key != "figures"}
    return {**entry, "detail": dict(part.detail), "origin": dict(part.origin)}


def _replace(target: Path, data: bytes) -> None:
    new = target.with_name(target.name + ".new")
    new.write_bytes(data)
    os.replace(new, target)


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MEMBER_BYTES))
        return file.read(MEMBER_BYTES)
