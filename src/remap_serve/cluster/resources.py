# SPDX-License-Identifier: Apache-2.0
"""An instance's resources, the same in any group, and their measurements from before it serves."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import remap
from remap.errors import InvalidArgument, InvalidState
from remap.internals import internals
from remap_serve.cluster import probes
from remap_serve.cluster.counts import Counts
from remap_serve.cluster.head import HeadLimits
from remap_serve.cluster.messages import Fingerprint
from remap_serve.cluster.slots import Whole
from remap_serve.cluster.stage import Stage
from remap_serve.cluster.stage_kv import StageKV
from remap_serve.cluster.throughput import Throughput
from remap_serve.engine.models import decoder_of
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.placement import Layer, ServedLayers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from remap import StepReport
    from remap.policy.views import Demand
    from remap_serve.engine.models import Decoder
    from remap_serve.policy.cluster.lookahead import ChunkCost
    from remap_serve.policy.cluster.pipeline import Network

    Others = Callable[[str, Mapping[int, int]], None]

__all__ = ["Resources", "fingerprint_of"]

TYPICAL_TOKENS = 256
"""KV of a request that decodes, as plans weigh it."""


SAMPLES = 1024
"""Values of each tensor, about, by which weights are told apart: all of them would take as long as to load the model."""


def fingerprint_of(model: nn.Module, block_tokens: int) -> Fingerprint:
    """The values that have to be equal for two instances to compute parts of one model (see `Fingerprint`). All layers are
    resident."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())  # type: ignore[union-attr, operator]
    values = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        sampled = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
        values.update(sampled.view(torch.uint8).numpy().tobytes())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    layers = len(decoder_of(model).layers)
    return Fingerprint(digest.hexdigest(), dtype, remap.__version__, layers, values.hexdigest(), block_tokens)


class KVLost(InvalidState):
    """Live blocks moved and could not be followed, so KV is torn or lost: the instance has to recover. Fields: instance, moved
    (old -> new)."""


class Resources:
    """One instance's model, tenant and memory. Nothing of it changes but `counts` and `throughput`.

    layers: of the model. own_blocks: those that are KV while every layer is here and none streams. memory_bytes: for layers
    and KV together. model: the layers' bytes, and seconds of a microbatch by its requests that decode. host_bytes_per_s: at which
    layers come from the host's master copy, as the tenant measured at attach; 0 if it did not. cost: of a pass through all
    layers. throughput: to other instances. others: see `ClusterInstance`.

    Measures some short passes (`probes`). Raises InvalidArgument (field layout) for KV that is not block_major, and (fields
    max_blocks, needed) if the KV region could not take the pages of all layers.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        session: Any,
        tenant: Any,
        network: Network,
        max_num_seqs: int,
        max_batch_tokens: int,
        decode_cost: int,
        others: Others | None = None,
    ) -> None:
        self.name = name
        self.decoder: Decoder = decoder_of(model)
        self.session, self.tenant, self.throughput = session, tenant, Throughput(network)
        self._others = others
        self.layers = len(self.decoder.layers)
        self.limits = HeadLimits(
            self.decoder.vocabulary, self.decoder.max_tokens, max_num_seqs, max_batch_tokens, decode_cost
        )
        within = internals(tenant)
        self.own_blocks = frozenset(within.kv.pool.open_ids())
        self.fingerprint = fingerprint_of(model, tenant.kv.spec.block_tokens)
        self.counts = Counts()
        sizes = [int(size) for size in within.layer_bytes[: self.layers]]
        self.memory_bytes = sum(sizes) + tenant.kv.usable_blocks * tenant.kv.spec.block_bytes
        self._require_addresses()
        copy_s = within.copy_seconds()
        self.host_bytes_per_s = sum(within.layer_bytes) / len(within.layer_bytes) / copy_s if copy_s else 0.0
        self.cost = self._pass_cost()
        spec = tenant.kv.spec
        token_bytes = spec.block_bytes // spec.layers // tenant.kv.spec.block_tokens
        # Plans weigh rounds of requests that decode.
        line = Line(self.cost.batch_s / self.layers, self.cost.chunk(TYPICAL_TOKENS, 1) / self.layers)
        self.model = ServedLayers(tuple(Layer(size, token_bytes, line) for size in sizes))

    def layer_bytes(self, layer: int) -> int:
        """Of this layer."""
        return self.model.layers[layer].weight_bytes

    def step(self, demand: Mapping[str, Demand]) -> StepReport:
        """`Session.step`, and `tell`. Raises what both raise."""
        report: StepReport = self.session.step(demand)
        self.tell(report.moved)
        return report

    def tell(self, moved: Mapping[str, Mapping[int, int]]) -> None:
        """By tenant, live blocks (old -> new) that a call of this instance moved: the other tenants' are for `others`. Raises
        KVLost (fields instance, moved) if there are such, and no `others` to tell."""
        strange = {name: blocks for name, blocks in moved.items() if blocks and name != self.name}
        if not strange:
            return
        if self._others is None:
            raise KVLost(
                f"{sum(map(len, strange.values()))} live blocks of {sorted(strange)} moved beside {self.name!r}, and no others= "
                "is told, so their KV is lost; give the instance others=, or keep the session's other tenants idle",
                instance=self.name,
                moved=strange,
            )
        for name, blocks in strange.items():
            self._others(name, blocks)

    def _require_addresses(self) -> None:
        kv = self.tenant.kv
        needed = -(-self.memory_bytes // kv.spec.block_bytes)
        if kv.max_blocks < needed:
            raise InvalidArgument(
                f"the KV region of {self.name!r} must have places for the pages of its layers as well: {needed} blocks, got "
                f"max_blocks={kv.max_blocks}; nothing was created; attach with a larger max_blocks (addresses, not memory)",
                max_blocks=kv.max_blocks,
                needed=needed,
            )

    def _pass_cost(self) -> ChunkCost:
        kv = self.tenant.kv
        batch_tokens = self.limits.max_batch_tokens
        tokens = min(
            max(probes.PREFIX + probes.TOKENS, batch_tokens),
            self.limits.positions,
            kv.free_blocks * kv.spec.block_tokens,
        )
        stage = Stage(self.decoder, self.tenant, StageKV(kv, 0, self.layers), Whole(self.layers), samples=True)
        blocks = kv.allocate(-(-tokens // kv.spec.block_tokens))
        try:
            return probes.cost_of(partial(probes.timed, stage, blocks), tokens, batch_tokens)
        finally:
            kv.free(blocks)
