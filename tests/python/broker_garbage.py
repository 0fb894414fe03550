"""Who speaks to a broker otherwise than it should: `python broker_garbage.py SOCKET SEED PACKETS`. Prints how many it sent."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

from remap.broker.locks import lock_member
from remap.broker.messages import (
    MOST_BYTES,
    VERSION,
    Claim,
    Disown,
    Done,
    Fetch,
    Give,
    Home,
    Join,
    Look,
    Pages,
    Report,
    Want,
    encode,
)

PAGES = 96


def packet(rng: random.Random) -> bytes:
    """A message whose numbers may be wrong, of which a byte may be another one, or the end lacking; or anything, at any depth."""
    if rng.random() < 0.02:
        return b"\x82\xa4type\xa4Join\xa1x" + rng.choice((b"\x91", b"\x81\xa1a")) * rng.randrange(30_000) + b"\xc0"
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(1, 100))
    page, serial = rng.randrange(-1, PAGES + 2), rng.randrange(100)
    runs = ((page, rng.randrange(1, 4)),) * rng.choice((1, 1, 1, 2))
    messages = [
        Want(serial, page),
        Give(runs, lent=rng.random() < 0.5),
        Home(serial, runs),
        Disown(runs),
        Done(serial),
        Fetch(max(0, page)),
        Join(1),
        Join(VERSION, number=1 + serial, arena="a" * rng.randrange(3), claims=max(0, page)),
        Claim(runs, lent=rng.random() < 0.5),
        Pages(page, serial),
        Look(rng.choice((VERSION, serial))),
        Report(serial, page, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, (), ()),
    ]
    found = bytearray(encode(rng.choice(messages)))
    if rng.random() < 0.3:
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found[: rng.randrange(1, len(found) + 1)] if rng.random() < 0.1 else found)


def main(path: str, seed: str, count: str) -> None:
    rng, sent = random.Random(int(seed)), 0
    while sent < int(count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(path)
            connection.settimeout(60)
            locked = lock_member(Path(path))
            if rng.random() < 0.9:
                connection.send(encode(Join(VERSION, number=locked.number)))
                connection.recv(MOST_BYTES)
            try:
                for _ in range(rng.randrange(1, 30)):
                    connection.send(packet(rng))
                    sent += 1
            except (BrokenPipeError, ConnectionResetError):  # it has been told why, and closed
                continue
            finally:
                locked.close()
    sys.stdout.write(f"{sent}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
