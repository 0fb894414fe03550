"""Servers that know nothing of each other, each in a process of its own, in the same memory: `python -m bench.processes`."""
