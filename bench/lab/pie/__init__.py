"""`bench.lab pie`: Pie's Figures 6 to 10 beside the library's own way of keeping KV in host memory, over several seeds.

events.py    Pie event by event: a policy
flexgen.py   what FlexGen takes
figures.py   what is run, and which of the paper's figures it stands beside
command.py   runs what is missing, and writes the page
"""
