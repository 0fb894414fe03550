"""What a simulated cluster is made of: instances of one model on one kind of machine, their network, and what computing takes.
Pure.

A pass through layers takes what the roofline says (`remap_serve.sim.roofline`), attention to prefixes included. With tensor
parallelism an instance is several devices: each computes its share of each layer, and two sums over all of them follow each
layer.

The planner knows less: seconds by tokens alone (`placement.Layer`), and the cost of chunks (`lookahead.ChunkCost`). Both are
read off the roofline here, as a deployment would measure them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from remap.policy.hardware import Machine, machine, model
from remap.policy.hardware import Model as Sizes
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.lookahead import ChunkCost
from remap_serve.policy.cluster.pipeline import Network
from remap_serve.policy.cluster.placement import Layer, ServedLayers
from remap_serve.sim.model_variants import sharded
from remap_serve.sim.roofline import Roofline, prefill_pairs
from remap_serve.sim.sequences import Work

__all__ = ["CLUSTER_A", "CLUSTER_B", "Hardware"]

MEMORY_SHARE = 0.9  # of the device's memory for weights and KV: vLLM's default
DROP_S = 0.005
"""Until a change of mappings is done on an instance (KunServe, section 4.1)."""


@dataclass(frozen=True)
class Hardware:
    """So many instances of a model, each on `tp` machines. Bytes/s and seconds.

    network_bytes_per_s: of one instance, each way; setup_s: of each message. sum_bytes_per_s, sum_setup_s: of the links within
    an instance, for the sums of tensor parallelism. context: tokens of a typical request, for what the planner knows.
    """

    machine_name: str
    model_name: str
    instances: int
    network_bytes_per_s: float
    tp: int = 1
    setup_s: float = 20e-6
    sum_bytes_per_s: float = 300e9
    sum_setup_s: float = 10e-6
    drop_s: float = DROP_S
    context: int = 1024

    @cached_property
    def machine(self) -> Machine:
        return machine(self.machine_name)

    @cached_property
    def whole(self) -> Sizes:
        """The model on one instance, whatever that consists of."""
        return model(self.model_name)

    @cached_property
    def _roofline(self) -> Roofline:
        return Roofline(self.machine, sharded(self.whole, self.tp))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the instances."""
        return tuple(f"i{number}" for number in range(self.instances))

    @cached_property
    def memory_bytes(self) -> int:
        """For layers and KV, on each instance: embedding and head stay on each."""
        resident = self._roofline.model.resident_bytes * self.tp
        return int(MEMORY_SHARE * self.machine.hbm_bytes * self.tp) - resident

    @property
    def host_bytes_per_s(self) -> float:
        """From an instance's own host memory: each device has a link of its own."""
        return self.machine.h2d_bytes_per_s * self.tp

    def layers_s(self, layers: int, work: Work) -> float:
        """Seconds of so many layers over one microbatch."""
        seconds = self._roofline.layer_s(work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_context)
        return layers * (seconds + self._sums_s(work.tokens))

    def ends_s(self, work: Work) -> float:
        """Seconds of embedding and head."""
        return self._roofline.ends_s(work.tokens, work.parts)

    def hop_bytes(self, tokens: int) -> int:
        """The activations of so many tokens, between two stages."""
        return tokens * self.whole.hidden * self.whole.dtype_bytes

    def _sums_s(self, tokens: int) -> float:
        """A ring's all-reduce behind attention, and one behind the MLP."""
        if self.tp == 1:
            return 0.0
        moved = 2.0 * (self.tp - 1) / self.tp * self.hop_bytes(tokens)
        return 2.0 * (self.sum_setup_s + moved / self.sum_bytes_per_s)

    @cached_property
    def model(self) -> ServedLayers:
        """What the planner knows of it: layers without embedding and head."""
        one, many = self._decode_s(1), self._decode_s(256)
        each = (many - one) / 255
        line = Line(max(0.0, one - each), each)
        kv = self.whole.kv_bytes_per_token_layer
        return ServedLayers(tuple(Layer(self.whole.layer_bytes, kv, line) for _ in range(self.whole.layers)))

    def _decode_s(self, rows: int) -> float:
        return self.layers_s(1, Work(0, 0, rows, rows * self.context, rows))

    @cached_property
    def network(self) -> Network:
        hop = Line(self.setup_s, self.hop_bytes(1) / self.network_bytes_per_s)
        return Network(hop, self.network_bytes_per_s, self.host_bytes_per_s)

    @cached_property
    def chunk_cost(self) -> ChunkCost:
        """Of chunks of prompts."""
        layers = self.whole.layers
        few, many = self._prefill_s(512), self._prefill_s(4096)
        token_s = (many - few) / (4096 - 512)
        pair_s = layers * (self._layer_s(1, 1001) - self._layer_s(1, 1)) / 1000
        return ChunkCost(pair_s, 0.0, token_s, 0.0, max(0.0, many - 4096 * token_s))

    def _layer_s(self, tokens: int, pairs: int) -> float:
        return self._roofline.layer_s(tokens, pairs, 0, 0)

    def _prefill_s(self, tokens: int) -> float:
        """Of a prompt without its attention."""
        whole = self.layers_s(self.whole.layers, Work(tokens, 0, 0, 0, 1))
        return whole + self.ends_s(Work(tokens, 0, 0, 0, 1))

    def prompt_s(self, tokens: int) -> float:
        """Of a prompt that one instance computes alone, whole."""
        work = Work(tokens, prefill_pairs(tokens), 0, 0, 1)
        return self.layers_s(self.whole.layers, work) + self.ends_s(work)

    @cached_property
    def capacity(self) -> int:
        """Tokens of KV of an instance that serves alone."""
        sizes = self.model
        free = self.memory_bytes - sizes.weight_bytes(0, len(sizes.layers))
        return free // sizes.kv_bytes(0, len(sizes.layers))


# KunServe, Table 2. 200 Gb/s for each A800, which has a server of its own; 400 Gb/s for each H800.
CLUSTER_A = Hardware("A800-80GB", "Qwen2.5-14B", 8, 25e9)
"""Eight A800 with a Qwen2.5-14B each."""
CLUSTER_B = Hardware("H800-80GB", "Qwen2.5-72B", 4, 4 * 50e9, tp=4)
"""Two servers of eight H800: four instances of Qwen2.5-72B, each on four devices."""
