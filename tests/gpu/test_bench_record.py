"""What a run of the GPU suite leaves on disk: whole at any moment, and enough to go on from."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.gpu import processes, results
from bench.gpu.record import ARCHIVE, DOCUMENT, MEMBER_BYTES, Record, Unusable
from conftest import ROOT, bench_command, emulated_environment, results_in

ORIGIN = {"device": "a GPU", "sources": "1"}
FIGURE = results.figure("speed", 2.5, "GB/s", [0.001, 0.002], target=2.0, at_least=True, more="detail")


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """One with a part of each outcome."""
    made = Record(tmp_path / "out", tmp_path / "logs", emulated=False)
    made.facts = {"name": "a-gpu", "device": "a GPU"}
    made.calls["measure"] = {"runs": 1, "state": "running"}
    for name in ("fine", "bad", "at it"):
        made.begin(name, "measure", "measure", ORIGIN)
        made.add(name, FIGURE)
    made.end("fine", "ok", 1.5)
    made.end("bad", "failed", 0.5, "ValueError: no", traceback="line 1\nline 2")
    made.skip("left out", "measure", "measure", "time: none was left")
    made.begin("build", "measure", "step", ORIGIN)
    made.end("build", "ok", 9.0, "with 2 jobs", detail={"jobs": 2})
    made.problem("driver", "measure", "there is none")
    return made


def _again(record: Record, *, emulated: bool = False) -> Record:
    made = Record(record.folder, record.logs, emulated=emulated)
    made.load(record.folder / DOCUMENT)
    return made


def _until(holds: Callable[[], object]) -> None:
    give_up = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_what_is_read_back_is_what_was_written(record: Record) -> None:
    record.save()
    document = results_in(record.folder)
    assert [entry["measure"] for entry in document["results"]] == ["fine", "bad", "at it"]
    assert document["results"][0]["detail"] == {"more": "detail"}
    assert [tuple(each.values()) for each in document["errors"]] == [
        ("bad", "ValueError: no"),
        ("driver", "there is none"),
    ]
    assert document["skipped"] == [{"what": "left out", "why": "time: none was left"}]
    assert [(step["name"], step["ok"]) for step in document["steps"]] == [("build", True)]
    assert document["measure_seconds"] == {"fine": 1.5}
    loaded = _again(record)
    expected = {name: part for name, part in record.parts.items() if part.kind != "problem"}
    assert list(loaded.parts) == list(expected)
    expected["at it"].state = "cut off"  # its process is no more
    assert loaded.parts == expected
    assert (loaded.calls, loaded.facts) == (record.calls, record.facts)
    # Kept is what has finished on the same origin.
    assert [name for name in loaded.parts if loaded.kept(name, ORIGIN)] == ["fine", "bad", "build"]
    assert not any(loaded.kept(name, {**ORIGIN, "sources": "2"}) for name in loaded.parts)
    assert not loaded.kept("never seen", ORIGIN)


def test_a_part_that_runs_again_forgets_and_one_that_is_skipped_keeps(record: Record) -> None:
    record.begin("fine", "measure", "measure", ORIGIN)
    assert (record.parts["fine"].figures, record.parts["fine"].state) == ([], "running")
    record.skip("at it", "measure", "measure", "time")
    assert (record.parts["at it"].figures, record.parts["at it"].state) == ([FIGURE], "skipped")


def test_results_that_cannot_be_gone_on_from_are_refused(record: Record) -> None:
    record.save()
    with pytest.raises(Unusable, match="results of a GPU"):
        _again(record, emulated=True)
    for text in ("", "{", "[]", '{"schema": 1}', '{"schema": 2, "emulated": false, "parts": [{"name": 3}]}'):
        (record.folder / DOCUMENT).write_text(text)
        with pytest.raises(Unusable, match=r"another --out|schema"):
            _again(record)


def test_the_archive_holds_the_logs_and_of_long_ones_the_end(record: Record) -> None:
    (record.logs / "deep").mkdir(parents=True)
    (record.logs / "short.log").write_text("all of it")
    (record.logs / "deep" / "long.log").write_bytes(b"a" * MEMBER_BYTES + b"the end")

    def saved() -> int:
        record.save()
        return (record.folder / ARCHIVE).stat().st_ino

    before = saved()
    with tarfile.open(record.folder / ARCHIVE) as archive:
        assert sorted(archive.getnames()) == ["logs/deep/long.log", "logs/short.log"]
        long = archive.extractfile("logs/deep/long.log")
        assert long is not None
        data = long.read()
    assert (len(data), data[-8:]) == (MEMBER_BYTES, b"athe end")
    assert saved() == before  # nothing new to say
    (record.logs / "short.log").write_text("more of it")
    assert saved() != before


def test_it_is_saved_while_something_takes_long_and_never_seen_half(record: Record) -> None:
    with record.saved_regularly(every_s=0.001):
        record.begin("new", "measure", "measure", ORIGIN)
        _until(lambda: "new" in {part["name"] for part in results_in(record.folder)["parts"]})
        for _ in range(200):
            record.add("fine", FIGURE)
            results_in(record.folder)
            with tarfile.open(record.folder / ARCHIVE) as archive:
                archive.getnames()
    assert sorted(path.name for path in record.folder.iterdir()) == [DOCUMENT, ARCHIVE]


# -- processes that are killed ----------------------------------------------------------------------------------------


def _running(marker: str) -> list[str]:
    """Command lines of this machine's processes that name `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if marker in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def test_an_exit_status_comes_through_the_keeper(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for code, expected in (("import sys; sys.exit(7)", 7), ("import os; os.abort()", -signal.SIGABRT), ("print(5)", 0)):
        status, _ = processes.run_limited([sys.executable, "-c", code], seconds=60, environment=os.environ, log=log)
        assert status == expected
    assert log.read_text().strip() == "5"
    status, _ = processes.run_limited([str(tmp_path / "none")], seconds=60, environment=os.environ, log=log)
    assert status == 127
    status, _ = processes.run_limited(["sleep", "600"], seconds=1, environment=os.environ, log=log)
    assert status is None


def test_a_run_that_is_killed_at_any_moment_goes_on_where_it_was(emulated_gpu: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = ["driver calls", "link", "growth", "prefetch"]
    command = bench_command("measure", "--emulated", "--quick", "--out", out, *(f"--only={name}" for name in names))
    environment = emulated_environment()
    rng = random.Random(int.from_bytes(os.urandom(4), "little"))
    finished: dict[str, str] = {}  # name -> when

    def look() -> None:
        if not (out / DOCUMENT).exists():
            assert not finished
            return
        document = results_in(out)
        with tarfile.open(out / ARCHIVE) as archive:
            archive.getnames()
        now = {part["name"]: part["ended"] for part in document["parts"] if part["state"] == "ok"}
        assert finished.items() <= now.items()  # nothing was lost, and nothing run again
        assert set(now) <= {entry["measure"] for entry in document["results"]}
        finished.update(now)

    delays = [rng.uniform(0.1, 4.0) for _ in range(3)]
    for delay in delays:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
        time.sleep(delay)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        look()
        _until(lambda: not _running(str(out)))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (delays, done.stdout + done.stderr)
    kept = dict(finished)
    look()
    assert set(finished) == set(names)
    assert sorted(name for name in names if f"measure: {name}: kept" in done.stdout) == sorted(kept)


def test_a_run_that_is_told_to_end_says_what_it_was_at(emulated_gpu: Any, tmp_path: Path) -> None:
    """SIGTERM: nothing goes on running, and what was found is written."""
    command = bench_command(
        "build-and-check", "--emulated", "--out", tmp_path, "--only", "tests/gpu/test_gpu_session.py"
    )
    run = subprocess.Popen(command, cwd=ROOT, env=emulated_environment(), stdout=subprocess.DEVNULL)
    _until(lambda: run.poll() is not None or any("--junitxml" in line for line in _running(str(tmp_path))))
    run.terminate()
    assert run.wait(60) == 128 + signal.SIGTERM
    _until(lambda: not _running(str(tmp_path)))
    states = {part["name"]: part["state"] for part in results_in(tmp_path)["parts"]}
    assert states == {"tests/gpu/test_gpu_session.py": "running"}
