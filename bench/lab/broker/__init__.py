"""Two prototypes of how pages go from one process to another, and what a grant takes with each (docs/notes/broker.md).

messages.py   the ledger is the broker's own: members ask over a Unix-domain socket
shared.py     the ledger lies in a memfd, under a robust mutex that all processes share: members change it themselves
kills.py      what becomes of either when a process is killed or stopped in the middle
command.py    rounds in turns, the file of results, the table

Neither is the product: no versions, no limits, no uid checked, and the pages have no bytes. Both are Python on both sides, so
that they differ by the way and not by the language.
"""
