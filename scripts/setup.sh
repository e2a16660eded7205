#!/usr/bin/env bash
# Makes the virtual environment in .venv with the pinned dependencies: `scripts/setup.sh [runtime|dev]`.
# Idempotent: does nothing when pyproject.toml, constraints.txt and the locks have not changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-runtime}
python=${PYTHON:-python3}
stamp=.venv/.ready-$kind

fingerprint() { cat pyproject.toml constraints.txt "locks/$kind.txt" | sha256sum | cut -d' ' -f1; }
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then exit 0; fi

command -v "$python" >/dev/null || { echo "error: no '$python' found. Install Python 3.11 or newer, or name it: PYTHON=python3.12 make …" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old; base-rl needs Python 3.11 or newer: PYTHON=python3.12 make …" >&2; exit 1; }

if [ ! -x .venv/bin/pip ]; then
  echo "Making the virtual environment in .venv …"
  if ! "$python" -m venv .venv 2>/dev/null; then
    rm -rf .venv
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
      echo "Python's venv module is missing: installing the package python$version-venv …"
      apt-get update -qq && apt-get install -y -qq "python$version-venv"
      "$python" -m venv .venv
    else
      echo "error: Python's venv module is missing. On Debian and Ubuntu: sudo apt-get install python$version-venv" >&2
      exit 1
    fi
  fi
fi

case $kind in
  runtime) target='.[demo]' ;;
  dev) target='.[dev]' ;;
  *) echo "usage: scripts/setup.sh [runtime|dev]" >&2; exit 2 ;;
esac
echo "Installing the dependencies pinned in constraints.txt (the first time: minutes, most of it PyTorch) …"
pip() { .venv/bin/pip "$1" --quiet --disable-pip-version-check "${@:2}"; }
# pip's hash checking takes neither a project of ours nor PyTorch, whose wheels differ by index. So all else comes first,
# from the lock; the second step finds it installed, and adds only what has no hash there (see scripts/lock.sh).
pip install --require-hashes --no-deps -r "locks/$kind.txt"
pip install --no-build-isolation -c constraints.txt -e "$target"
fingerprint > "$stamp"
