# SPDX-License-Identifier: Apache-2.0
"""Named machines and models, for the simulator and `remap plan`. Pure; facts with their sources, as JSON.

    machine("GH200-96GB").h2d_bytes_per_s           # 4.19e11
    machine("my-box", extra="my-box.json")          # a table of one's own, of the same form; `remap fit` writes one
    machine("H200").with_(h2d_bytes_per_s=40e9)     # what if

A name is looked up whatever its case: the full name, an alias of the table, or a beginning that fits one name only.

The form of a table, of which `tables/machines.json` and `tables/models.json` are the built-in ones:

    {"machines": {"my-box": {"like": "H100-SXM", "figures": {"h2d_bytes_per_s": {"value": 4.0e10, "source": "measured"}},
                             "roofline": {"eff_bw": 0.9}}},
     "models": {"my-model": {"like": "Llama-3-8b", "layers": 16}}}

A figure is a number, or an object with `value`, `source` and `grade`. A figure that an entry leaves out is taken from the entry
that it is `like`; an entry with the name of a built-in one changes that one.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remap.config import invalid

from ._tables import Extra, begins, resolve, table_of

__all__ = [
    "MOST_MISFIT",
    "POOR_MISFIT",
    "Extra",
    "Machine",
    "Model",
    "RooflineConstants",
    "machine",
    "model",
    "namesakes",
    "table_of",
]

POOR_MISFIT, MOST_MISFIT = 0.15, 0.5
"""A fit that is off by more than the first, in the mean of a group, is warned of; by more than the second, refused."""


def _number(name: str, value: object, *, least: float = 0.0, above: bool = True, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise invalid(name, value, "a finite number")
    if value < least or (above and value == least) or value > most:
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise invalid(name, value, f"{'above' if above else 'at least'} {least:g}{limit}")
    return float(value)


def _count(name: str, value: object, least: int = 1) -> int:
    number = _number(name, value, least=least, above=False)
    if number != int(number):
        raise invalid(name, value, f"a whole number of at least {least}")
    return int(number)


@dataclass(frozen=True)
class RooflineConstants:
    """How near operators come to a machine's limits. Raises InvalidArgument (field) for values out of range.

    An operator that moves `bytes` and computes `flop` takes ((bytes / (eff_bw * bandwidth))^p + (flop / (eff_flops *
    flops))^p)^(1/p) + op_overhead_s. eff_bw, eff_flops: shares of the nominal figures, above 0 and at most 1.2. p: at
    least 1; the larger, the sharper the knee. attn_decode_eff: share of the memory bandwidth at which decode attention reads
    the KV cache; attn_prefill_eff: share of the FLOP/s that prefill attention reaches. other_ops_s: norms, rotary embedding,
    activation, sums and cache writes of one layer; other_ops_s_per_token_per_khidden: what they take more for each
    token and each 1000 of the hidden size.
    """

    eff_bw: float
    eff_flops: float
    p: float
    op_overhead_s: float
    attn_decode_eff: float
    attn_decode_overhead_s: float
    attn_prefill_eff: float
    other_ops_s: float
    other_ops_s_per_token_per_khidden: float

    def __post_init__(self) -> None:
        shares = ("eff_bw", "eff_flops", "attn_decode_eff", "attn_prefill_eff")
        limits: dict[str, dict[str, Any]] = {name: {"most": 1.2} for name in shares}
        limits["p"] = {"least": 1.0, "above": False, "most": 100.0}
        for name in _CONSTANTS:
            number = _number(f"roofline.{name}", getattr(self, name), **limits.get(name, {"above": False}))
            object.__setattr__(self, name, number)


@dataclass(frozen=True)
class Machine:
    """One accelerator and its link to host memory. Bytes, bytes/s, FLOP/s, seconds. Raises InvalidArgument (field).

    hbm_bytes: device memory as the driver shows it. hbm_bytes_per_s, flops: nominal. link: its kind, in words.
    h2d_bytes_per_s, d2h_bytes_per_s: of large copies, alone. duplex: the share of a direction's bandwidth that is
    left while the other one is busy too. copy_setup_s: of each copy. create_page_s, map_page_s, set_access_s,
    unmap_page_s: driver calls for one 2 MiB page. iteration_gap_s: between two iterations of an engine. sources: figure ->
    "grade: source"; it is read only, and two machines with the same figures are equal whatever it says. misfit: of a fitted
    machine, group of measurements -> mean relative error of the fit.
    """

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: float
    link: str
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex: float
    copy_setup_s: float
    create_page_s: float
    map_page_s: float
    set_access_s: float
    unmap_page_s: float
    iteration_gap_s: float
    roofline: RooflineConstants
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    misfit: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("name", "link"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise invalid(name, getattr(self, name), "text that is not empty")
        object.__setattr__(self, "hbm_bytes", _count("hbm_bytes", self.hbm_bytes))
        for name in ("hbm_bytes_per_s", "flops", "h2d_bytes_per_s", "d2h_bytes_per_s"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        object.__setattr__(self, "duplex", _number("duplex", self.duplex, most=1.0))
        for name in _SECONDS:
            object.__setattr__(self, name, _number(name, getattr(self, name), above=False))
        if not isinstance(self.roofline, RooflineConstants):
            raise invalid("roofline", self.roofline, "RooflineConstants")

    def with_(self, **changes: Any) -> Machine:
        """A machine with other figures, those of the roofline included. Raises InvalidArgument (field) for unknown names
        and bad values. The changed figures' sources say so."""
        known = ("name", "link", "roofline", *_FIGURES, *_CONSTANTS)
        for name in changes:
            if name not in known:
                raise invalid("name of a figure", name, f"one of {', '.join(sorted(known))}")
        inner = {name: changes.pop(name) for name in _CONSTANTS if name in changes}
        told = [*(f"roofline.{name}" for name in inner), *(name for name in changes if name not in ("name", "link"))]
        if inner:
            changes["roofline"] = dataclasses.replace(changes.get("roofline", self.roofline), **inner)
        sources = {**self.sources, **dict.fromkeys(told, "changed by the caller")}
        return dataclasses.replace(self, **changes, sources=sources)

    @property
    def ratio(self) -> float:
        """R: memory bandwidth over host-to-device bandwidth, the figure that decides whether active layers can stream."""
        return self.hbm_bytes_per_s / self.h2d_bytes_per_s

    def copy_s(self, size: int, copies: int = 1) -> float:
        """Seconds to bring `size` bytes in from the host, alone on the link."""
        return copies * self.copy_setup_s + size / self.h2d_bytes_per_s


_SECONDS = ("copy_setup_s", "create_page_s", "map_page_s", "set_access_s", "unmap_page_s", "iteration_gap_s")
_FIGURES = ("hbm_bytes", "hbm_bytes_per_s", "flops", "h2d_bytes_per_s", "d2h_bytes_per_s", "duplex", *_SECONDS)
_CONSTANTS = tuple(f.name for f in dataclasses.fields(RooflineConstants))


@dataclass(frozen=True)
class Model:
    """One model's sizes. Raises InvalidArgument (field) for values out of range.

    layer_bytes: weights of one layer. resident_bytes: embeddings, head and final norm, which are never remapped.
    linear_ops: (name, k, n) of each matrix of one layer, k inputs and n outputs. head: (k, n). context: most tokens of a
    request. experts, active_experts, expert_ops: a mixture of experts has `experts` copies of each operator named
    in expert_ops, and each token uses `active_experts` of them; otherwise 1, 1 and (). matrix_bytes: of an element of the
    layers' matrices, where they are stored smaller than the rest, expert_bytes: of the experts', also a fraction (MXFP4); 0:
    dtype_bytes, matrix_bytes. dense_layers: beside `layers`, without experts; their weights are among resident_bytes. Latent
    attention is one KV head, of half the latent's size.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int
    layer_bytes: int
    resident_bytes: int
    linear_ops: tuple[tuple[str, int, int], ...]
    head: tuple[int, int]
    context: int
    experts: int = 1
    active_experts: int = 1
    expert_ops: tuple[str, ...] = ()
    matrix_bytes: int = 0
    expert_bytes: float = 0.0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise invalid("name", self.name, "text that is not empty")
        for name in (*_MODEL_COUNTS, "experts", "active_experts", "dense_layers"):
            object.__setattr__(self, name, _count(name, getattr(self, name), _LEAST.get(name, 1)))
        object.__setattr__(self, "matrix_bytes", _count("matrix_bytes", self.matrix_bytes, 0) or self.dtype_bytes)
        element = _number("expert_bytes", self.expert_bytes, above=False) or float(self.matrix_bytes)
        object.__setattr__(self, "expert_bytes", element)
        object.__setattr__(self, "linear_ops", _operators(self.linear_ops))
        if not isinstance(self.head, (list, tuple)) or len(self.head) != 2:
            raise invalid("head", self.head, "two numbers, inputs and outputs")
        object.__setattr__(self, "head", tuple(_count("head", size) for size in self.head))
        object.__setattr__(self, "expert_ops", tuple(self.expert_ops))
        unknown = [op for op in self.expert_ops if op not in {name for name, _, _ in self.linear_ops}]
        if unknown:
            raise invalid("expert_ops", self.expert_ops, f"names of linear_ops; {unknown} are none")
        if self.active_experts > self.experts:
            raise invalid("active_experts", self.active_experts, f"at most experts, {self.experts}")

    @property
    def matrices(self) -> tuple[tuple[int, int, int, int, float], ...]:
        """Of each of linear_ops: inputs, outputs, its copies, how many of them a token uses, and bytes of an element."""
        routed, plain = (self.experts, self.active_experts, self.expert_bytes), (1, 1, self.matrix_bytes)
        return tuple((k, n, *(routed if name in self.expert_ops else plain)) for name, k, n in self.linear_ops)

    @property
    def matrix_size(self) -> int:
        """Bytes of one layer's matrices, all experts' together."""
        return math.ceil(sum(k * n * copies * element for k, n, copies, _, element in self.matrices))

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return (self.layers + self.dense_layers) * self.kv_bytes_per_token_layer

    @property
    def weight_bytes(self) -> int:
        """All weights: layers, embeddings, head and final norm."""
        return self.layers * self.layer_bytes + self.resident_bytes


_MODEL_COUNTS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "dtype_bytes", "layer_bytes", "resident_bytes"),
    "context",
)
_LEAST = {"resident_bytes": 0, "dense_layers": 0, "context": 2}  # a prompt and an answer of one token each
_DEFAULTED = ("experts", "active_experts", "expert_ops", "matrix_bytes", "expert_bytes", "dense_layers")
_MODEL_FIELDS = (*_MODEL_COUNTS, "linear_ops", "head", *_DEFAULTED)


def _operators(value: Any) -> tuple[tuple[str, int, int], ...]:
    try:
        found = tuple((name, _count("linear_ops", k), _count("linear_ops", n)) for name, k, n in value)
        names = {name for name, _, _ in found if isinstance(name, str)}
    except (TypeError, ValueError):
        names = set()
    if not names or len(names) != len(found):
        raise invalid("linear_ops", value, "a list of [name, inputs, outputs], each with a name of its own")
    return found


# ---------------------------------------------------------------------------------------------- look-ups


def machine(name: str, extra: Extra = None) -> Machine:
    """The machine of that name. Raises InvalidArgument: an unknown or ambiguous name (fields: name, known), a malformed
    table (field: the offending one)."""
    table = table_of("machines", extra)
    found = resolve("machine", name, table)
    entry = table[found]
    figures = _part(entry, "figures", found, _FIGURES)
    constants = _part(entry, "roofline", found, (*_CONSTANTS, "source", "grade"))
    sources: dict[str, str] = {}
    values = {key: _value(figures, key, found, sources) for key in _FIGURES}
    inner = {key: _value(constants, key, found, {}) for key in _CONSTANTS}
    sources |= {f"roofline.{key}": _source(constants.get("grade"), constants.get("source")) for key in _CONSTANTS}
    return Machine(
        name=found,
        link=entry.get("link", ""),
        roofline=RooflineConstants(**inner),
        sources=sources,
        misfit=_misfit(entry.get("misfit", {}), found),
        **values,
    )


def model(name: str, extra: Extra = None) -> Model:
    """The model of that name. Raises InvalidArgument as `machine` does."""
    table = table_of("models", extra)
    found = resolve("model", name, table)
    about = ("aliases", "source", "grade", "parameters", "like", "assumed")
    entry = {key: part for key, part in table[found].items() if key not in about}
    for key in entry:
        if key not in _MODEL_FIELDS:
            raise invalid(found, key, f"made of {', '.join(_MODEL_FIELDS)}, aliases, source and grade")
    for key in _MODEL_FIELDS[: -len(_DEFAULTED)]:
        if key not in entry:
            raise invalid(f"{found}.{key}", None, "given (or `like` must name a model to take it from)")
    made = Model(name=found, **entry)
    _consistent(made)
    return made


_REST = 0.02
"""Share of a layer that norms, biases and a router take at most, beside a mebibyte."""


def _consistent(found: Model) -> None:
    """An entry that is like another one takes missing figures from there: sizes that then belong to two different models are
    refused, since every figure of a plan would be wrong."""
    matrices = found.matrix_size
    if not matrices <= found.layer_bytes <= matrices * (1 + _REST) + 2**20:
        many = f", {found.experts} experts" if found.experts > 1 else ""
        raise invalid(
            f"{found.name}.layer_bytes",
            found.layer_bytes,
            f"what its linear_ops take{many}: {matrices} bytes and a little more",
        )
    for name, k, n in found.linear_ops:
        width = (found.heads + 2 * found.kv_heads) * found.head_dim
        if name == "qkv" and (k, n) != (found.hidden, width):
            raise invalid(
                f"{found.name}.linear_ops", (name, k, n), f"('qkv', {found.hidden}, {width}) by hidden and heads"
            )


def namesakes(name: str, extra: Extra = None) -> tuple[str, ...]:
    """The other machines whose names begin with the name asked for: `H100` is H100-SXM, and H100-PCIe could be meant."""
    table = table_of("machines", extra)
    found, wanted = resolve("machine", name, table), name.strip().lower()
    return tuple(known for known in table if known != found and found.lower() != wanted and begins(known, wanted))


def _part(entry: Mapping[str, Any], part: str, name: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    value = entry.get(part)
    if not isinstance(value, Mapping):
        raise invalid(f"{name}.{part}", value, "an object of figures by name")
    for key in value:
        if key not in known:
            raise invalid(f"{name}.{part}", key, f"made of {', '.join(known)}")
    return value


def _misfit(given: object, name: str) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise invalid(f"{name}.misfit", given, "an object of mean relative errors by group")
    return {str(group): _number(f"{name}.misfit.{group}", error, above=False) for group, error in given.items()}


def _value(figures: Mapping[str, Any], key: str, name: str, sources: dict[str, str]) -> Any:
    """The figure's number; its source goes to `sources`."""
    if key not in figures:
        raise invalid(f"{name}.{key}", None, "given (or `like` must name a machine to take it from)")
    figure = figures[key]
    if not isinstance(figure, Mapping):
        sources[key] = "user's table"
        return figure
    if "value" not in figure:
        raise invalid(f"{name}.{key}", dict(figure), "a number, or an object with `value`")
    sources[key] = _source(figure.get("grade"), figure.get("source"))
    return figure["value"]


def _source(grade: object, source: object) -> str:
    return f"{grade or 'user'}: {source or 'no source given'}"
