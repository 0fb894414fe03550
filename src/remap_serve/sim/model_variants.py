# SPDX-License-Identifier: Apache-2.0
"""A model in another dtype, and one device's share of it under tensor parallelism. Pure."""

from __future__ import annotations

import dataclasses

from remap.errors import InvalidArgument
from remap.policy.hardware import Model

__all__ = ["DTYPES", "in_dtype", "sharded"]

DTYPES = {
    "float32": (4, 4, 4),
    "bfloat16": (2, 2, 2),
    "float16": (2, 2, 2),
    "fp8": (1, 1, 2),
    "mxfp4": (17 / 32, 2, 2),
}
"""Name -> bytes of an element of experts' matrices, of the layers' other ones, and of all else, the KV cache included."""
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float8": "fp8"}
_BY_OUTPUT, _BY_INPUT = (
    ("qkv", "q", "q_b", "kv_b", "gate_up", "shared_gate_up", "fc1"),
    ("o", "down", "shared_down", "fc2"),
)
_WHOLE = ("q_a", "kv_a")  # what projects to the latents, on every device


def in_dtype(model: Model, dtype: str) -> Model:
    """The model with its weights in `dtype`. fp8: the layers' matrices in one byte an element; mxfp4: the experts' in 4.25
    bits; embeddings, head, norms, biases, activations and KV cache in 16 bit, scales of fp8 left out. Raises InvalidArgument
    (field dtype), for a dense model also of mxfp4."""
    name = _SHORT.get(dtype.lower(), dtype.lower()) if isinstance(dtype, str) else ""
    if name not in DTYPES or (name == "mxfp4" and model.experts == 1):
        raise InvalidArgument(
            f"dtype must be one of {', '.join((*DTYPES, *_SHORT))} (mxfp4 of a mixture of experts), got {dtype!r}; nothing was "
            "computed; other quantisations are not modelled",
            field="dtype",
            value=dtype,
        )
    expert, matrix, other = DTYPES[name]
    made = dataclasses.replace(model, dtype_bytes=other, matrix_bytes=matrix, expert_bytes=expert)
    rest, dense = model.layer_bytes - model.matrix_size, _dense_bytes(model)
    return dataclasses.replace(
        made,
        layer_bytes=made.matrix_size + rest // model.dtype_bytes * other,
        resident_bytes=(model.resident_bytes - dense) // model.dtype_bytes * other
        + dense // model.matrix_bytes * matrix,
    )


def _table_bytes(model: Model) -> int:
    """Of embeddings and head, or of what is both."""
    table = model.vocab * model.hidden * model.dtype_bytes
    return min(model.resident_bytes // table, 2) * table


def _dense_bytes(model: Model) -> int:
    """Of the layers without experts, their norms counted as matrices."""
    return model.resident_bytes - _table_bytes(model) if model.dense_layers else 0


def sharded(model: Model, devices: int) -> Model:
    """One device's part of the model under tensor parallelism over `devices`: heads, the MLP's width and the vocabulary are
    divided, norms and biases are whole on each; KV heads are copied where there are fewer of them than devices, and so is a
    latent. Raises InvalidArgument (field tp) where it does not divide."""
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
        if name in _WHOLE:
            operators.append((name, k, n))
            continue
        if name not in (*_BY_OUTPUT, *_BY_INPUT):
            raise _refuse(devices, f"1 for {model.name}: how its operator {name!r} is divided is not known")
        if (n if name in _BY_OUTPUT else k) % devices:
            raise _refuse(
                devices, f"a divisor of the width of {name!r} of {model.name}, {n if name in _BY_OUTPUT else k}"
            )
        operators.append((name, k, n // devices) if name in _BY_OUTPUT else (name, k // devices, n))
    divided = _table_bytes(model) + _dense_bytes(model)
    part = dataclasses.replace(model, heads=heads, kv_heads=kv_heads, linear_ops=tuple(operators))
    return dataclasses.replace(
        part,
        layer_bytes=part.matrix_size + model.layer_bytes - model.matrix_size,
        resident_bytes=model.resident_bytes - divided + -(-divided // devices),
        head=(model.head[0], -(-model.head[1] // devices)),
    )


def _refuse(value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"tp must be {expected}, got {value!r}; nothing was computed; correct tp", field="tp", value=value
    )
