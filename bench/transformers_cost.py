"""What `remap.attach` costs a transformers user while nothing is remapped, and while layers are streamed.

    python bench/transformers_cost.py [runs] [--host-budget 24GiB]

SmolLM2-135M in float32, one compute thread, greedy. Three ways take turns: the bare model with its DynamicCache; attached with
room for everything; attached with room for the weights and little more. Prints medians of `runs`
generations each, in seconds of the process's processor time, which neighbours on the machine disturb less than the wall clock's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

import remap
from remap.cli import smollm2

SHAPES = ((1, 64, 48), (8, 64, 32))  # sequences, tokens of the prompt, new tokens


def main(runs: int) -> None:
    torch.set_num_threads(1)
    model, _, folder = smollm2.load("float32")
    model.generation_config.eos_token_id = None
    print(
        "| sequences x prompt + new tokens | bare | attached | attached / bare | tight | layers away | tight / bare |"
    )
    for sequences, prompt, new in SHAPES:
        ids = torch.randint(3, 40_000, (sequences, prompt), generator=torch.Generator().manual_seed(0))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
        expected = model.generate(**given)

        def timed(given: dict[str, object] = given, expected: torch.Tensor = expected) -> float:
            begin = time.process_time()
            out = model.generate(**given)
            seconds = time.process_time() - begin
            assert torch.equal(out, expected)
            return seconds

        seconds: dict[str, list[float]] = {"bare": [], "attached": [], "tight": []}
        away = 0
        for _ in range(runs):
            seconds["bare"].append(timed())
            for way, capacity in (("attached", "1200MiB"), ("tight", "536MiB")):
                with remap.attach(model, capacity, weights=folder) as attached:
                    timed()  # the first one pays for the layers that go
                    seconds[way].append(timed())
                    if way == "tight":
                        away = attached.snapshot.remapped
        bare, ours, tight = (statistics.median(seconds[way]) for way in ("bare", "attached", "tight"))
        print(
            f"| {sequences} x {prompt} + {new} | {bare:.2f} s | {ours:.2f} s | {ours / bare:.2f} | {tight:.2f} s | {away} | "
            f"{tight / bare:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="?", type=int, default=3)
    parser.add_argument("--host-budget", help="page-locked memory at most, where REMAP_DEVICE is a GPU")
    given = parser.parse_args()
    if given.host_budget:
        os.environ["REMAP_HOST_BUDGET"] = given.host_budget
    main(given.runs)
