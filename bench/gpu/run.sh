#!/bin/sh
# Build, test and measure this checkout on a machine with a GPU, offline.
#
#   bench/gpu/run.sh CALL [--quick] [--emulated] [--out DIR] [--host-budget SIZE] [--seconds N] [--total N] [--only GLOB] ...
#
# CALL is probe, build-and-check, measure, serve or all; each ends before ten minutes are over, writes DIR/results.json and
# DIR/results.tar.gz at least every 10 seconds, and goes on where an earlier one ended: `bench/gpu/run.sh` without arguments
# says how, docs/gpu-run.md has the command lines for half an hour of a rented machine.
#
# The Python is $PYTHON, else the first of python3 and .venv/bin/python that has torch, numpy, pybind11 and pytest. What is
# built goes to build/gpu; nothing is installed.
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
