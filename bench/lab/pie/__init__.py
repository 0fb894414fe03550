"""`bench.lab pie`: Pie's Figures 6 to 9 beside the library's own way of keeping KV in host memory, over several seeds.

figures.py   what is run, and which of the paper's figures it stands beside
command.py   runs what is missing, and writes the page
"""
