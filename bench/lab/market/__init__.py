"""How many models one GPU serves within their targets: `python -m bench.lab market` (see `page.py`).

world.py       one GPU in virtual time: requests, passes by the roofline, a link that copies one thing after another
strategies.py  the models on the device, and whose turn it is: ours, and those to compare with
page.py        the grid, the search for the most models, the stored file and the page
"""
