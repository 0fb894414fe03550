"""vLLM's adapter passes the suite that every engine's author is asked to run."""

from __future__ import annotations

import json

from conftest import HERE, Vllm, run
from test_tokens import LAYERS, LITTLE, tokens

REQUESTS = [{"prompt": tokens(20 + 9 * i, seed=i), "new": 90 + 8 * i, "at": 5 * i} for i in range(10)]
PAGE = 64 << 10


def test_vllm_conforms(vllm: Vllm) -> None:
    job, out = vllm.folder / "conform.json", vllm.folder / "conformed.json"
    # Weights of 26 MB, and KV that its requests outgrow.
    capacity = (26 << 20) + (16 << 20)
    wanted = {
        "model": str(vllm.folder / "tiny"),
        "requests": REQUESTS,
        "capacity": capacity,
        "page_bytes": PAGE,
        "engine": LITTLE,
    }
    job.write_text(json.dumps(wanted))
    run([str(HERE / "conform.py"), str(job), str(out)], cwd=vllm.folder, timeout_s=900)
    outcomes = json.loads(out.read_text())
    assert [(case, problems) for case, problems, *_ in outcomes] == [
        ("at home", []),
        ("away", []),
        ("to and fro", []),
        ("restless", []),
        ("restless", []),
        ("restless, only owned pages mapped", []),
        ("restless, only owned pages mapped", []),
    ]
    steps, grown, shrunk, copies = (sum(each) for each in list(zip(*outcomes, strict=True))[2:])
    assert grown and shrunk and copies > LAYERS and steps > 200
