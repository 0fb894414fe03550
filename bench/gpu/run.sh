#!/bin/sh
# Build, test and measure this checkout on a machine with a GPU, offline. One table at the end, one JSON file.
#
#   bench/gpu/run.sh [--quick] [--emulated] [--name NAME] [--out DIR]
#
#   --quick      2 minutes instead of 8
#   --emulated   on the emulated driver, without a GPU: shows that the suite runs, measures nothing of a GPU
#   --name NAME  bench/results/gpu-NAME.json (default: the GPU's name)
#   --out DIR    where the JSON goes (default: bench/results; emulated: build/gpu-emulated)
#
# The Python is $PYTHON, else the first of python3 and .venv/bin/python that has torch, numpy, pybind11 and pytest. What is
# built goes to build/gpu; nothing is installed. The exit status is 0 if everything ran: a missed target is a line in the
# table, a step or measure that failed is a failure.
set -u
cd "$(dirname "$0")/../.." || exit 2

suits() {
  "$1" -c 'import sys; from importlib.util import find_spec
sys.exit(not (sys.version_info >= (3, 10) and all(map(find_spec, sys.argv[1:]))))' numpy pybind11 pytest "${2:-numpy}" 2>/dev/null
}

if [ -z "${PYTHON:-}" ]; then
  # First those with torch: without it the suite runs too, but leaves out every measure that computes with torch.
  for package in torch numpy; do
    for candidate in python3 .venv/bin/python; do
      if [ -z "${PYTHON:-}" ] && suits "$candidate" "$package"; then PYTHON=$candidate; fi
    done
  done
fi
if [ -z "${PYTHON:-}" ]; then
  echo "bench/gpu/run.sh: found no Python >= 3.10 with numpy, pybind11 and pytest; set PYTHON" >&2
  exit 2
fi
exec "$PYTHON" -m bench.gpu --checkout "$@"
