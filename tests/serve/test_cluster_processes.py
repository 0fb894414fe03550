"""Instances in processes of their own: the same answers, and ends that nobody announced."""

from __future__ import annotations

import signal
import time
from multiprocessing import get_context

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")

from cluster_instances import expected_tokens, requests_for, serve  # noqa: E402
from models import LAYERS, make  # noqa: E402

from remap.errors import StalePlan  # noqa: E402
from remap_serve.cluster.messages import GroupPlan, Part  # noqa: E402

LIMIT_S = 600.0


class Remote:
    """An instance in a spawned process: calls go through a pipe, one at a time."""

    def __init__(self, name, kind, seed, blocks):
        context = get_context("spawn")
        self.name = name
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, name, kind, seed, blocks), daemon=True)
        self.process.start()
        other.close()

    def begin(self, method, *args):
        self._pipe.send((method, args))

    def end(self):
        assert self._pipe.poll(LIMIT_S), f"{self.name} does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __call__(self, method, *args):
        self.begin(method, *args)
        return self.end()


@pytest.fixture
def instances(request):
    kind, count, blocks = request.param
    made = [Remote(f"i{number}", kind, 0, blocks) for number in range(count)]
    yield {each.name: each for each in made}
    for each in made:
        each.process.kill()
        each.process.join()


def merge(instances, cuts, epoch):
    names = list(instances)
    first = instances[names[0]]("describe")
    parts = tuple(Part(name, a, b) for name, a, b in zip(names, cuts, cuts[1:]))
    alone = tuple((Part(name, 0, LAYERS),) for name in names)
    plan = GroupPlan(epoch, parts, alone, first.fingerprint, first.rendezvous)
    for each in instances.values():
        each.begin("prepare", plan)
    for each in instances.values():
        each.end()
    for each in instances.values():
        each("commit", epoch)
    # A commit is carried out at the next pass boundary. Nobody has requests yet, so no tokens come with these reports.
    end_s = time.monotonic() + LIMIT_S
    for each in instances.values():
        while each("poll", 0.01)[1].epoch < epoch:
            assert time.monotonic() < end_s


def gathered(instances, tokens, ends, done):
    """Poll until that is so; each token once."""
    end_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end_s
        for each in instances:
            outputs, each.report = each("poll", 0.01)
            for output in outputs:
                got = tokens.setdefault(output.id, {})
                assert not set(got) & set(range(output.first, output.first + len(output.tokens)))
                got.update(enumerate(output.tokens, output.first))
                if output.finish_reason is not None:
                    ends[output.id] = output.finish_reason


@pytest.mark.parametrize("instances", [("llama", 2, 30)], indirect=True)
def test_two_processes_answer_as_one_engine_and_survive_a_kill(instances):
    model, requests = make("llama"), requests_for(6, count=9, tokens=30)
    expected = expected_tokens(model, requests)
    merge(instances, (0, 2, 6), 1)
    head, other = instances.values()
    for one in requests[:6]:
        head("submit", one, 1)
    tokens: dict = {}
    ends: dict = {}
    gathered([head, other], tokens, ends, lambda: sum(len(got) for got in tokens.values()) > 20)
    other.process.kill()
    other.process.join()
    assert other.process.exitcode == -signal.SIGKILL
    # Nobody hangs: calls are answered.
    with pytest.raises(StalePlan):
        head("prepare", GroupPlan(1, (), (), head("describe").fingerprint))
    lost = head("recover", 2)
    gathered([head], tokens, ends, lambda: head.report.epoch == 2 if hasattr(head, "report") else False)
    assert set(lost) == {one.id for one in requests[:6]} - set(ends)
    for one in requests:
        if one.id not in ends:
            got = tokens.get(one.id, {})
            head("submit", one, 2, [got[place] for place in range(len(got))])
    gathered([head], tokens, ends, lambda: len(ends) == len(requests))
    assert {id: tuple(got[place] for place in range(len(got))) for id, got in tokens.items()} == expected


@pytest.mark.parametrize("instances", [("opt", 4, 16)], indirect=True)
def test_four_processes_answer_as_one_engine(instances):
    model, requests = make("opt"), requests_for(7, count=16)
    merge(instances, (0, 1, 3, 4, 6), 1)
    for one in requests:
        instances["i0"]("submit", one, 1)
    tokens: dict = {}
    ends: dict = {}
    gathered(list(instances.values()), tokens, ends, lambda: len(ends) == len(requests))
    found = {id: tuple(got[place] for place in range(len(got))) for id, got in tokens.items()}
    assert found == expected_tokens(model, requests)
