# SPDX-License-Identifier: Apache-2.0
"""The inputs of a plan, and its assumptions: memory, donors, fits, mixtures of experts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.errors import InvalidArgument
from remap.policy.hardware import MOST_MISFIT, POOR_MISFIT, Machine, Model
from remap.sizes import parse_memory

from .planning_numbers import Numbers
from .roofline import touched

__all__ = ["assumptions", "check_fit", "donated", "experts_note", "fit_note", "memory_beside", "memory_of", "short"]


def memory_of(text: str | int | None, machine: Machine) -> int:
    """Bytes of "40%" of the machine's device memory, or of a size such as "24GiB"; None: 90 %. Raises InvalidArgument."""
    return parse_memory("90%" if text is None else text, lambda: machine.hbm_bytes)


def short(value: object) -> str:
    return (
        repr(value)
        if not isinstance(value, int) or value.bit_length() < 128
        else f"a number of {value.bit_length()} bits"
    )


def check_fit(machine: Machine) -> None:
    group, error = max(machine.misfit.items(), key=lambda each: each[1], default=("", 0.0))
    if error > MOST_MISFIT:
        raise InvalidArgument(
            f"the figures of {machine.name} are of a fit that is off by {error:.1%} ({group}), at most {MOST_MISFIT:.0%} is of "
            "use; nothing was computed; measure the machine again",
            field="machine",
            value=machine.name,
            misfit=error,
        )


def fit_note(machine: Machine) -> Iterable[str]:
    """How far a fitted machine is off, in one sentence; nothing of others."""
    if machine.misfit:
        group, error = max(machine.misfit.items(), key=lambda each: each[1])
        warning = "WARNING: " if error > POOR_MISFIT else ""
        told = f"off by up to {error:.1%} in the mean ({group.replace('_', ' ')})"
        yield f"{warning}the figures of {machine.name} are fitted, and {told}"


def donated(donors: Sequence[Model]) -> int:
    return sum(donor.weight_bytes for donor in donors)


def memory_beside(machine: Machine, donors: Sequence[Model], given: int | None) -> int:
    """Bytes for weights and KV cache; donors' weights lie beside them."""
    beside = donated(donors)
    memory = max(0, memory_of(None, machine) - beside) if given is None else given
    if memory > machine.hbm_bytes:
        raise InvalidArgument(
            f"memory of {memory / 1e9:.1f} GB is more than the {machine.hbm_bytes / 1e9:.1f} GB that {machine.name} has; nothing "
            "was computed; give at most that, or a share such as 90%",
            field="memory",
            value=memory,
            available=machine.hbm_bytes,
        )
    if given is not None and beside and memory + beside > machine.hbm_bytes:
        raise InvalidArgument(
            f"donors take {beside / 1e9:.1f} GB of weights beside the memory of {memory / 1e9:.1f} GB, together "
            f"{(memory + beside) / 1e9:.1f} GB of the {machine.hbm_bytes / 1e9:.1f} GB of {machine.name}; nothing was computed; "
            f"give a memory of at most {max(0, machine.hbm_bytes - beside) / 1e9:.1f} GB, or fewer donors",
            field="donors",
            value=beside,
            available=machine.hbm_bytes - memory,
        )
    return memory


def experts_note(model: Model, rows: int | None = None) -> Iterable[str]:
    """How many experts a pass is taken to read, in one sentence; nothing of a dense model. rows: of the batch to name."""
    if model.experts > 1:
        batch = f", {touched(model.experts, model.active_experts, rows):.0f} with {rows} requests" if rows else ""
        yield (
            f"a pass reads those of the {model.experts} experts of {model.name} that its tokens touch in the mean{batch}, where "
            "half of them get 90 % of the selections: the skew is one model's, and no kernel for experts was measured"
        )


def assumptions(numbers: Numbers, whole: Model, donors: Sequence[Model], *, default_memory: bool) -> Iterable[str]:
    machine, model = numbers.machine, numbers.model
    if donors and default_memory:
        yield (
            f"memory is what 90% of the device leaves beside the donors' {donated(donors) / 1e9:.1f} GB of weights; --memory "
            "says otherwise"
        )
    if numbers.tp > 1:
        copied = " (KV heads are copied: there are fewer than devices)" if whole.kv_heads < numbers.tp else ""
        yield (
            f"tensor parallelism over {numbers.tp} devices: every figure is one device's share{copied}; each has a link of "
            "its own at full speed; the traffic between the devices is not counted, so that passes take longer and hide more "
            "than is said here, and tokens/s are lower"
        )
    if model.expert_bytes < model.dtype_bytes:
        of = "layers" if model.matrix_bytes < model.dtype_bytes else "experts"
        yield (
            f"matrices of {of} take {8 * model.expert_bytes:g} bits an element, scales of fp8 left out; all else, the KV cache "
            "included, takes 16; operators compute at the rate of 16 bit, which no measurement of this dtype backs"
        )
    elif model.dtype_bytes > 2:
        yield "the machine's FLOP/s are those of its table, which for a GPU are of 16 bit: computing in 32 bit takes longer"
    yield from experts_note(model, numbers.batch or numbers.balance.rows or None)
    yield from fit_note(machine)
