"""Offline jobs: every line is answered once, whatever is in it and wherever runs end. With an engine that computes nothing.

The model that everything is compared with: a dict from the number of each line to its answer, made by `expected`, which
reads the file at once and knows no resuming.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
from types import SimpleNamespace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap_serve.engine import Output, generate_offline, offline_file
from remap_serve.engine.offline_file import FIELDS, GROUP, AnswerFile, AnswersNotWritten, read_request

LONGEST = 40
EOS = 3


class Engine:
    """Answers requests in an order that a seed decides. `stuck`: an id that no blocks suffice for; `fail_at`: the step that
    raises KeyboardInterrupt."""

    def __init__(self, seed=0, *, most=3, stuck=None, fail_at=None):
        self.scheduler = SimpleNamespace(max_num_seqs=most)
        self.metrics = SimpleNamespace(timeline=[])
        self.rng = random.Random(seed)
        self.live = {}
        self.stuck, self.fail_at = stuck, fail_at
        self.steps = self.resets = self.served = self.most_live = 0

    @property
    def unfinished(self):
        return len(self.live)

    def reset_metrics(self):
        self.metrics.timeline.clear()
        self.resets += 1

    def add_request(self, request):
        assert request.id not in self.live
        if request.max_kv_tokens > LONGEST:
            raise InvalidArgument(f"request {request.id!r} is too long", needed=request.max_kv_tokens, limit=LONGEST)
        self.live[request.id] = request
        self.most_live = max(self.most_live, len(self.live))

    def abort(self, id):
        if id not in self.live:
            raise InvalidArgument("unknown")
        del self.live[id]

    def step(self):
        self.steps += 1
        if self.steps == self.fail_at:
            raise KeyboardInterrupt
        self.metrics.timeline.append(self.steps)
        if self.stuck in self.live:
            raise OutOfBlocks("too few blocks", request=self.stuck)
        ended = self.rng.sample(sorted(self.live), self.rng.randint(0, min(3, len(self.live))))
        self.served += len(ended)
        return SimpleNamespace(finished=[Output(id, tokens_for(self.live.pop(id)), "length", 0) for id in ended])


def tokens_for(request):
    return tuple(sum(request.prompt) * (step + 1) % 97 for step in range(request.sampling.max_tokens))


class Words:
    """A tokenizer: a token is the length of a word."""

    eos_token_id = EOS

    def encode(self, text):
        return [len(word) for word in text.split()]

    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return " ".join("x" * token for token in token_ids)


def expected(text):
    """Line -> (custom_id, tokens or None for an error)."""
    found, seen = {}, set()
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            id, prompt, sampling = read_request(line.rstrip(b"\r"))
        except InvalidArgument as error:
            found[number] = (error.custom_id, None)
            seen.add(error.custom_id)
            continue
        wrong = id in seen or not prompt or isinstance(prompt, str) or len(prompt) + sampling.max_tokens - 1 > LONGEST
        seen.add(id)
        answer = None if wrong else tokens_for(SimpleNamespace(prompt=prompt, sampling=sampling))
        found[number] = (id, answer)
    return found


def answers(path):
    """Line -> (custom_id, tokens or None), of a file that must have each answer once, and whole lines only."""
    found = {}
    text = path.read_bytes()
    assert text.endswith(b"\n") or not text
    for line in text.splitlines():
        answer = json.loads(line)
        assert answer["line"] not in found
        tokens = answer.get("tokens")
        assert ("error" in answer) == (tokens is None) == ("finish_reason" not in answer)
        if "error" in answer:
            assert set(answer["error"]) == {"type", "message"} and answer["error"]["message"]
        found[answer["line"]] = (answer["custom_id"], None if tokens is None else tuple(tokens))
    return found


def line(id, prompt=(1, 2), **more):
    return json.dumps({"custom_id": id, "prompt": list(prompt), **more}).encode()


# Every kind of line: those that can be served, blank ones, and those that cannot be served.
LINES = st.one_of(
    st.builds(
        lambda id, prompt, count: line(f"r{id}", prompt, max_tokens=count),
        st.integers(0, 30),
        st.lists(st.integers(0, 96), min_size=1, max_size=6),
        st.integers(1, 5),
    ),
    st.sampled_from([
        b"", b"  ", b"{", b"null", b"[1]", b"\xff\xfe", b'{"custom_id": "r1"}', b'{"prompt": [1]}', b"{}\r", b"[" * 5000,
        line("long", range(50)), line("r2", unknown=1), line("r3", [1, True]), line("r4", []), line("r5", max_tokens=0),
        json.dumps({"custom_id": "text", "prompt": "some words"}).encode(),
    ]),
)  # fmt: skip
FIXED = b"\n".join([
    line("a", max_tokens=3), b"{broken", b"", line("b", [5]), line("a"), line("c", range(50)), line("d", [4, 4], max_tokens=2),
    line("é", nonsense=1), line("e"),
])  # fmt: skip


@pytest.fixture
def job(tmp_path):
    """(requests, answers), of FIXED."""
    (tmp_path / "in.jsonl").write_bytes(FIXED)
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(LINES, max_size=30), st.integers(0, 9), st.lists(st.integers(1, 9), max_size=3), st.booleans())
def test_every_line_is_answered_once_across_interrupted_runs(tmp_path_factory, lines, seed, interrupts, ended):
    folder = tmp_path_factory.mktemp("job")
    requests, output = folder / "in.jsonl", folder / "out.jsonl"
    requests.write_bytes(b"\n".join(lines) + (b"\n" if ended else b""))
    served = 0
    for fail_at in (*interrupts, None):
        engine = Engine(seed, fail_at=fail_at)
        with contextlib.suppress(KeyboardInterrupt):
            done = generate_offline(engine, requests, output)
        assert not engine.unfinished and engine.most_live <= 6
        served += engine.served
    wanted = expected(requests.read_bytes())
    assert answers(output) == wanted
    assert served == sum(tokens is not None for _, tokens in wanted.values())  # nothing was computed twice
    assert (done.total, done.answered) == (len(wanted), len(wanted))
    assert done.errors == sum(tokens is None for _, tokens in wanted.values())


def test_a_run_that_ends_after_any_byte_is_gone_on_with(job, monkeypatch):
    monkeypatch.setattr(offline_file.os, "fsync", lambda fd: None)  # a thousand times
    requests, output = job
    generate_offline(Engine(1), requests, output)
    whole, wanted = output.read_bytes(), expected(FIXED)
    assert answers(output) == wanted
    for end in range(len(whole) + 1):
        output.write_bytes(whole[:end])
        kept = whole[: whole.rfind(b"\n", 0, end) + 1]
        engine = Engine(2)
        done = generate_offline(engine, requests, output)
        assert output.read_bytes().startswith(kept)
        assert answers(output) == wanted
        assert done.resumed == kept.count(b"\n")
        assert engine.served == done.tokens == 0 or done.resumed < len(wanted)


def test_a_disk_that_is_full_after_any_byte_loses_nothing(job, monkeypatch):
    """A write takes what there is room for, and the next one fails, as on a real disk."""
    monkeypatch.setattr(offline_file.os, "fsync", lambda fd: None)
    requests, output = job
    generate_offline(Engine(1), requests, output)
    size, wanted = output.stat().st_size, expected(FIXED)
    real = os.write
    for room in range(size):
        output.unlink()
        left = room

        def write(fd, data):
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = real(fd, data[:left])
            left -= written
            return written

        monkeypatch.setattr(offline_file.os, "write", write)
        engine = Engine(1)
        with pytest.raises(AnswersNotWritten, match=r"the disk is full.*none of these is lost") as caught:
            generate_offline(engine, requests, output)
        monkeypatch.setattr(offline_file.os, "write", real)
        whole = output.read_bytes().count(b"\n")
        assert (caught.value.answered, caught.value.total, caught.value.code) == (whole, len(wanted), errno.ENOSPC)
        assert not engine.unfinished
        done = generate_offline(Engine(3), requests, output)
        assert (done.resumed, answers(output)) == (whole, wanted)


def test_a_sync_that_fails_ends_the_run(tmp_path, monkeypatch):
    requests, output = tmp_path / "in", tmp_path / "out"
    requests.write_bytes(b"\n".join(line(f"r{index}") for index in range(2 * GROUP)))
    calls = []

    def fsync(fd):
        calls.append(fd)
        if len(calls) == 3:  # the folder's, that of the first group, that of the second
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(offline_file.os, "fsync", fsync)
    with pytest.raises(AnswersNotWritten) as caught:
        generate_offline(Engine(), requests, output)
    assert (caught.value.answered, caught.value.total, caught.value.code) == (GROUP, 2 * GROUP, errno.EIO)
    assert generate_offline(Engine(), requests, output).answered == 2 * GROUP


def test_nothing_is_written_after_a_write_that_failed(job, monkeypatch):
    """Else a line that was cut off would stand in the middle of the file."""
    with AnswerFile(*job) as file:
        first, second = list(file.jobs())[:2]
        with monkeypatch.context() as patch, pytest.raises(AnswersNotWritten):
            patch.setattr(offline_file.os, "write", lambda fd, data: _raise(OSError(errno.EDQUOT, "quota")))
            file.write(first, tokens=[1])
        with pytest.raises(InvalidState):
            file.write(second, tokens=[1])
        assert file.answered == 0


def test_answers_of_other_requests_are_refused_and_stay(job):
    requests, output = job
    generate_offline(Engine(), requests, output)
    before = output.read_bytes()
    for text in (FIXED.replace(b"[5]", b"[6]"), FIXED[: FIXED.rfind(b"\n")], b"", b"\n" + FIXED):
        requests.write_bytes(text)
        with pytest.raises(
            InvalidArgument, match=r"out\.jsonl answers other requests: its line \d+ is the answer to a line"
        ) as caught:
            generate_offline(Engine(), requests, output)
        assert (caught.value.field, output.read_bytes()) == ("output_path", before)
    # Lines may be appended, and other line ends are no other request.
    requests.write_bytes(FIXED.replace(b"\n", b"\r\n") + b"\r\n" + line("new"))
    assert generate_offline(Engine(), requests, output).resumed == len(expected(FIXED))
    assert answers(output) == expected(requests.read_bytes())


def test_an_id_of_a_line_that_an_earlier_run_answered_is_taken(job):
    requests, output = job
    requests.write_bytes(line("a") + b"\n")
    generate_offline(Engine(), requests, output)
    requests.write_bytes(line("a") + b"\n" + line("a"))
    generate_offline(Engine(), requests, output)
    assert [tokens is None for _, tokens in answers(output).values()] == [False, True]


def test_lines_that_are_appended_during_a_run_are_for_the_next(job):
    requests, _ = job
    with AnswerFile(*job) as file, requests.open("ab") as more:
        more.write(b"\n" + line("late"))
        more.flush()
        assert [each.line for each in file.jobs()] == list(expected(FIXED))
    assert generate_offline(Engine(), *job).total == len(expected(FIXED)) + 1


@pytest.mark.parametrize(
    "text",
    [
        *(b"notes", b"notes\n", b"{", b'{"a": 1}\n', b"[1]\n", b"5\n", b'"x"\n', b"\n", b'{"line": 1}\n', b"\0\0\0"),
        *(b'{"line": 1, "request": 5}\n', b'{"line": 1e999, "request": "5"}\n', b'{"line": 9e15, "request": "5"}\n'),
    ],
)
def test_a_file_that_holds_something_else_is_refused_and_stays(job, text):
    requests, output = job
    output.write_bytes(text)
    if b'{"line": '.startswith(text):  # the first byte of an answer, and nothing else
        generate_offline(Engine(), requests, output)
        return
    with pytest.raises(InvalidArgument) as caught:
        generate_offline(Engine(), requests, output)
    assert (caught.value.field, output.read_bytes()) == ("output_path", text)


def test_an_answer_that_stands_there_twice_is_refused(job):
    requests, output = job
    generate_offline(Engine(), requests, output)
    output.write_bytes(output.read_bytes() * 2)
    with pytest.raises(InvalidArgument, match="a second time"):
        generate_offline(Engine(), requests, output)


def test_files_that_cannot_be_used_are_refused_by_their_field(job, tmp_path):
    requests, output = job
    os.mkfifo(tmp_path / "pipe")
    for asked, told, field in (
        (tmp_path / "none", output, "requests_path"),
        (tmp_path, output, "requests_path"),
        (tmp_path / "pipe", output, "requests_path"),
        (requests, requests, "output_path"),
        (requests, tmp_path, "output_path"),
        (requests, tmp_path / "none" / "out", "output_path"),
        (requests, tmp_path / "pipe", "output_path"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            generate_offline(Engine(), asked, told)
        assert caught.value.field == field
    assert requests.read_bytes() == FIXED and not output.exists()


def _hold(paths, ready, end):
    with AnswerFile(*paths):
        ready.set()
        end.wait(60)


def test_a_second_run_is_refused_until_the_process_of_the_first_is_gone(job):
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(job, ready, end))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(InvalidState, match="another run writes to"):
        generate_offline(Engine(), *job)
    assert job[1].read_bytes() == b""
    holder.kill()
    holder.join(60)
    assert generate_offline(Engine(), *job).answered == len(expected(FIXED))


def test_an_engine_with_requests_of_its_own_is_refused(job):
    engine = Engine()
    engine.live["mine"] = None
    with pytest.raises(InvalidState) as caught:
        generate_offline(engine, *job)
    assert caught.value.unfinished == 1 and not job[1].exists()


def test_a_request_that_no_blocks_suffice_for_is_answered_with_that_and_the_others_are_served(job):
    done = generate_offline(Engine(stuck="d"), *job)
    found = answers(job[1])
    assert found.pop(7) == ("d", None) and '"type": "OutOfBlocks"' in job[1].read_text()
    wanted = expected(FIXED)
    del wanted[7]
    assert found == wanted and done.answered == len(wanted) + 1


def test_what_the_engine_raises_passes_through(job, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(engine, "step", lambda: _raise(OutOfBlocks("of nobody")))
    with pytest.raises(OutOfBlocks):
        generate_offline(engine, *job)
    assert not engine.unfinished
    assert generate_offline(Engine(), *job).answered == len(expected(FIXED))


def _raise(error):
    raise error


def test_progress_is_told_from_the_first_look_on_and_metrics_do_not_grow(job, monkeypatch):
    monkeypatch.setattr("remap_serve.engine.offline.MOST_STEPS_MEASURED", 2)
    seen, engine = [], Engine()
    done = generate_offline(engine, *job, on_progress=seen.append)
    assert (seen[0].answered, seen[0].total, seen[-1]) == (0, 8, done)
    assert [one.answered for one in seen] == sorted(one.answered for one in seen)
    assert (done.errors, done.resumed, done.tokens) == (4, 0, 3 + 16 + 2 + 16)
    assert engine.resets > 1 and len(engine.metrics.timeline) < 2


def test_texts_are_tokenized_and_answered_as_texts(tmp_path):
    requests, output = tmp_path / "in", tmp_path / "out"
    texts = ["one three fifteen", "", "\ud800 alone"]
    lines = [json.dumps({"custom_id": str(index), "prompt": text, "max_tokens": 2}) for index, text in enumerate(texts)]
    requests.write_text("\n".join([*lines, json.dumps({"custom_id": "ids", "prompt": [3, 5, 7], "max_tokens": 2})]))
    engine, seen = Engine(), []
    add = engine.add_request
    engine.add_request = lambda request: (seen.append(request), add(request))
    generate_offline(engine, requests, output, tokenizer=Words())
    found = {answer["custom_id"]: answer for answer in map(json.loads, output.read_text().splitlines())}
    assert found["0"]["tokens"] == found["ids"]["tokens"] == [15, 30]
    assert found["0"]["text"] == found["ids"]["text"] == "x" * 15 + " " + "x" * 30
    assert "at least one token" in found["1"]["error"]["message"]
    assert "not valid Unicode" in found["2"]["error"]["message"]
    assert {request.sampling.stop_token_ids for request in seen} == {frozenset([EOS])}


def test_a_line_is_read_with_all_of_its_fields():
    values = {
        "custom_id": "x", "prompt": "some text", "max_tokens": 7, "temperature": 1, "top_k": 5, "top_p": 0.5, "seed": -3,
        "stop_token_ids": [2, 4],
    }  # fmt: skip
    assert set(values) == set(FIELDS)
    for text in (json.dumps(values).encode(), b"\xef\xbb\xbf" + json.dumps(values).encode()):
        id, prompt, sampling = read_request(text, [9])
        assert (id, prompt) == ("x", "some text")
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 1.0, 5)
        assert (sampling.top_p, sampling.seed, sampling.stop_token_ids) == (0.5, -3, {2, 4})
    assert read_request(line("y"), [9])[2].stop_token_ids == {9}
    assert read_request(line("y", stop_token_ids=[]), [9])[2].stop_token_ids == set()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(({"custom_id": id}, "custom_id must be a text") for id in (None, "", 5, ["x"])),
        *(
            ({"prompt": prompt}, "prompt must be a text or a list of token ids")
            for prompt in (None, 5, {}, [1.0], [True])
        ),
        *(({name: 1.5}, f"{name} must be a whole number") for name in ("max_tokens", "top_k", "seed")),
        *(({name: True}, f"{name} must be") for name in FIELDS[2:]),
        *(
            ({"temperature": value}, "must be a finite number")
            for value in (float("nan"), float("inf"), 10**400, "1", None)
        ),
        *(({name: value}, f"{name} must be") for name, value in (("temperature", -1), ("top_k", -1), ("top_p", 0))),
        *(({"max_tokens": 0}, "max_tokens must be at least 1"), ({"stop_token_ids": 5}, "a list of token ids")),
        *(({"messages": []}, "unknown field 'messages'"), ({"x" * 500: 1}, "unknown field 'xxx")),
    ],
)
def test_a_line_with_a_wrong_field_is_refused_by_name(wrong, said):
    with pytest.raises(InvalidArgument, match=said) as caught:
        read_request(json.dumps({"custom_id": "x", "prompt": [1], **wrong}).encode())
    assert caught.value.custom_id == (None if "custom_id" in wrong else "x")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"\xff", b"1" * 5000, b'{"custom_id": "x"} {}'])
def test_a_line_that_is_not_json_is_refused(text):
    with pytest.raises(InvalidArgument, match=r"not JSON|must be a JSON object") as caught:
        read_request(text)
    assert caught.value.custom_id is None and len(str(caught.value)) < 400


class Picky(Words):
    """A tokenizer that raises for some texts and some tokens, as tiktoken's, sentencepiece's and Rust's do."""

    class Panic(BaseException):
        pass

    def encode(self, text):
        if text == "panic":
            raise self.Panic
        if text == "special":
            raise ValueError
        return super().encode(text)

    def decode(self, token_ids, *, skip_special_tokens):
        if len(token_ids) == 3:
            raise IndexError
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_line_that_the_tokenizer_cannot_serve_is_answered_with_an_error(tmp_path):
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [("a b", 2), ("special", 2), ("panic", 2), ("a b", 3), ("c d e", 2)]
    lines = [
        json.dumps({"custom_id": str(n), "prompt": text, "max_tokens": most}) for n, (text, most) in enumerate(prompts)
    ]
    requests.write_text("\n".join(lines))
    progress = generate_offline(Engine(), requests, output, tokenizer=Picky())
    assert (progress.answered, progress.errors) == (5, 3)
    assert [number for number, (_, tokens) in sorted(answers(output).items()) if tokens is None] == [2, 3, 4]


@pytest.mark.parametrize("path", ["a\0b", "\ud800", 5, None, b"answers"])
@pytest.mark.parametrize("field", ["requests_path", "output_path"])
def test_paths_that_no_file_has(tmp_path, field, path):
    given = {"requests_path": str(tmp_path / "q"), "output_path": str(tmp_path / "a"), field: path}
    (tmp_path / "q").write_text("")
    with pytest.raises(InvalidArgument) as caught:
        offline_file.AnswerFile(given["requests_path"], given["output_path"])
    assert caught.value.field == field and not (tmp_path / "a").exists()
