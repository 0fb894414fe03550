"""docs/notes/runs.md, "Does it run?", from the table that the tests serve (tests/families.py): python tools/runs.py [--check]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/notes/runs.md"
sys.path.insert(0, str(ROOT / "tests"))

from families import FAMILIES  # noqa: E402

SETTINGS = (
    ("prefix cache, chunked prompts", "runs", "runs", "copies of a cache share blocks"),
    ("sampling: temperature, seeds, penalties, logprobs", "runs", "penalties run; seeds need a GPU in stock", "runs"),
    ("structured outputs", "runs", "runs (xgrammar)", "not tried"),
    ("CUDA graphs", "accepted, has not run", "accepted, has not run", "refused"),
    ("`torch.compile`", "runs", "refused", "refused"),
    ("tensor parallelism", "runs, also on brokers", "runs; refused on a broker", "not tried"),
    ("pipeline parallelism", "refused", "refused", "not tried"),
    ("expert parallelism that moves experts", "refused", "refused", "none there"),
    ("LoRA", "runs", "runs", "runs (peft)"),
    (
        "weights in 4 bits",
        "runs: compressed-tensors, GPTQ, AWQ",
        "not tried: stock needs a GPU",
        "plain tensors run; subclasses (torchao, quanto) are refused",
    ),
    (
        "weights in 8 bits",
        "refused where oneDNN keeps them; fp8 not tried",
        "not tried: stock needs a GPU",
        "plain tensors run",
    ),
    ("KV cache in fp8", "runs", "runs", "none there"),
    (
        "drafters",
        "`ngram`, `draft_model`, `eagle`, `eagle3`, `mtp` run",
        "refused",
        "assisted decoding runs, but with recurrent states",
    ),
    (
        "KV of other requests in host memory",
        "runs on a CPU, one engine in a process",
        "refused",
        "its own caches stay its own",
    ),
    ("prefill and decode on two servers", "refused", "refused", "none there"),
    (
        "new weights while it serves",
        "runs: `load_weights`, `reload_weights`, `update_weights`, `reset_weights`",
        "runs; refused while other processes have the pages",
        "runs: `advanced.rewrite`",
    ),
    ("sleep", "level 1, on a broker or in an arena of a process", "refused", "`Session.deactivate`"),
    ("several models in one process, in several", "runs; runs", "refused; runs", "runs; runs"),
)
"""What, and what becomes of it in vLLM, SGLang and transformers."""

HEAD = """# Does it run?

Made by `python tools/runs.py` from [the table that the tests serve](../../tests/families.py). "Runs" means the tokens of the same
engine without remap, while layers leave, stream and come home: of small models with random weights, on a CPU. In vLLM that is
Model Runner V1; V2, which is a GPU's default, needs Triton.

Tests: [vLLM 0.32](../../tests/engines/vllm/test_families.py), [SGLang 0.5.23](../../tests/engines/sglang/test_families.py),
[transformers](../../tests/python/test_transformers_families.py). An engine of your own says how many bytes a block has
([adopt.md](../adopt.md)): for remap every family is layers of bytes, and blocks of bytes.

## Models

| family | for example | vLLM | SGLang | transformers |
|---|---|---|---|---|
"""

MIDDLE = """
Where the table says so, prompts have pictures or sound: the layers that write leave, and those that see or hear stay. Videos
were not tried. `remap.attach` refuses Whisper, and Llama 3.2 with pictures, which vLLM 0.32 does not know. vLLM 0.32 on a CPU
itself does not serve Nemotron-H.

Stock SGLang on a CPU needs two changes, for [latents](sglang.md#latents) and
[LoRA](sglang.md#settings-that-stock-has-on-a-gpu-only). The tests make them on both sides.

## Settings

| what | vLLM | SGLang | transformers |
|---|---|---|---|
"""

TAIL = """
The refusals of [vLLM](vllm.md#works-refused-by-name), [SGLang](../sglang.md#works-refused-by-name) and
[transformers](../transformers.md#families) name what they refuse, before anything changes.
"""


def page() -> str:
    """The page's text."""
    families = "".join(
        f"| {name} | {each.models} | runs | {each.sglang} | {'runs' if each.attaches else 'refused'} |\n"
        for name, each in FAMILIES.items()
    )
    settings = "".join(f"| {' | '.join(row)} |\n" for row in SETTINGS)
    return HEAD + families + MIDDLE + settings + TAIL


def main() -> int:
    """Write the page, or say whether it is as it would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is another")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    return int(PAGE.read_text(encoding="utf-8") != page())


if __name__ == "__main__":
    sys.exit(main())
