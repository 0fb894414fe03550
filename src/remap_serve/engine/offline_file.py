# SPDX-License-Identifier: Apache-2.0
"""The two files of an offline job, in JSON Lines: requests, and answers in the order in which they came. Pure: no torch.

    {"custom_id": "a", "prompt": [5, 9, 2], "max_tokens": 8}

    {"line": 1, "request": "9f3c0a1b2c4d5e6f", "custom_id": "a", "tokens": [7, 7, 3], "finish_reason": "stop"}
    {"line": 2, "request": "03bb2f61f0a8c9d4", "custom_id": null, "error": {"type": "InvalidArgument", "message": "..."}}

An answer names the line of the requests that it answers, and has that line's digest. So the file of answers alone says what
is still to do and to which requests it belongs: there is no header and no second file that could be lost. A run that ends
anywhere, also in the middle of a write, leaves whole lines and at most one that was cut off; the next run drops that one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remap.arguments import require_path
from remap.errors import Error, InvalidArgument, InvalidState
from remap_serve.engine.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["FIELDS", "AnswerFile", "AnswersNotWritten", "Job", "read_request"]

FIELDS = ("custom_id", "prompt", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids")
# Answers between two fsyncs. After a power failure at most this many are answered again.
GROUP = 32
# The beginning of every line of the answers: only a last line that does is one that was cut off.
START = b'{"line": '


class AnswersNotWritten(Error):
    """The disk is full, or failed: the run is over. Answers that were written before stay; the next run goes on after them.

    Fields: path, answered (lines of requests that have an answer in the file), total, code (errno).
    """


class Job(NamedTuple):
    """A line of the requests that has no answer yet. `error`: why it cannot be served; then only `custom_id` may be known."""

    line: int
    digest: int
    custom_id: str | None
    prompt: str | tuple[int, ...] = ()
    sampling: SamplingParams | None = None
    error: InvalidArgument | None = None


def read_request(
    text: bytes, stop_token_ids: Collection[int] = ()
) -> tuple[str, str | tuple[int, ...], SamplingParams]:
    """(custom_id, prompt, how to sample) of a line. stop_token_ids: of a request that names none.

    Raises InvalidArgument, with the field custom_id (None if that cannot be read), for a line that is not JSON, not an object, or
    has a field that is missing, unknown or of the wrong kind.
    """
    try:
        values = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _refused(None, f"the line is not JSON ({_short(str(error))})") from error
    if not isinstance(values, dict):
        raise _refused(None, f"the line must be a JSON object, not {_kind(values)}")
    id = values.get("custom_id")
    if not isinstance(id, str) or not id:
        raise _refused(None, f"custom_id must be a text that is not empty, not {_kind(id)}")
    if unknown := sorted(set(values) - set(FIELDS)):
        raise _refused(id, f"unknown field {_short(unknown[0])!r}; there are {', '.join(FIELDS)}")
    prompt = values.get("prompt")
    if not isinstance(prompt, str):
        prompt = _integers(id, "prompt", prompt, "a text or a list of token ids")
    given: dict[str, Any] = {}
    for name in ("max_tokens", "top_k", "seed"):
        if name in values:
            (given[name],) = _integers(id, name, [values[name]], "a whole number")
    for name in ("temperature", "top_p"):
        if name in values:
            given[name] = _number(id, name, values[name])
    stop = values.get("stop_token_ids", stop_token_ids)
    if "stop_token_ids" in values:
        stop = _integers(id, "stop_token_ids", stop, "a list of token ids")
    try:
        return id, prompt, SamplingParams(**given, stop_token_ids=frozenset(stop))
    except InvalidArgument as error:
        raise _refused(id, str(error)) from error


def _integers(id: str, name: str, values: Any, expected: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise _refused(id, f"{name} must be {expected}")
    return tuple(values)


def _number(id: str, name: str, value: Any) -> float:
    try:
        number = float(value) if type(value) in (int, float) else float("nan")
    except OverflowError:
        number = float("inf")
    if not abs(number) < float("inf"):
        raise _refused(id, f"{name} must be a finite number")
    return number


def _refused(id: str | None, why: str) -> InvalidArgument:
    return InvalidArgument(why, custom_id=id)


def _kind(value: Any) -> str:
    return "an empty text" if value == "" else "null or missing" if value is None else f"of type {type(value).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "..."


def _digest(text: bytes) -> int:
    """Of a line without its end. Never 0, which stands for a line without an answer."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") or 1


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1 on, text) of the lines that are not blank."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text.rstrip(b"\r\n")


class AnswerFile:
    """The answers to a file of requests, open for one run; use it in a `with` block.

    Memory: nine bytes for each line of the requests, and their ids. The file is locked until it is closed, or its process
    ends. total: lines of requests; answered: those that have an answer; errors: those whose answer is an error; resumed: those
    that had an answer when the file was opened.

    Raises InvalidArgument (field `field`) if one of the files cannot be opened or is not a regular file, if both are the same,
    if the answers belong to other requests, or if the file of answers has a line that is no answer; InvalidState if another
    run has it open. Then both files are as they were.
    """

    def __init__(self, requests: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        require_path("requests_path", requests)
        require_path("output_path", path)
        self.requests, self.path = Path(requests), Path(path)
        self.total = self.answered = self.errors = 0
        self._digests = array("Q")  # of the lines of the requests, 0 of a blank one
        self._unsynced = 0
        self._whole = True  # False while a line is being written, and for ever if that failed
        self._fd = -1
        asked = _regular(self.requests, "requests_path", lambda: os.stat(self.requests))
        for number, text in _lines(self.requests):
            self._digests.extend([0] * (number - 1 - len(self._digests)))
            self._digests.append(_digest(text))
            self.total += 1
        self._done = bytearray(len(self._digests))  # 1 for a line that has an answer
        try:
            _regular(self.path, "output_path", self._open)
            if os.path.samestat(asked, os.fstat(self._fd)):
                raise self._invalid(f"{self.path} is the file of requests itself")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InvalidState(
                    f"another run writes to {self.path}; nothing changed; wait for its end", path=str(self.path)
                ) from error
            os.ftruncate(self._fd, self._read_answers())
            with contextlib.suppress(
                OSError
            ):  # a folder that cannot be synced: a new file may vanish in a power failure
                _sync_folder(self.path.parent)
        except BaseException:
            if self._fd >= 0:
                os.close(self._fd)
            raise
        self.resumed = self.answered

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.sync()
            else:  # the run is over already, for another reason
                with contextlib.suppress(OSError):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def jobs(self, stop_token_ids: Collection[int] = ()) -> Iterator[Job]:
        """The lines that had no answer when the file was opened, in order, those that cannot be served included."""
        seen: set[str] = set()
        for number, text in _lines(self.requests):
            prompt: str | tuple[int, ...] = ()
            given: object = None
            sampling = refused = None
            try:
                given, prompt, sampling = read_request(text, stop_token_ids)
            except InvalidArgument as error:
                given, refused = error.fields["custom_id"], error
            id = given if isinstance(given, str) else None
            if id is not None:
                if refused is None and id in seen:
                    refused = _refused(id, f"custom_id {_short(id)!r} is that of an earlier line, too")
                seen.add(id)
            if number > len(self._done):  # it was appended since
                return
            if not self._done[number - 1]:
                yield Job(number, _digest(text), id, prompt, sampling, refused)

    def write(self, job: Job, **answer: Any) -> None:
        """Append the answer to `job` as a line. Raises AnswersNotWritten; then nothing more can be written."""
        record = {"line": job.line, "request": f"{job.digest:016x}", "custom_id": job.custom_id, **answer}
        left = json.dumps(record).encode() + b"\n"
        if not self._whole:
            raise InvalidState(f"a write to {self.path} failed; open it again", path=str(self.path))
        self._whole = False
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise self._not_written(error) from error
        self._whole = True
        self.answered += 1
        self.errors += "error" in answer
        self._unsynced += 1
        if self._unsynced >= GROUP:
            self.sync()

    def sync(self) -> None:
        """Return when every answer is on the disk. Raises AnswersNotWritten."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._whole = False
            self.answered -= self._unsynced  # these may be lost; the next run reads which are there
            raise self._not_written(error) from error
        self._unsynced = 0

    def _open(self) -> os.stat_result:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        return os.fstat(self._fd)

    def _read_answers(self) -> int:
        """Note who has an answer. Returns the bytes of all whole lines. Raises InvalidArgument for a line that is no answer to
        these requests."""
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for place, text in enumerate(file, 1):
                if not text.endswith(b"\n") and text.startswith(START[: len(text)]):
                    return end
                try:
                    answer = json.loads(text)
                    number, digest = int(answer["line"]), int(answer["request"], 16)
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                    raise self._invalid(f"line {place} of {self.path} is no answer of an offline run") from error
                if not 1 <= number <= len(self._digests) or digest != self._digests[number - 1]:
                    raise self._invalid(
                        f"{self.path} answers other requests: its line {place} is the answer to a line {number} that is "
                        f"another, or none, in {self.requests}"
                    )
                if self._done[number - 1]:
                    raise self._invalid(f"line {place} of {self.path} answers line {number} a second time")
                self._done[number - 1] = 1
                self.answered += 1
                self.errors += "error" in answer
                end += len(text)
        return end

    def _invalid(self, why: str) -> InvalidArgument:
        return InvalidArgument(
            f"{why}; nothing changed; give another file for the answers", field="output_path", value=str(self.path)
        )

    def _not_written(self, error: OSError) -> AnswersNotWritten:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        return AnswersNotWritten(
            f"{self.path} cannot be written further: {what}; {self.answered} of {self.total} requests are answered in it, and "
            "none of these is lost; the same call goes on from there",
            path=str(self.path),
            answered=self.answered,
            total=self.total,
            code=error.errno,
        )


def _regular(path: Path, field: str, look: Any) -> os.stat_result:
    """The status that `look` returns. Raises InvalidArgument unless it is of a regular file."""
    try:
        found: os.stat_result = look()
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be opened ({error.strerror}); nothing was served", field=field, value=str(path)
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{path} is not a regular file; nothing was served", field=field, value=str(path))
    return found


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
