# SPDX-License-Identifier: Apache-2.0
"""A model in another dtype, and one device's share of it under tensor parallelism. Pure."""

from __future__ import annotations

import dataclasses

from remap.errors import InvalidArgument
from remap.policy.hardware import Model

__all__ = ["DTYPES", "in_dtype", "least_rows", "sharded"]

DTYPES = {"float32": (4, 4), "bfloat16": (2, 2), "float16": (2, 2), "fp8": (1, 2)}
"""Name -> bytes of an element of the layers' matrices, and of everything else, the KV cache included."""
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float8": "fp8"}
_BY_OUTPUT, _BY_INPUT = ("qkv", "gate_up", "fc1"), ("o", "down", "fc2")
TOUCHED = 0.95
"""A batch counts as touching every expert of a mixture from this share on, with even routing."""


def in_dtype(model: Model, dtype: str) -> Model:
    """The model with its weights in `dtype`. fp8: the layers' matrices in one byte an element; embeddings, head, norms, biases,
    activations and KV cache in 16 bit, scales left out. Raises InvalidArgument (field dtype)."""
    name = _SHORT.get(dtype.lower(), dtype.lower()) if isinstance(dtype, str) else ""
    if name not in DTYPES:
        raise InvalidArgument(
            f"dtype must be one of {', '.join((*DTYPES, *_SHORT))}, got {dtype!r}; nothing was computed; other quantisations "
            "are not modelled",
            field="dtype",
            value=dtype,
        )
    matrix, other = DTYPES[name]
    elements = model.matrix_elements
    rest = (model.layer_bytes - elements * model.matrix_bytes) // model.dtype_bytes
    return dataclasses.replace(
        model,
        dtype_bytes=other,
        matrix_bytes=matrix,
        layer_bytes=elements * matrix + rest * other,
        resident_bytes=model.resident_bytes // model.dtype_bytes * other,
    )


def sharded(model: Model, devices: int) -> Model:
    """One device's part of the model under tensor parallelism over `devices`: heads, the MLP's width and the vocabulary are
    divided, norms and biases are whole on each; KV heads are copied where there are fewer of them than devices. Raises
    InvalidArgument (field tp) where it does not divide."""
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= 1024:
        raise _refuse(devices, "from 1 to 1024")
    if devices == 1:
        return model
    if model.heads % devices:
        raise _refuse(devices, f"a divisor of the {model.heads} heads of {model.name}")
    if model.kv_heads % devices and devices % model.kv_heads:
        raise _refuse(devices, f"a divisor or a multiple of the {model.kv_heads} KV heads of {model.name}")
    heads, kv_heads = model.heads // devices, max(1, model.kv_heads // devices)
    operators = []
    for name, k, n in model.linear_ops:
        if name == "qkv":
            operators.append((name, k, (heads + 2 * kv_heads) * model.head_dim))
            continue
        if name not in (*_BY_OUTPUT, *_BY_INPUT):
            raise _refuse(devices, f"1 for {model.name}: how its operator {name!r} is divided is not known")
        if (n if name in _BY_OUTPUT else k) % devices:
            raise _refuse(
                devices, f"a divisor of the width of {name!r} of {model.name}, {n if name in _BY_OUTPUT else k}"
            )
        operators.append((name, k, n // devices) if name in _BY_OUTPUT else (name, k // devices, n))
    table = model.vocab * model.hidden * model.dtype_bytes
    tables = min(model.resident_bytes // table, 2) * table
    part = dataclasses.replace(model, heads=heads, kv_heads=kv_heads, linear_ops=tuple(operators))
    rest = model.layer_bytes - model.matrix_elements * model.matrix_bytes
    return dataclasses.replace(
        part,
        layer_bytes=part.matrix_elements * model.matrix_bytes + rest,
        resident_bytes=model.resident_bytes - tables + -(-tables // devices),
        head=(model.head[0], -(-model.head[1] // devices)),
    )


def _refuse(value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"tp must be {expected}, got {value!r}; nothing was computed; correct tp", field="tp", value=value
    )


def least_rows(model: Model) -> int:
    """Tokens from which a batch touches TOUCHED of the experts, if each is as likely as another; 1 of a dense model.

    Below it, how many experts are read decides a layer's time, and real routing is not even: the roofline knows neither.
    """
    rows, left = 1, 1.0 - model.active_experts / model.experts
    while left**rows > 1.0 - TOUCHED:
        rows += 1
    return rows
