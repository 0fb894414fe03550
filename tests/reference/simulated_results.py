"""Reads back what `remap simulate --json` prints, to test that nothing is lost in it but what is thinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from remap_serve.sim.results import PolicyResult, Sample, Targets, TenantResult


def from_json(data: Mapping[str, Any]) -> PolicyResult:
    """The result that `PolicyResult.to_json` wrote."""
    columns = [data["timeline"][field.name] for field in fields(Sample)]
    return PolicyResult(
        policy=data["policy"],
        tenants=tuple(_tenant(entry) for entry in data["tenants"]),
        timeline=tuple(Sample(*row) for row in zip(*columns, strict=True)),
        virtual_s=data["virtual_s"],
        wall_s=data["wall_s"],
        iterations=data["iterations"],
        decisions=data["decisions"],
        targets=Targets(**data["targets"]),
    )


def _tenant(entry: Mapping[str, Any]) -> TenantResult:
    known = {field.name: entry[field.name] for field in fields(TenantResult)}
    for name in ("ttft_s", "tpot_s", "longest_gap_s"):
        known[name] = tuple(known[name])
    known["tbt"] = tuple((float(value), int(count)) for value, count in known["tbt"])
    return TenantResult(**known)


def from_report(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[PolicyResult, ...]]:
    """Configuration and results of a report, in its order."""
    return dict(data["configuration"]), tuple(from_json(entry) for entry in data["policies"].values())
