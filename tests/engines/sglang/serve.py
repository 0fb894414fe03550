"""One engine, some rounds of requests: python serve.py '{"engine": {...}, "rounds": [...]}' OUT.json

A round: {"prompts": [[ids]], "new": tokens of each, "idle": seconds to wait afterwards, "flush": whether to flush the cache,
"update": ["disk" or "tensor", folder], whose weights come before the round's requests, "sampling": [parameters of SGLang's] and
"lora": [name or null], taken in turn by the requests}. Otherwise requests are greedy.
OUT: {"tokens": of each round and request, "capacity": tokens of the KV cache, at the end of each round's idle time, "updated":
the answers (whether it was made, why not)}.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

SETTINGS = {
    "dtype": "float32",
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "decode_log_interval": 1,
    "random_seed": 1,
    "log_level": "info",
}
CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.5,
}
GPU = {"attention_backend": "triton"}  # others have no float32


def update(engine: Any, how: str, folder: str) -> list[Any]:
    """As trainers do, by a checkpoint or by tensors. Returns SGLang's answers."""
    if how == "disk":
        return [engine.update_weights_from_disk(folder)]
    from safetensors.torch import load_file

    tensors = list(load_file(f"{folder}/model.safetensors").items())
    return [engine.begin_weight_update(), engine.update_weights_from_tensor(tensors), engine.end_weight_update()]


def main() -> None:
    import sglang
    import torch

    job = json.loads(sys.argv[1])
    engine = sglang.Engine(**SETTINGS | (GPU if torch.cuda.is_available() else CPU) | job["engine"])
    result: dict[str, list[object]] = {"tokens": [], "capacity": [], "updated": []}
    try:
        for each in job["rounds"]:
            if "update" in each:
                result["updated"].extend(update(engine, *each["update"]))
            sampling = {"temperature": 0, "max_new_tokens": each["new"]}
            count = len(each["prompts"])
            params = [sampling | more for more in islice(cycle(each.get("sampling", [{}])), count)]
            lora = list(islice(cycle(each["lora"]), count)) if each.get("lora") else None
            answers = engine.generate(input_ids=each["prompts"], sampling_params=params, lora_path=lora)
            result["tokens"].append([answer["output_ids"] for answer in answers])
            time.sleep(each.get("idle", 0))
            if each.get("flush"):
                engine.flush_cache()
                time.sleep(0.2)
            result["capacity"].append(engine.get_server_info()["internal_states"][0]["memory_usage"]["token_capacity"])
        Path(sys.argv[2]).write_text(json.dumps(result))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
