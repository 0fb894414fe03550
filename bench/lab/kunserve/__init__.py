"""`bench.lab kunserve`: KunServe's Figures 12 to 17 beside its baselines and the library's plans, in the twin of its clusters.

figures.py   what is run, and which of the paper's numbers it stands beside
scaling.py   how long planning takes, and how many messages a change is, for up to 1,024 instances
command.py   runs what is missing, and writes the page
"""
