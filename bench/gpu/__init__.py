"""The GPU suite: builds, tests and measures this checkout on a machine with a GPU (bench/gpu/run.sh CALL, or `make gpu`).

    run.sh        finds a Python, then `python -m bench.gpu CALL --checkout`
    __main__.py   the command line
    calls.py      probe, build-and-check, measure, serve: what each runs, in which order, how long it may take
    suite.py      one call after another: build, steps, measures, table
    record.py     results.json and results.tar.gz: written while things run, gone on from later
    steps.py      the probe, the build, tests, compute-sanitizer, `remap doctor`; each a process of its own
    processes.py  processes that end when the suite does, killed or not (keeper.py)
    workers.py    starts processes that measure (worker.py); if one dies, the next one goes on with the next measure
    measures/     what is measured, one subject a file; registry.py says how a measure is declared, and in which call it is

`python -m bench.gpu measure --emulated --quick` runs measures alone, on the emulated driver, with the `remap` that Python
finds: it proves that they run, and no figure of such a run is one of a GPU.
"""
