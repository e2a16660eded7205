#!/usr/bin/env bash
# Writes locks/dev.txt and locks/runtime.txt: the pins of constraints.txt with the hashes of all their files, for every
# platform. Run it after a pin has changed (`make lock`). Needs a package index that serves hashes.
#
# PyTorch has none: its wheels differ by index (CPU, CUDA, ROCm) under one version, and so do the packages that only some
# of them need. They are pinned by constraints.txt alone.
set -euo pipefail
cd "$(dirname "$0")/.."
uv_version=0.13.9
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "uv==$uv_version"
compile() { "$scratch/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate "$@" >/dev/null; }
name() { sed -E 's/[=<>! ;].*//; s/_/-/g' | tr '[:upper:]' '[:lower:]'; }

compile --constraints constraints.txt --extra demo pyproject.toml --output-file "$scratch/needed.txt"
name < "$scratch/needed.txt" | sort -u > "$scratch/runtime-names"
grep -v '^torch==' constraints.txt > "$scratch/dev.in"
while read -r pin; do
  if name <<< "$pin" | grep -qxFf "$scratch/runtime-names"; then echo "$pin"; fi
done < "$scratch/dev.in" > "$scratch/runtime.in"

mkdir -p locks
for kind in dev runtime; do
  compile --no-deps --generate-hashes "$scratch/$kind.in" --output-file "$scratch/$kind.txt"
  { echo "# Written by scripts/lock.sh: do not edit."; cat "$scratch/$kind.txt"; } > "locks/$kind.txt"
done
