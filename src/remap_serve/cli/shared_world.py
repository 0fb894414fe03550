# SPDX-License-Identifier: Apache-2.0
"""Three models on one arena, for the ablations and for the demo with several tenants.

The models are SmolLM2-135M and two Llamas with random weights of a fixed seed, which differ from it in depth and width,
as in the combinations of Oneiros' Table 1. `SMALL` are three small models of the same shapes, for tests and quick runs.

A `SharedWorld` holds the models; each `serve` opens its own session, attaches the models, serves, and detaches them. The
arena has room for all weights and for a KV cache of `kv_share` of each tenant's weights: Oneiros' combinations leave
0.04 (OPT-30b of C2) to 0.38 (OPT-13b of C1).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remap import advanced
from remap.model.footprint import footprint
from remap_serve.sim.policies import OURS, POLICIES

from .demo_config import default_config

if TYPE_CHECKING:
    from remap import KVSpec, Session
    from remap.advanced import Knobs
    from remap_serve.engine import LLMEngine, Request, SharedEngines, SharedResult
    from remap_serve.sim.workload import Item, Lengths

__all__ = ["LARGE", "SMALL", "ModelSpec", "Preset", "SharedWorld", "Wiring", "build"]


@dataclass(frozen=True)
class ModelSpec:
    """A model with random weights, or (layers = 0) SmolLM2-135M. family: "llama" or "opt" (which has no kv_heads)."""

    name: str
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocabulary: int = 8192
    positions: int = 2048
    family: str = "llama"


@dataclass(frozen=True)
class Preset:
    """Models, and the settings of their engines."""

    name: str
    models: tuple[ModelSpec, ...]
    dtype: str
    page_bytes: int
    block_tokens: int = 16
    max_num_seqs: int = 12
    max_batch_tokens: int = 192
    decode_cost: int = 5


LARGE = Preset(
    "large",
    (
        ModelSpec("SmolLM2"),
        ModelSpec("wide", layers=16, hidden=768, intermediate=2048, heads=12, kv_heads=4),
        ModelSpec("deep", layers=40, hidden=384, intermediate=1024, heads=6, kv_heads=2),
    ),
    dtype=default_config().dtype,
    page_bytes=2 << 20,
)
SMALL = Preset(
    "small",
    (
        ModelSpec("even", layers=8, hidden=192, intermediate=512, heads=6, kv_heads=2, vocabulary=512, positions=512),
        ModelSpec("wide", layers=5, hidden=256, intermediate=640, heads=8, kv_heads=2, vocabulary=512, positions=512),
        ModelSpec("deep", layers=12, hidden=128, intermediate=384, heads=4, kv_heads=2, vocabulary=512, positions=512),
    ),
    dtype="float32",
    page_bytes=64 << 10,
)


OWN = POLICIES[OURS].pooled
"""The share of each tenant's KV that stays its own where unused KV is shared."""


@dataclass(frozen=True)
class Wiring:
    """The settings of a run.

    controller: the arguments of `Knobs`; None for the recompute baseline. by_hand: share of each tenant's layers that
    is remapped before the first request, without a controller (`controller` is then None). partial: see
    `SharedEngines`. own: with a controller, the share of its KV at the start that stays a tenant's own; the rest is for the
    tenant that needs it first. swap: a preempted request keeps its KV in host memory, which has room for all requests at once;
    None: it has what the session gives (`Session(host_kv=)`), with a controller, and none without. stream: and complete blocks of
    running requests stream from there, as many as a tenant's KV has at first.
    """

    controller: Mapping[str, Any] | None = None
    by_hand: float = 0.0
    buffers: int = 2
    partial: bool | None = None
    own: float = OWN
    swap: bool | None = None
    stream: bool = False


def build(spec: ModelSpec, dtype: str, seed: int) -> tuple[Any, Any]:
    """(model in eval mode, path of its weights file or None)."""
    import torch

    model: Any
    if not spec.layers:
        from remap.cli import smollm2

        model, _, folder = smollm2.load(dtype)
        return model, folder
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    generator = torch.Generator().manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.positions,
        "tie_word_embeddings": True,
    }
    if spec.family == "opt":
        model = OPTForCausalLM(OPTConfig(**common, ffn_dim=spec.intermediate, word_embed_proj_dim=spec.hidden)).eval()
    else:
        config = LlamaConfig(**common, intermediate_size=spec.intermediate, num_key_value_heads=spec.kv_heads)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # As large as trained ones are: greedy tokens then vary, and every layer matters.
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / spec.hidden**0.5, generator=generator)
    return torch.nn.Module.to(model, dtype=getattr(torch, dtype)), None


class SharedWorld:
    """The models of a preset (or the first `tenants` of them), and the memory that they share.

    kv_share: KV cache of each tenant at the start, as a share of its weights. seed: of random weights and prompts.
    """

    def __init__(self, preset: Preset, *, kv_share: float = 0.1, tenants: int | None = None, seed: int = 0) -> None:
        self.preset = preset
        self.names = tuple(spec.name for spec in preset.models[:tenants])
        self._seed = seed
        self._models: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._weight_pages: dict[str, int] = {}
        self.start_blocks: dict[str, int] = {}
        self.last_capacity_bytes = 0
        """The arena of the last run."""
        self.copy_to_compute: dict[str, float] = {}
        """Of the last run: seconds to copy all layers once, divided by the seconds to compute them in the last kind of
        pass.
        """
        self.copied: dict[str, dict[str, int]] = {}
        """Of the last run: tenant -> bytes copied from host memory ("weights_in", "kv_in") and to it ("kv_out"). Of KV
        that streams too."""
        for index, spec in enumerate(preset.models[:tenants]):
            model, file = build(spec, preset.dtype, seed + index)
            pages = footprint(model, None).pages(preset.page_bytes)
            self._models[spec.name], self._files[spec.name], self._weight_pages[spec.name] = model, file, pages
            # Room for four of the shortest prompts at least, whatever the share.
            self.start_blocks[spec.name] = max(
                8, int(kv_share * pages * preset.page_bytes) // self.block_bytes(spec.name)
            )

    # -- sizes -----------------------------------------------------------------------------------------------------

    def spec(self, name: str, start: int, most: int, host: int | None = 0) -> KVSpec:
        """The KV cache of a tenant. host: blocks of host memory; None: what the session gives."""
        from remap import KVSpec

        config = self._models[name].config
        return KVSpec(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),  # OPT has one number
            head_dim=config.hidden_size // config.num_attention_heads,
            block_tokens=self.preset.block_tokens,
            dtype=self.preset.dtype,
            min_blocks=start,
            max_blocks=most,
            host_blocks=host,
        )

    def block_bytes(self, name: str) -> int:
        """Bytes of one KV block of a tenant."""
        return self.spec(name, 0, 1).block_bytes

    def layers(self, name: str) -> int:
        """Layers of a tenant's model."""
        return int(self._models[name].config.num_hidden_layers)

    def vocabulary(self, name: str) -> int:
        """Token ids that a tenant's model knows."""
        return int(self._models[name].config.vocab_size)

    def weight_bytes(self, name: str) -> int:
        """Bytes of a tenant's weights, in whole pages."""
        return self._weight_pages[name] * self.preset.page_bytes

    def capacity(self, blocks: Mapping[str, int]) -> int:
        """Bytes of an arena with all weights and these KV blocks; each tenant's KV begins on a page of its own."""
        page = self.preset.page_bytes
        kv = sum(-(-blocks[name] * self.block_bytes(name) // page) for name in self.names)
        return (sum(self._weight_pages.values()) + kv) * page

    @property
    def budget_bytes(self) -> int:
        """Bytes of the arena of every run except the unconstrained."""
        return self.capacity(self.start_blocks)

    def longest(self) -> int:
        """Most tokens of a prompt, and of an answer: two such requests fit into the smallest KV cache."""
        return max(8, min(self.start_blocks.values()) * self.preset.block_tokens // 4)

    # -- requests --------------------------------------------------------------------------------------------------

    def lengths(self, lengths: Lengths, factor: float) -> Lengths:
        """These lengths, scaled to models with shorter contexts, and cut to the longest that fit."""
        return lengths.scaled(factor, most=self.longest())

    def requests(self, items: Sequence[Item], *, at_once: bool = False) -> dict[str, list[Request]]:
        """tenant -> requests with random prompts, greedy; equal items give equal requests.

        at_once: all arrive at time 0.
        """
        from remap_serve.engine import Request, SamplingParams

        made: dict[str, list[Request]] = {name: [] for name in self.names}
        for item in items:
            mine = made[item.tenant]
            rng = random.Random(f"{self._seed}:{item.tenant}:{len(mine)}")
            top = self.vocabulary(item.tenant)
            prompt = tuple(rng.randrange(3, top) for _ in range(item.prompt_tokens))
            sampling = SamplingParams(max_tokens=item.output_tokens)
            mine.append(Request(f"{len(mine):04d}", prompt, sampling, 0.0 if at_once else item.time_s))
        return made

    # -- serving ---------------------------------------------------------------------------------------------------

    def serve(
        self,
        requests: Mapping[str, Sequence[Request]],
        wiring: Wiring,
        mode: str = "temporal",
        *,
        quantum_s: float = 1.0,
        ample: bool = False,
        max_num_seqs: int | None = None,
        on_step: Callable[[SharedEngines, Mapping[str, Any]], None] | None = None,
        prepare: Callable[[LLMEngine], object] | None = None,
    ) -> SharedResult:
        """One run in a session of its own. prepare: called with each engine, before its first pass.

        ample: memory for all requests at once, in spite of the wiring (the reference). max_num_seqs: of each engine; by
        default the preset's. Raises the errors of attaching and serving; the models are as before in any case.
        """
        from remap import Session
        from remap_serve.engine import SharedEngines

        preset = self.preset
        need = {
            name: sum(-(-request.max_kv_tokens // preset.block_tokens) for request in requests.get(name, ()))
            for name in self.names
        }
        blocks = {name: max(start, need[name] if ample else 0) for name, start in self.start_blocks.items()}
        room = None if wiring.swap is None else 0
        host = need if wiring.swap and not ample else dict.fromkeys(self.names, 0 if ample else room)
        capacity = self.last_capacity_bytes = self.capacity(blocks)
        config = None if wiring.controller is None or ample else self._controller(wiring.controller)
        with Session(capacity=capacity, device="cpu", page_bytes=preset.page_bytes, config=config) as session:
            stream = wiring.stream and not ample
            if config is not None and not stream:
                blocks = {name: max(1, int(wiring.own * mine)) for name, mine in blocks.items()}
            engines = self.attach(
                session, blocks, host, stream, config is not None, max_num_seqs or preset.max_num_seqs
            )
            if prepare is not None:
                for engine in engines.values():
                    prepare(engine)
            if wiring.by_hand and not ample:
                for name in self.names:
                    buffers = min(wiring.buffers, self.layers(name) - 1)
                    share = max(1, round(wiring.by_hand * self.layers(name)))
                    advanced.remap(session, name, min(share, self.layers(name) - buffers), buffers)
            self._warm_up(engines)
            shared = SharedEngines(
                session if config is not None else None, engines, mode, quantum_s=quantum_s, partial=wiring.partial
            )
            before = _copied(session)
            result = shared.run(requests, on_step)
            self.copied = {
                name: {kind: nbytes - before[name][kind] for kind, nbytes in mine.items()}
                for name, mine in _copied(session).items()
            }
            self.copy_to_compute = {
                name: sum(tenant.copy_times_s) / sum(tenant.compute_times_s)
                for name, tenant in session.snapshot().tenants.items()
                if tenant.copies and sum(tenant.compute_times_s) > 0
            }
            return result

    def _controller(self, settings: Mapping[str, Any]) -> Knobs:
        from remap.advanced import Knobs

        return Knobs(**settings)

    def attach(
        self,
        session: Session,
        blocks: Mapping[str, int],
        host: Mapping[str, int | None],
        stream: bool,
        remaps: bool,
        max_num_seqs: int,
        pages: str = "",
    ) -> dict[str, LLMEngine]:
        """An engine for each model on `session`. blocks: of each KV cache at the start. host, stream: see `Wiring`. remaps: the
        engines call the session. pages: of inactive models, as `Session.attach` has it; "": the models are active.
        """
        from remap.kv.spec import with_streamed
        from remap_serve.engine import LLMEngine

        preset, engines = self.preset, {}
        for name in self.names:
            # Addresses for the whole arena, so that every page has its place in each KV region; addresses cost nothing.
            most = max(1, -(-session.capacity_bytes // self.block_bytes(name)))
            spec = self.spec(name, blocks[name], most, host[name])
            tenant = session.attach(
                self._models[name],
                name=name,
                kv=with_streamed(spec, blocks[name], preset.page_bytes) if stream else spec,
                weights=self._files[name],
                hooks=False,  # the engines wait for layers themselves
                active=not pages,
                pages=pages or "auto",
            )
            engines[name] = LLMEngine(
                self._models[name],
                tenant,
                session=session if remaps else None,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=preset.max_batch_tokens,
                decode_cost=preset.decode_cost,
            )
        return engines

    def _warm_up(self, engines: Mapping[str, LLMEngine]) -> None:
        """Run a prefill and some decode steps of each model, unmeasured: first passes allocate thread pools and scratch
        memory.
        """
        from remap_serve.engine import Request, SamplingParams

        for engine in engines.values():
            prompt = tuple(range(3, 3 + self.preset.max_batch_tokens // 4))
            for index in range(2):
                engine.add_request(Request(f"warm-{index}", prompt[index:], SamplingParams(max_tokens=6)))
            while engine.unfinished:
                engine.step()


def _copied(session: Session) -> dict[str, dict[str, int]]:
    """As `SharedWorld.copied`, since the tenants were attached."""
    return {
        name: {
            "weights_in": one.copied_bytes,
            "kv_in": one.kv_in_bytes + one.kv_streamed_bytes,
            "kv_out": one.kv_out_bytes,
        }
        for name, one in session.snapshot().tenants.items()
    }
