"""The sentences of docs/notes/paper-vs-ours.md. What stands in braces is computed from what is stored (page.py)."""

__all__ = ["BEFORE", "HYBRIDSERVE", "KUNSERVE", "ONEIROS", "PIE"]

BEFORE = """# Four papers and ours

Four papers turn memory that holds weights, or memory of the host, into room for KV. This page says where their claims
hold in our simulation, under which load and metric, and where not. The library's own planner, arena and controller run
in it; time is virtual, and passes take what a roofline fitted to published measurements says.

Ours are medians of {seeds} seeds; ranges, loads and constants are beside the data. A minus is worse than the
baseline. `recompute` is vLLM's preemption, c the rate at which it is saturated. `ideal` is `recompute` with six times
the memory: a yardstick, no bound, as more requests run at once. –: not run, or meaningless. TTFT
is the time to the first token, TBT one gap between tokens, TPOT the mean gap of a request.

`python -m bench.lab four-papers` writes this page from `bench/results/*.json`.
"""

ONEIROS = """## Oneiros

*Li et al., KV Cache Optimization through Parameter Remapping for Multi-tenant LLM Serving.* A GH200; C1 is three models
in turns, C2 two; {oneiros_requests} requests a run. Four numbers in a cell, in %: P99 TBT lower; P99 TPOT lower; P99 TTFT
lower; tokens/s more. Ours is `remap:weights`, in Figs 11, 16 and 17 the library set as Oneiros describes it. Mean: over
the rates at which `recompute` preempts and still keeps up. It has no floor: one seed can weigh as much
as all others. Best: the most favourable rate. `ideal` (mean) was run at c,
for Fig. 14 and Fig. 8 with ShareGPT's lengths at 0.3 to 1.5 c.

{table}

**Holds: first tokens.** P99 TTFT is {ttft_least} to {ttft_most} % lower in the mean over rates, in each of Figs 8, 9,
10, 12 and 13, and up to {ttft_best} % at the best rate. **Holds under long queues: tokens/s.** C2 serves {c2_tokens} %
more at 2 c, long beside short requests {mixed_tokens} % more at c; at lower rates arrivals limit every policy.
**Depends on the metric: time between tokens.** One gap (P99 TBT) is not shorter in the mean of any figure, and more
memory is no sure remedy: in {worse} of the {loads} loads of [headline.md]({results}/headline.md)
`ideal` has a *longer* P99 gap than `recompute`, by {worse_least} to {worse_most} %. With 500 requests it has a P99 gap
that is 1 % shorter, or more, in {ideal_better} of {ideal_loads} loads and rates, and such a P99 TPOT in {ideal_tpot}.
More run at once and wait for each other, in C1 for turns of 1 s; `kv-pool+swap`, where weights stay, has gaps
{pool_c2} % shorter in C2. A request's mean gap (P99 TPOT) has the paper's sign with ShareGPT's lengths: {c1_tpot} %
shorter in C1 at 0.7 and 1 c ({c1_others} % at other rates), {c2_tpot} % in C2 from 0.2 c on, {fig9_tpot} % in Fig. 9 at
1:4 from 0.3 c on; hardly with Alpaca's, or in Figs 10, 12 and 13. The paper says TBT. **Algorithm 1 as printed**
(`algorithm-1`) does less: with ShareGPT's lengths, at 0.7 and 1 c, P99 TTFT is {printed_ttft} % lower than under
`recompute` (`remap:weights`: {ours_ttft}), P99 TPOT {printed_tpot}, as passes wait {printed_waits} % of their time: its
cap counts alpha layers, and m are copied (our reading). **Fig. 14** holds in direction, but for time between tokens.

All figures: [paper.md]({results}/paper.md); [both gaps at every
rate]({results}/paper.md#one-gap-between-tokens-and-the-mean-gap-of-a-request), [Fig.
4]({results}/paper.md#oneiros-fig-4-computation-of-a-pass-against-the-loading-of-layers).
"""

KUNSERVE = """## KunServe

*Cheng et al., Parameter-centric Memory Management for Efficient Memory Overloading Handling in LLM Serving.* Eight A800
with Qwen2.5-14B, 16 H800 with 72B; Poisson arrivals that double for 60 s. A range is over loads and baselines.
`kunserve` is the paper's policy or its step, `remap` ours.

{table}

P99 TTFT, times lower than vLLM's, by demand and work:

{map}

**Holds, in direction.** With the paper's policy the median P99 TTFT is lower than with every baseline in all four loads
(two of five seeds of LongBench 72B are later than every baseline, 12.0 and 13.6 s), and preemptions fall by
{preemptions} % or more. **The size is a question of load.**
{map_text}
{edge_text}
**Does not hold here:** lookahead hardly changes bubbles or tokens/s, restoring not the median first token.

Every step: [kunserve.md]({results}/kunserve.md). Forecasts, and bursts in which dropping does harm:
[kunserve-map.md]({results}/kunserve-map.md).
"""

HYBRIDSERVE = """## HybridServe

*Lee et al., Efficient LLM Inference with Activation Checkpointing and Hybrid Caching.* An RTX 4090, 128 offline
requests, weights that stream. `paper` is its Algorithm 1, ours the division with the least certified time. FlexGen is simulated.

{table}

**Holds:** mixtures serve more than KV alone and activations alone in {ahead} of the {batches} batches
of Fig. 12, by up to {most} times; in the others none can, by a bound. `ours` is within {above} % of it. **Holds
in the engine's loop**, in virtual time: it chose a mixture by its own calibration, and served {engine} times the
better of both (five seeds). No mixture won on a CPU ([offline.md]({results}/offline.md), {cases} cases), on
links outside the range in which one can. **Explained:** FlexGen's utilisation, {flexgen} % for their 7.4 and 12.6, as
its attention moves K and V three times. **Not the size:** with one link for both, 2.19 times FlexGen in the mean is
beyond the bound. **Not where computing is scarce:** on a GH200 mixtures gain at most {gh200} %. **Hardly
needed:** activations that stay, copies by mini-batch ({parts} % at most).

Every batch and the bound: [hybridserve.md]({results}/hybridserve.md).
"""

PIE = """## Pie

*Xu et al., Pooling CPU Memory for LLM Inference.* A GH200, one model, {pie_requests} requests a run, Poisson arrivals
at up to 3 c, 3 GB of KV unless said otherwise. Pie runs event by event; its copies begin when a layer starts, as printed,
or at any time. `+swap` is `remap:weights+swap`.

{table}

**Holds:** Fig. 6, if copies begin at any time; waits at 2.2, if not. **Not with more KV:** Fig. 7 has
{pie_least} to {pie_most} times the tokens/s with 3 to 9 GB. **Depends on the link:** models in turns, Pie (closed form) closes
{nvlink} % of the gap from `recompute` to `ideal` in P99 TTFT on a GH200, {pcie} % on an RTX 4090
([gap.md]({results}/gap.md)). **Against its closed form**, where expanding was free and only copies longer than a pass were
waited for, fixed expansions of the 13b models serve {starts} % fewer tokens/s, {anytime} % at any time. Still in Pie's favour:
only blocks in use are copied, larger layers find room for nothing, and we chose its adaptive rule's numbers.

Every size and rate: [pie.md]({results}/pie.md).

## What none of the four has

[Four figures]({results}/beyond.md): regret, all donors over time, lending between processes, exactness.
[More]({results}/paper.md#what-the-paper-does-not-have): bounds on stalls. [Gaps to `ideal`]({results}/gap.md), [what
weights add]({results}/map.md), [our engine]({results}/real.md).
"""
