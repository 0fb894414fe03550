"""How long a simulation takes: 10,000 requests for three models on one GH200, under load, on one core."""

from __future__ import annotations

import pytest
from measure import record, rounds, seconds_of

from remap.policy.hardware import machine
from remap_serve.sim.serving import Setup, simulate, tenants
from remap_serve.sim.workload import SHAREGPT, Arrivals, Load, generate

REQUESTS = 10_000
RATE = 3.0  # requests a second, of each model: their KV does not suffice


@pytest.mark.parametrize("policy", ["remap", "recompute"])
def test_ten_thousand_requests(benchmark, policy):
    gh200 = machine("GH200-96GB")
    setup = Setup(gh200, tenants("C1", gh200))
    loads = [Load(tenant.name, Arrivals(rate=RATE), SHAREGPT) for tenant in setup.tenants]
    requests = rounds(benchmark, REQUESTS, 300)
    items = generate(loads, 1.1 * REQUESTS / (RATE * len(loads)), seed=1)[:requests]
    assert len(items) == requests
    result = benchmark.pedantic(simulate, (setup, items, policy), rounds=1, iterations=1)
    assert result.requests_finished == requests
    context = {tenant.name: tenant.model.context for tenant in setup.tenants}
    asked = 0
    for item in items:
        prompt = min(item.prompt_tokens, context[item.tenant] - 1)
        asked += min(item.output_tokens, context[item.tenant] - prompt)
    assert result.output_tokens == asked
    assert not benchmark.enabled or result.preemptions > 0 or result.layers_remapped_peak >= 1  # under load
    seconds = seconds_of(benchmark)
    record(
        benchmark,
        f"simulating {REQUESTS} requests, {policy}",
        seconds[0],
        "s",
        seconds,
        target=60.0,
        iterations=result.iterations,
        output_tokens=result.output_tokens,
        virtual_s=result.virtual_s,
    )
