"""The GPU suite: one command that builds, tests and measures this checkout on a machine with a GPU (bench/gpu/run.sh).

    run.sh        finds a Python, then `python -m bench.gpu --checkout`
    __main__.py   the order of things: steps, measures, table, JSON
    steps.py      build, conformance suite, tests/gpu, compute-sanitizer; each a process of its own
    worker.py     the process that measures; if it dies, the next one goes on with the next measure
    measures/     what is measured, one subject a file; registry.py says how a measure is declared

`python -m bench.gpu --emulated --seconds 20` runs the measures alone, on the emulated driver, with the `remap` that Python
finds: it proves that they run, and no figure of such a run is one of a GPU.
"""
