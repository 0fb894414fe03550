"""Figures of Oneiros beside those of a simulation.

experiments.py   what is compared: headlines.json holds the papers' figures, experiment_list.py lists what answers them
runs.py          every run, stored and resumed
reckoning.py     from points to what stands beside a figure; arithmetic.py, of the one that is not simulated
report.py        bench/results/paper.md and the table; report_text.py has its words, pictures.py draws
command.py       progress, and what is written
"""
