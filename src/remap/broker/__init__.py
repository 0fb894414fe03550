# SPDX-License-Identifier: Apache-2.0
"""One arena for many processes: a broker owns the pages, members are sessions that join it (docs/broker.md).

| module | |
|---|---|
| messages.py | what goes over the socket |
| ledger.py | the owner of each page, the members that wait for some, and the one that is asked; pure |
| server.py | the broker: the pages' memfd, the socket, the ends of processes (`remap serve`) |
| member.py | a session's side: asking, giving, being asked, and joining the next broker |
| locks.py | the processes that may still have pages: locks on bytes of a file beside the socket |

Members' KV caches share one pool. A page goes from one process to another by way of the broker, and the process that gets it
zeroes it. Weights of a process that serves nothing become KV of others, and come home when it serves. When the broker is gone,
members serve on with the pages that they have, and join the next broker with them.
"""
