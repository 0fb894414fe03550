# SPDX-License-Identifier: Apache-2.0
"""The simulated setup: machine, tenants and how they share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from remap.errors import InvalidArgument
from remap.policy.hardware import Extra, Machine, Model
from remap.policy.near_names import meant, nearest
from remap.sizes import parse_size
from remap_serve.sim.hf_config import find_model
from remap_serve.sim.passes import Cost
from remap_serve.sim.scheduling import SCHEDULERS

__all__ = ["COMBINATIONS", "SHARINGS", "TURNS", "Setup", "TenantSetup", "evenly", "tenants"]

TURNS = ("epochs", "temporal")
SHARINGS = (*TURNS, "spatial", "mig")
COMBINATIONS: Mapping[str, str] = {
    "C1": "OPT-13b:35%,Llama-2-13b:35%,Llama-3-8b:20%",
    "C2": "OPT-30b:65%,OPT-6.7b:15%",
}
"""Oneiros, Table 1: models and their shares of the device's memory."""

ALONE = 0.9
"""The share of the device's memory that a model alone has, where none is given (vLLM's gpu_memory_utilization)."""


@dataclass(frozen=True)
class TenantSetup:
    """One tenant: weights, activations and KV in `memory_bytes`. name: as in the items. priority: see `Session.attach`.

    kv_blocks: of its reservation, as they are; None: what `memory_bytes` leaves. cost: seconds of computation, with the two
    methods of `Roofline`; None: the roofline of the machine. Only the latter knows the part of a device that "mig" gives.
    assumed: of the model, in sentences.
    """

    name: str
    model: Model
    memory_bytes: int
    priority: int = 0
    kv_blocks: int | None = None
    cost: Cost | None = None
    assumed: tuple[str, ...] = ()


ACTIVATION_BYTES = 500_000_000
"""Taken by each engine besides weights and KV: an assumption."""
PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class Setup:
    """The simulated setup, but for the policy and the requests.

    sharing: "epochs" (memory in turns of `quantum_s`, passes in rounds), "temporal" (one tenant computes at a time, in turns of
    `quantum_s`), "spatial" (all compute, and passes that overlap share the device) or "mig" (every tenant has a partition of its
    own: memory as reserved, and equal parts of computation, memory bandwidth and link). scheduler: "prefill-first" or "chunked".
    gap_s: between two passes of a tenant; None: the machine's. activation_bytes: taken by each engine besides weights and KV.
    scheduling: the scheduler's settings that are not vLLM's defaults, see `make_scheduling`.

    Raises InvalidArgument for unknown names, no tenants, two of one name, or a reservation that leaves no KV.
    """

    machine: Machine
    tenants: tuple[TenantSetup, ...]
    sharing: str = "temporal"
    scheduler: str = "prefill-first"
    quantum_s: float = 1.0
    block_tokens: int = 16
    gap_s: float | None = None
    activation_bytes: int = ACTIVATION_BYTES
    page_bytes: int = PAGE_BYTES
    scheduling: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for field_name, value, known in (
            ("sharing", self.sharing, SHARINGS),
            ("scheduler", self.scheduler, SCHEDULERS),
        ):
            if value not in known:
                near = meant(nearest(str(value), known))
                raise InvalidArgument(
                    f"{field_name} must be one of {', '.join(known)}, got {value!r}{near}; nothing was made",
                    **{field_name: value},
                )
        names = [tenant.name for tenant in self.tenants]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument(
                f"expected at least one tenant, each with a name of its own, got {names}; nothing was made",
                tenants=names,
            )
        reserved = sum(tenant.memory_bytes for tenant in self.tenants)
        if reserved > self.machine.hbm_bytes:
            raise InvalidArgument(
                f"the tenants reserve {reserved} bytes, {self.machine.name} has {self.machine.hbm_bytes}; nothing was made; give "
                "them smaller shares",
                requested=reserved,
                available=self.machine.hbm_bytes,
            )
        for tenant in self.tenants:
            if self.kv_blocks(tenant) < 1:
                weights = tenant.model.layers * tenant.model.layer_bytes + tenant.model.resident_bytes
                raise InvalidArgument(
                    f"{tenant.name} reserves {tenant.memory_bytes} bytes; its weights take {weights} and its activations "
                    f"{self.activation_bytes}, which leaves no block of KV; nothing was made; reserve more",
                    tenant=tenant.name,
                    requested=weights + self.activation_bytes,
                    available=tenant.memory_bytes,
                )

    @property
    def gap(self) -> float:
        """Seconds between two passes."""
        return self.machine.iteration_gap_s if self.gap_s is None else self.gap_s

    def times(self, factor: int) -> Setup:
        """The same with `factor` times the memory: the machine's, every reservation's, and blocks that were given."""
        tenants = tuple(
            replace(
                tenant,
                memory_bytes=factor * tenant.memory_bytes,
                kv_blocks=None if tenant.kv_blocks is None else factor * tenant.kv_blocks,
            )
            for tenant in self.tenants
        )
        return replace(self, machine=self.machine.with_(hbm_bytes=factor * self.machine.hbm_bytes), tenants=tenants)

    def whole(self) -> Setup:
        """The same, but every tenant's reservation is as large as all are together."""
        reserved = sum(tenant.memory_bytes for tenant in self.tenants)
        tenants = tuple(replace(tenant, memory_bytes=reserved, kv_blocks=None) for tenant in self.tenants)
        return replace(
            self, machine=self.machine.with_(hbm_bytes=len(tenants) * self.machine.hbm_bytes), tenants=tenants
        )

    def kv_blocks(self, tenant: TenantSetup) -> int:
        """Blocks of KV that the reservation leaves, layers in whole pages, or that were given."""
        if tenant.kv_blocks is not None:
            return tenant.kv_blocks
        pages = -(-tenant.model.layer_bytes // self.page_bytes) * tenant.model.layers
        left = tenant.memory_bytes - pages * self.page_bytes - tenant.model.resident_bytes - self.activation_bytes
        return left // (self.block_tokens * tenant.model.kv_bytes_per_token)


def tenants(text: str, on: Machine, models: Extra = None) -> tuple[TenantSetup, ...]:
    """From "C1", "C2", one model, or "OPT-13b:35%,chat=Llama-3-8b:20GiB": models with shares of the machine or sizes.

    A model is a name of the tables, or the path of a checkpoint's config.json or its folder (without a colon in it).

    A model that occurs twice gets a number behind its name, unless it has one before "=". models: the user's own (see
    `hardware.model`). Raises InvalidArgument for an unknown model or a share that is none.
    """
    parts = [part.strip() for part in COMBINATIONS.get(text, text).split(",") if part.strip()]
    made: list[TenantSetup] = []
    for part in parts:
        name, equals, rest = part.rpartition("=")
        label, _, share = rest.partition(":")
        if equals and not name.strip():
            raise InvalidArgument(f"{part!r} has no name before '='; nothing was made; give one", tenant=part)
        found, assumed = find_model(label, models)
        chosen = name if equals else found.name
        if not equals and any(one.name == chosen for one in made):
            chosen = f"{chosen}-{sum(one.model is found or one.model.name == found.name for one in made) + 1}"
        if not share and len(parts) > 1:
            raise InvalidArgument(
                f"{part!r} says no share; several tenants need one each, as in OPT-13b:35%,Llama-3-8b:20%; nothing was made",
                tenant=part,
            )
        made.append(TenantSetup(chosen, found, _bytes(share, on), assumed=assumed))
    if not made:
        raise InvalidArgument(
            f"expected models or one of {', '.join(COMBINATIONS)}, got {text!r}; nothing was made", tenants=text
        )
    return tuple(made)


def evenly(names: Sequence[str], on: Machine, memory_bytes: int, models: Extra = None) -> tuple[TenantSetup, ...]:
    """These models in `memory_bytes` of the machine, each with as many tokens of KV as the others. names: as in `tenants`,
    without shares.

    Raises InvalidArgument for no model, an unknown one, and (fields requested, available) for weights that leave no KV.
    """
    found = [find_model(name.strip(), models) for name in names if name.strip()]
    if not found:
        raise InvalidArgument("no model was given; nothing was made; name at least one", models=tuple(names))
    fixed = [
        model.layers * -(-model.layer_bytes // PAGE_BYTES) * PAGE_BYTES + model.resident_bytes + ACTIVATION_BYTES
        for model, _ in found
    ]
    left = memory_bytes - sum(fixed)
    tokens = left // sum(model.kv_bytes_per_token for model, _ in found)
    if tokens < 1:
        raise InvalidArgument(
            f"the weights and activations of {', '.join(model.name for model, _ in found)} take {sum(fixed) / 1e9:.1f} GB, and "
            f"{memory_bytes / 1e9:.1f} GB of {on.name} are given, which leaves no KV cache; nothing was made; give more "
            "memory, or fewer or smaller models",
            requested=sum(fixed),
            available=memory_bytes,
        )
    made: list[TenantSetup] = []
    for (model, assumed), nbytes in zip(found, fixed):
        same = sum(one.model.name == model.name for one in made)
        name = f"{model.name}-{same + 1}" if same else model.name
        made.append(TenantSetup(name, model, nbytes + tokens * model.kv_bytes_per_token, assumed=assumed))
    return tuple(made)


def _bytes(share: str, on: Machine) -> int:
    if not share:
        return int(ALONE * on.hbm_bytes)
    if not share.endswith("%"):
        return parse_size(share, "tenants")
    try:
        part = float(share[:-1]) / 100.0
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise InvalidArgument(f"a share is above 0 and at most 100 %, got {share!r}; nothing was made", share=share)
    return int(part * on.hbm_bytes)
