# SPDX-License-Identifier: Apache-2.0
"""One arena for many processes: a broker owns the pages, members are sessions that join it (docs/broker.md).

| module | |
|---|---|
| messages.py | what goes over the socket |
| ledger.py | who has which page, who waits for some, and who is asked; pure |
| server.py | the broker: the pages' memfd, the socket, the ends of processes (`remap serve`) |
| member.py | a session's side: asking, giving, being asked, and joining the next broker |
| locks.py | who may still have pages: locks on bytes of a file beside the socket |

What it does today: members' KV caches share one pool. A page goes from one process to another by way of the broker, and is zeroed
by who gets it. Weights of a process that serves nothing become KV of others, and come home when it serves. When the broker is
gone members serve on with what they have, and join the next one with it.
"""
