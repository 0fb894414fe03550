"""The library's `ThroughputEngine` itself, on a machine of the table, in virtual time.

A random model with some of the layers of a large one, and much narrower, answers requests of the large one's lengths.
All that decides is the engine's: what it measures, which ratio it chooses, who runs, what lies in host memory, and in
which order layers, blocks and computation follow each other. Only seconds are not measured: a layer computes for as
long as the roofline says of the large model's (`layer_s`, and `fits_of` to make keys and values again), and copies take
the machine's link, in the order in which the prefetcher issues them (`SlowLink`). So equal loads give equal figures, on
any computer, and each policy's tokens are compared.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.lab.hybridserve.batches import BLOCK_TOKENS, setup
from bench.lab.seeds import Point
from bench.lab.slow_link import SlowLink

import remap
from remap.internals import internals
from remap_serve.cli.shared_world import ModelSpec, build
from remap_serve.engine.pairs import END, PAIR
from remap_serve.engine.request import Request, SamplingParams
from remap_serve.policy import hybrid
from remap_serve.policy.activations import Line
from remap_serve.policy.minibatches import total

if TYPE_CHECKING:
    from bench.lab.hybridserve.division import Setup

    from remap_serve.engine.throughput import ThroughputEngine
    from remap_serve.engine.throughput_runner import MiniBatch

__all__ = ["ENGINE_POLICIES", "VirtualLoad", "serve_virtually"]

ENGINE_POLICIES = ("KV", "activations", "Algorithm 1", "best")
"""Names of the options of `remap_serve.policy.offline.choose`; best is the engine's choice."""
_WIDTH, _HEADS, _VOCABULARY = 32, 2, 128
_BATCH_TOKENS = 8192
_PAGE = 4096


@dataclass(frozen=True)
class VirtualLoad:
    """layers: of the model's, that are served, and as large a share of the device's memory with them. prompts: least and most
    tokens, drawn with the seed."""

    machine: str
    model: str
    layers: int
    prompts: tuple[int, int]
    count: int
    answer: int

    def requests(self, seed: int) -> list[Request]:
        """Prompts of random tokens, greedy answers of a fixed length."""
        rng = random.Random(f"virtual {seed}")
        return [
            Request(
                f"r{number}",
                tuple(rng.randrange(3, _VOCABULARY) for _ in range(rng.randint(*self.prompts))),
                SamplingParams(max_tokens=self.answer),
            )
            for number in range(self.count)
        ]

    def __str__(self) -> str:
        low, high = self.prompts
        return (
            f"{self.machine}, {self.layers} layers of {self.model}, {self.count} requests of {low:,} to {high:,} tokens"
        )


class _Clock:
    """Virtual seconds, for all that asks for time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Link(SlowLink):
    """The large model's copies. layer_s: of a layer's weights; blocks_s: of host blocks."""

    def __init__(self, tenant: Any, clock: _Clock, layer_s: float, blocks_s: Line) -> None:
        self._blocks_s = blocks_s
        super().__init__(tenant, internals(tenant).layer_bytes[0] / layer_s, clock)

    def streamed_seconds(self, blocks: int) -> float:
        """`Tenant.streamed_seconds`, of the large model's blocks."""
        return self._blocks_s(blocks)


def _charge(engine: ThroughputEngine, clock: _Clock, found: Setup) -> None:
    """Let what the runner computes take the large model's seconds, in passes and in the calibration."""
    runner, roofline, costs = engine.runner, found.roofline, found.costs
    attend, remake, head = runner.attend, runner.remake, runner.decoder.head
    known: tuple[Any, float] = None, 0.0  # the mini-batches of the pass, and a layer's seconds

    def attended(layer: int, groups: list[MiniBatch], *given: Any) -> Any:
        nonlocal known
        if known[0] is not groups:
            known = groups, roofline.layer_s(*_work(groups))
        clock.sleep(known[1])
        return attend(layer, groups, *given)

    def remade(layer: int, group: MiniBatch) -> None:
        if group.remade is not None:
            clock.sleep(costs.recompute(len(group.remade[1]) / PAIR))
        remake(layer, group)

    def headed(hidden: Any) -> Any:
        clock.sleep(costs.ends_s(len(hidden)))
        return head(hidden)

    for of, name, method in (
        (runner, "attend", attended),
        (runner, "remake", remade),
        (runner.decoder, "head", headed),
    ):
        setattr(of, name, method)


def _work(groups: list[MiniBatch]) -> tuple[int, int, int, int]:
    """Of mini-batches, as `Roofline.layer_s` takes it: prompt tokens and their pairs, rows that decode and their context."""

    def seen(bias: Any) -> int:
        return int((bias == 0).sum())

    tiles = [tile for one in groups for prefill in one.batch.prefills for tile in prefill.tiles]
    decodes = [group for one in groups for group in one.batch.groups]
    return (
        sum(tile.last - tile.first for tile in tiles),
        sum(seen(tile.bias) for tile in tiles),
        sum(group.last - group.first for group in decodes),
        sum(seen(group.bias) for group in decodes),
    )


def serve_virtually(load: VirtualLoad, policy: str, seed: int) -> Point:
    """All requests, served once. tokens_per_s: of the passes without prompts; activation_share: of the ratio; expected_pass_s,
    pass_s: the certified seconds of such a pass, and the mean ones of those with all requests; resident_layers: that stay;
    tokens: a digest of all answers."""
    import torch

    from remap_serve.engine.throughput import ChosenRatio, ThroughputEngine

    class Named(ThroughputEngine):
        """Takes the option of this name."""

        def _choose(self) -> ChosenRatio:
            chosen = super()._choose()
            option = chosen.options[policy]
            return ChosenRatio(option.ratio, chosen.why, chosen.times, {policy: option})

    found, requests, clock = setup(load.machine, load.model), load.requests(seed), _Clock()
    lengths = [request.max_kv_tokens for request in requests]
    blocks = [-(-length // BLOCK_TOKENS) for length in lengths]
    kv_alone = total(hybrid.fixed(blocks, (0, 1), found.costs, found.room).mixes)
    kept = int(load.layers * (1.0 - found.room.streamed(kv_alone)))
    torch.manual_seed(seed)
    sizes = ModelSpec(
        "OPT", load.layers, _WIDTH, 2 * _WIDTH, _HEADS, vocabulary=_VOCABULARY, positions=max(lengths) + 2, family="opt"
    )
    model, _ = build(sizes, "float32", seed)
    each = BLOCK_TOKENS // PAIR
    pool = END * load.count + 3 * (_BATCH_TOKENS // each)
    spec = remap.KVSpec(
        layers=load.layers,
        kv_heads=_HEADS,
        head_dim=_WIDTH // _HEADS,
        block_tokens=each,
        dtype="float32",
        min_blocks=pool,
        max_blocks=pool,
        layout="layer_major",
        host_blocks=PAIR * sum(blocks),
        streamed_blocks=PAIR * sum(blocks),
        scratch_blocks=PAIR * max(max(blocks), min(sum(blocks), found.room.buffer_bytes // found.room.block.kv)),
    )
    link = Line(found.costs.load_kv.base_s, found.costs.load_kv.each_s / PAIR)
    decodes: list[tuple[int, float]] = []
    answers: dict[str, tuple[int, ...]] = {}
    with remap.Session("512MiB", device="cpu", page_bytes=_PAGE, config=remap.advanced.Knobs(slowdown=1e9)) as session:
        tenant = session.attach(model, kv=spec, hooks=False, resident_layers=kept if kept < load.layers else None)
        engine = Named(model, tenant, max_num_seqs=load.count, max_batch_tokens=_BATCH_TOKENS, clock=clock.perf_counter)
        engine.runner.tenant = _Link(tenant, clock, found.costs.weights_s, link)
        _charge(engine, clock, found)
        for request in requests:
            engine.add_request(request)
        while engine.unfinished:
            begun = clock.now
            step = engine.step()
            if step.computed == len(step.sampled):
                decodes.append((step.computed, clock.now - begun))
            answers |= {output.id: output.tokens for output in step.finished}
        chosen = engine.chosen
    assert chosen is not None
    full = [seconds for count, seconds in decodes if count == load.count]
    return {
        "tokens_per_s": sum(count for count, _ in decodes) / sum(seconds for _, seconds in decodes),
        "activation_share": chosen.ratio[0] / sum(chosen.ratio),
        "expected_pass_s": chosen.options[policy].pass_s,
        "pass_s": sum(full) / len(full),
        "resident_layers": float(kept),
        "tokens": float(zlib.crc32(repr(sorted(answers.items())).encode())),
    }
