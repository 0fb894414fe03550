"""`bench.lab hybridserve`: HybridServe's Figures 12 to 15 beside the library's division of KV and activations, simulated.

batches.py   one offline batch on one machine: costs from the roofline, seconds from the library's certificate
orders.py    the same without activations that stay, or copies by mini-batch
flexgen.py   the same in FlexGen's schedule, with its attention
window.py    the bound: where a mixture can win, and by how much at most
engine.py    the library's engine itself, in virtual time
figures.py   what is run, and which of the paper's figures it stands beside
command.py   runs what is missing, and writes the page
"""
