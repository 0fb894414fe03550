"""`bench.lab beyond`: what four papers lack and the library has, as figures: regret, all donors over time, lending between
processes, exactness. From what other commands have stored, and one load that is run here.

donors.py    where the KV of a load comes from, over time
exact.py     how many requests have the reference's tokens, experiment by experiment
pictures.py  the four pictures
page.py      the page, and the command
"""
