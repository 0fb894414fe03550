"""What reproduces papers and measures for the project's own pages: run from the repository, not part of the wheel.

    __main__.py   `python -m bench.lab COMMAND`
    commands.py   the commands and their options
    machine/      operators, copies and driver calls of this machine, for `remap fit`
    paper/        figures of Oneiros beside those of a simulation (bench/results/paper.md)
    four_papers/  Oneiros, KunServe, HybridServe and Pie on one page (docs/notes/paper-vs-ours.md)
    beyond/       what the four papers lack, in four figures (bench/results/beyond.md)
    headline.py   the simulated headline of the README, over several seeds
    gap.py        what each policy gets of what memory is worth, over several seeds
    pie/          Pie's figures beside KV that streams, over several seeds
    hybridserve/  HybridServe's figures beside the library's division of KV and activations
    kunserve/     KunServe's figures beside its baselines, in the twin of its clusters, and a map of what dropping is worth
    real/         the project's engine under each policy on this machine, against memory for everything
    offline/      offline batches of models larger than their memory: KV, activations or both
    broker/       two prototypes of how pages go from one process to another (docs/broker.md)
    market/       how many models one GPU serves within their targets, against other ways to switch between them
    rounds.py     runs of `real` and `offline`: alternating rounds, equal tokens
    seeds.py      tables of several seeds or rounds, and their files
    apart.py      runs in processes of their own
    twin/         the demo's runs on this machine against their simulation
    vllm/         stock vLLM against vLLM on remap
    ablations/    each choice of the controller against its alternatives

Results are written below bench/results. What is measured is the `remap` that Python finds: .venv has the checkout's after
`make test`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository. Processes of one run start here, so that they find this package."""
