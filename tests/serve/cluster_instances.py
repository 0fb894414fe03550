"""Tiny models attached as the instances of a cluster attach them: without hooks, KV in block_major layout."""

from __future__ import annotations

import copy
import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from models import LAYERS, VOCAB, kv_spec, make, minimum_bytes
from near_tokens import near_tokens

import remap
from remap_serve.cluster.instance import ClusterInstance
from remap_serve.cluster.messages import GroupPlan, Part
from remap_serve.engine import LLMEngine, Request, SamplingParams, TokenLogprobs
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.pipeline import Network
from remap_serve.policy.cluster.restore import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4096


def attach(
    model: Any, name: str, blocks: int, config: remap.Config | None = None, spare: int = 0, **kv: Any
) -> tuple[remap.Session, Any, Any]:
    """A session with a copy of the model: (session, tenant, the copy). blocks: of KV, in all layers. spare: bytes for others."""
    mine = copy.deepcopy(model)
    spec = kv_spec(mine, layout="block_major", **{"min_blocks": blocks, "max_blocks": 2000, **kv})
    session = remap.Session(minimum_bytes(mine, spec, PAGE) + spare, page_bytes=PAGE, config=config)
    return session, session.attach(mine, kv=spec, name=name, hooks=False), mine


@contextmanager
def attached(model: Any, name: str, blocks: int, **kv: Any) -> Iterator[tuple[remap.Session, Any, Any]]:
    """`attach`, and closed at the end."""
    session, tenant, mine = attach(model, name, blocks, **kv)
    try:
        yield session, tenant, mine
    finally:
        session.close()


def requests_for(seed: int, count: int = 8, low: int = 3, high: int = 40, tokens: int = 12) -> list[Request]:
    """Greedy ones, and every third with a temperature."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high)))
        heat = 0.8 if index % 3 == 2 else 0.0
        sampling = SamplingParams(rng.randint(1, tokens), temperature=heat, top_k=20 if heat else 0, seed=index)
        made.append(Request(f"r{index}", prompt, sampling))
    return made


def expected_tokens(model: Any, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """What one engine with room for everybody answers."""
    with attached(model, "m", 400) as (_, tenant, mine):
        result = LLMEngine(mine, tenant).run(requests)
        assert result.metrics.preemptions == 0
        return near_tokens(model, requests, result.outputs)


class Cluster:
    """Instances in threads of this process, driven by hand. blocks: of KV, of each alone."""

    def __init__(self, model: Any, count: int, blocks: int = 24, **options: Any) -> None:
        self.layers = LAYERS
        kv = options.pop("kv", {})
        self.attached = {f"i{n}": attach(model, f"i{n}", blocks, **kv) for n in range(count)}
        options = {"max_num_seqs": 6, "max_batch_tokens": 64, "timeout_s": 60.0, **options}
        network = options.pop("network", Network(Line(0.0, 0.0), 1e12))
        self.instances = {
            name: ClusterInstance(name, mine, session, tenant, network, **options)
            for name, (session, tenant, mine) in self.attached.items()
        }
        self.groups = {name: (Part(name, 0, self.layers),) for name in self.instances}
        self.epoch = 0
        self.tokens: dict[str, dict[int, int]] = {}
        self.ends: dict[str, str] = {}
        self.noted: dict[str, dict[int, TokenLogprobs]] = {}
        self.prompts: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.reports: dict[str, Any] = {}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.instances):
            self.end(name)

    def end(self, name: str) -> None:
        """This instance leaves without a word."""
        self.instances.pop(name).close()
        session, _, _ = self.attached.pop(name)
        try:
            remap.advanced.check(session)
        finally:
            session.close()
        self.groups.pop(name, None)

    def plans(self, *groups: tuple[tuple[str, int], ...]) -> dict[str, GroupPlan]:
        """Plans for the next epoch: (name, end) of each stage of each group."""
        self.epoch += 1
        names = [name for group in groups for name, _ in group]
        before = tuple(dict.fromkeys(self.groups[name] for name in names))
        first = self.instances[names[0]].describe()
        found = {}
        for group in groups:
            cuts = [0, *(end for _, end in group)]
            parts = tuple(Part(name, cut, end) for (name, end), cut in zip(group, cuts))
            plan = GroupPlan(self.epoch, parts, before, first.fingerprint, first.rendezvous)
            found |= {name: plan for name, _ in group}
        return found

    def prepare(self, plans: dict[str, GroupPlan]) -> list[Exception]:
        """All at once; the errors."""
        errors = []

        def one(name: str) -> None:
            try:
                self.instances[name].prepare(plans[name])
            except remap.Error as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(name,)) for name in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def commit(self, plans: dict[str, GroupPlan]) -> None:
        for name, plan in plans.items():
            self.instances[name].commit(plan.epoch)
            self.groups[name] = plan.stages

    def change(self, *groups: tuple[tuple[str, int], ...]) -> None:
        """Prepare and commit, then wait until nothing moves any more."""
        plans = self.plans(*groups)
        assert self.prepare(plans) == []
        self.commit(plans)
        self.until(lambda: all(self.settled(name, self.epoch) for name in plans))

    def fetch(self, *names: str, by: Callable[[int], bool] = lambda layer: False) -> None:
        """Bring all layers home to these instances."""
        self.begin_fetch(*names, by=by)
        self.until(lambda: all(self.home(name) for name in names))

    def begin_fetch(self, *names: str, by: Callable[[int], bool] = lambda layer: False) -> None:
        """by: whether a layer comes from the stage that computes it; else from the host."""
        self.epoch += 1
        copies = self.copies(*names, by=by)
        for name in names:
            self.instances[name].fetch(self.epoch, copies)

    def copies(self, *names: str, by: Callable[[int], bool] = lambda layer: True) -> list[Copy]:
        """Of these layers that they lack, from the stages that compute them."""
        return [
            Copy(layer, name, part.instance, 0.0, 0.0)
            for name in names
            for part in self.groups[name]
            if part.instance != name
            for layer in range(part.first, part.end)
            if by(layer)
        ]

    def home(self, name: str) -> bool:
        part = next(each for each in self.groups[name] if each.instance == name)
        return len(self.reports[name].arrived) == self.layers - (part.end - part.first)

    def settled(self, name: str, epoch: int) -> bool:
        report = self.reports[name]
        return report.epoch == epoch and report.phase == "serving"

    def submit(self, name: str, requests: list[Request], attempt: int = 1) -> None:
        for request in requests:
            self.instances[name].submit(request, attempt)

    def poll(self) -> None:
        """Take what there is; no token twice, and none that differs."""
        for name, instance in self.instances.items():
            outputs, self.reports[name] = instance.poll(0.002)
            for output in outputs:
                assert output.id not in self.ends, f"{output.id} goes on after its end"
                got = self.tokens.setdefault(output.id, {})
                for place, token in enumerate(output.tokens, output.first):
                    assert place not in got, f"{output.id} has two tokens at {place}"
                    got[place] = token
                self.noted.setdefault(output.id, {}).update(enumerate(output.noted, output.first))
                if output.first == 0 and output.tokens:
                    self.prompts[output.id] = output.prompt
                if output.finish_reason is not None:
                    self.ends[output.id] = output.finish_reason

    def delivered(self, id: str) -> list[int]:
        """The tokens of a request up to the first gap: what an instance made and nobody took is lost with it. What came behind
        the gap is forgotten, as `Ledger` does."""
        got, found = self.tokens.get(id, {}), list[int]()
        while len(found) in got:
            found.append(got[len(found)])
        self.tokens[id] = dict(enumerate(found))
        return found

    def until(self, done: Any, limit_s: float = 600.0) -> None:
        """Poll until that is so. limit_s: what hangs, however busy the machine is."""
        end = time.monotonic() + limit_s
        self.poll()
        while not done():
            assert time.monotonic() < end, f"still waiting: {self.reports}"
            self.poll()

    def answers(self, requests: list[Request]) -> dict[str, tuple[int, ...]]:
        """Wait for the ends of these; their tokens."""
        self.until(lambda: all(one.id in self.ends for one in requests))
        found = {}
        for one in requests:
            got = self.tokens.get(one.id, {})
            assert sorted(got) == list(range(len(got)))
            found[one.id] = tuple(got[place] for place in range(len(got)))
        return found


def serve(pipe: Any, name: str, kind: str, seed: int, blocks: int) -> None:
    """The process of one instance: carries out (method, arguments) until the pipe ends; an error is an answer."""
    torch.set_num_threads(1)
    session, tenant, model = attach(make(kind, seed), name, blocks)
    network = Network(Line(0.0, 0.0), 1e12)
    instance = ClusterInstance(name, model, session, tenant, network, max_num_seqs=6, max_batch_tokens=64)
    try:
        while True:
            method, args = pipe.recv()
            try:
                answer = getattr(instance, method)(*args)
            except remap.Error as error:
                answer = error
            pipe.send(answer)
    except EOFError:
        instance.close()
        session.close()
