"""The suite for engines (remap.conformance) over vLLM: python conform.py JOB.json OUT.json

JOB: {"model": folder, "requests": as in serve.py, "capacity": bytes, "page_bytes": bytes, "engine": keyword arguments of LLM}.
OUT: [[case, problems, steps, grown, shrunk, copies], ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import remap
from remap import conformance
from remap.adapters.arenas import hosted
from serve import Stepper, shut

ARENA = "conformance"


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    sizes = {name: job[name] for name in ("capacity", "page_bytes")}
    run: dict[str, Any] = {
        "model": job["model"],
        "remap": True,
        "engine": job["engine"],
        "settings": {**sizes, "arena": ARENA},
    }

    def serve(session: remap.Session) -> object:
        with hosted(ARENA, session):
            stepper = Stepper(run)
            try:
                return stepper.serve(job["requests"], 0)["tokens"]
            finally:
                shut(stepper)

    outcomes = list(conformance.check(serve, seeds=(0, 1), **sizes))
    names = ("problems", "steps", "grown", "shrunk", "copies")
    out.write_text(json.dumps([[each.case, *(getattr(each, name) for name in names)] for each in outcomes]))


if __name__ == "__main__":
    main()
