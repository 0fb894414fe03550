"""`bench.lab offline`: offline batches in the real engine, by how their cache is kept, several rounds of the same requests.

python -m bench.lab offline                  runs what is missing (about half an hour on two cores) and writes the page
python -m bench.lab offline --quick          small random models: that it runs
python -m bench.lab offline --report-only    writes the page of what is stored
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lab import ROOT, rounds, seeds
from bench.lab.apart import run_apart
from bench.lab.hybridserve.batches import Batch
from bench.lab.seeds import Column

from .cases import GROUPED, POLICIES, SUITES, Case
from .order import order

__all__ = ["RESULTS", "run_offline"]

RESULTS = ROOT / "bench" / "results" / "offline.json"
MODULE = "bench.lab.offline.one"
COLUMNS = (
    Column("tokens_per_s", "tokens/s", more_is_better=True),
    Column("decode_tokens_per_s", "tokens/s of passes without prompts", more_is_better=True),
    Column("full_pass_s", "a pass of all, ms", 1e3),
    Column("expected_pass_s", "expected, ms", 1e3),
    Column("choosing_s", "choosing, s"),
    Column("activation_share", "activations, %", 100.0),
    Column("running_peak", "requests at once, most"),
    Column("passes", "passes"),
    Column("computing_s", "computing, s"),
    Column("waiting_s", "waiting, s"),
    Column("cpu_s", "processor time, s"),
    Column("weights_in_bytes", "weights in, MB", 1e-6),
    Column("kv_in_bytes", "KV in, MB", 1e-6),
    Column("activations_in_bytes", "activations in, MB", 1e-6),
    Column("cache_in_bytes", "both and between, MB", 1e-6),
    Column("kv_out_bytes", "KV out, MB", 1e-6),
    Column("activations_out_bytes", "activations out, MB", 1e-6),
)
ORDERS = [
    Batch("RTX-4090", model, prompt)
    for model in ("OPT-6.7b", "OPT-13b", "OPT-30b", "OPT-66b")
    for prompt in (128, 512, 1920)
]
PAGE = """# Offline batches of a model larger than its memory, {rounds} rounds

Measured on {machine}. The 1-minute load before the runs was {load}. {threads} thread computes, greedy; copies are made by
another thread of the same processor. Models have random weights, prompts are random tokens. Each figure is the median of n
rounds, (worst to best); the policies alternate within a round. Tokens/s count from the first step, in which the ratio is chosen,
to the last token. Made by `python -m bench.lab offline`.

{tokens}

{policies}

{cases}

All but `{first}` have the same session and host memory, layers that stay, buffers and scratch blocks, and measure before they
begin. Waiting: passes for copies. Computing: all other time from the first step on, on a busy machine others' too. Processor
time: of all threads, copies included. Between: a pass copies a run of host blocks, with those that nobody of the pass has.
A pass of all: the median of those without prompts in which as many requests run as ever do in the run. Expected: of such a
pass, by `remap_serve.policy.offline` from what the run itself measured.

{table}

## Grouped queries

{refused}

{text}## What a finer order of copies would be worth

Simulated, not measured: HybridServe's batches of Figure 12 on an RTX 4090, 128 requests at once, as in
[hybridserve.md](hybridserve.md), the middle pass of the answers. In parts: each mini-batch's blocks are copied when its turn
comes ([layerwise.py](../lab/hybridserve/layerwise.py)). Whole: as the library's prefetcher copies, a layer's blocks for all
mini-batches in one copy ([kv_stream.py](../../src/remap/policy/kv_stream.py)), which is what the engine's certificate counts.
Then two buffers hold the whole batch's part of a layer. Where the device's 10 % for buffers are too few, the requests are
served in so many batches one after another. With buffers that take their room from weights instead, as this engine lays out its
memory, a whole layer's copies cost 1 to 11 % ([hybridserve.md](hybridserve.md)).

{orders}
"""
TEXT = """## What it says

Good: in each case `best` chose what was the quickest of the fixed ratios, or within 3 % of it: KV alone where copies stay within
the processor's memory, activations alone over the slower link. There activations give a fifth more tokens/s than KV alone (OPT
+23 %, Llama +21 %). All tokens are equal.

Bad: elsewhere activations give half as many, since the processor has no time to spare. With host memory for 30 % of the
KV, twice as many requests run at once with them, and they still give a third fewer. No mixture was better than the
better of both alone, so Algorithm 1 and `best` hardly differ: these links are outside of the range in which a mixture
can win, and [inside of it one does](hybridserve.md#where-a-mixture-can-win-and-by-how-much-at-most), in virtual time.
The time expected of a pass is within 2 % over the slower link, but up to two fifths too short for short requests: their
passes have costs that do not grow with their tokens, and these are not counted.

"""


def orders() -> str:
    """Markdown: `order` of each batch."""
    out = ["| model | prompt | in parts, s | whole, s | buffers, GB | wanted, GB | batches | in batches that fit, s |"]
    out.append("|" + "---|" * 8)
    for found in map(order, ORDERS):
        worse, split = (seconds / found.parts_s - 1.0 for seconds in (found.whole_s, found.split_s))
        out.append(
            f"| {found.batch.model} | {found.batch.prompt} | {found.parts_s:.3g} | {found.whole_s:.3g} ({worse:+.1%}) | "
            f"{found.buffer_bytes / 1e9:.1f} | {found.wanted_bytes / 1e9:.1f} | {found.batches} | "
            f"{found.split_s:.3g} ({split:+.0%}) |"
        )
    return "\n".join(out)


def _page(data: Mapping[str, Any], suite: rounds.Suite[Case], text: str) -> str:
    said = data["refused"]
    refused = "Not run yet."
    if said:
        refused = (
            f"A random Llama with {GROUPED.kv_heads} KV heads for {GROUPED.heads} query heads, asked for 1:1: `{said['asked']}` "
            f"Asked to choose, the engine takes {said['chosen'][0]}:{said['chosen'][1]}."
        )
    return PAGE.format(
        rounds=suite.rounds,
        machine=rounds.machine_of(data),
        load=rounds.loads_of(data),
        threads=suite.threads,
        first=next(iter(POLICIES)),
        tokens=rounds.said_of_tokens(data, next(iter(POLICIES))),
        policies="\n".join(f"- `{name}`: {about}" for name, about in POLICIES.items()),
        cases="\n".join(f"- {case.name}: {case}" for case in suite.cases),
        table=rounds.table(data, suite, list(POLICIES), COLUMNS),
        refused=refused,
        text=text,
        orders=orders(),
    )


def run_offline(results: Path, suite_name: str = "full", *, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a
    file of something else or of another machine before anything runs, and what a run raises.
    """
    suite = SUITES[suite_name]
    data = seeds.read(results, {**rounds.empty(suite.settings()), "refused": {}}, "offline")
    if not report_only:
        rounds.require_machine(data, results)
        if not data["refused"]:
            data["refused"] = run_apart("refusal", MODULE, GROUPED.name, threads=suite.threads)
            seeds.write(results, data)
        cases = [case.name for case in suite.cases]
        rounds.run_missing(data, results, MODULE, suite_name, cases, list(POLICIES), suite.rounds, suite.threads)
    text = _page(data, suite, TEXT if suite_name == "full" else "")
    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
