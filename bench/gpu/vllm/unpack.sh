#!/bin/sh
# The parts that pack.py made, into a folder: unpack.sh PARTS SITE. Then: export PYTHONPATH=SITE:SITE/deps:SITE/remap
set -eu
mkdir -p "$2"
for part in "$1"/*.tar.xz; do tar xJf "$part" -C "$2" & done
wait
du -sm "$2"
