#!/usr/bin/env bash
# Installs the real SGLang 0.5.23 for CPU serving into a virtual environment of its own.
#
#   install.sh [VENV]
#
# VENV defaults to $BASE_RL_ENGINE__SGLANG_VENV, else to base-rl/sglang-cpu-0.5.23 in the user's cache directory.
# PYTHON names the interpreter (default python3; 3.11 is what was tested). A finished environment is left as it is;
# an interrupted installation goes on where it stopped.
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-${BASE_RL_ENGINE__SGLANG_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/base-rl/sglang-cpu-0.5.23}}
marker=$venv/.sglang-cpu-ready

if [ -f "$marker" ]; then
  echo "SGLang is ready in $venv"
  exit 0
fi

mkdir -p "$venv"
if command -v flock >/dev/null; then
  exec 9>"$venv/.install-lock"
  flock 9
  if [ -f "$marker" ]; then
    echo "SGLang is ready in $venv (another installation finished it)"
    exit 0
  fi
fi

echo "Installing SGLang 0.5.23 for CPU into $venv: about 3.3 GB and 6 to 10 minutes"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps -r "$here/requirements.txt"
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0

echo "Checking that the server's modules import"
PYTHONPATH=$here/shim SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore - <<'PYTHON'
import sgl_kernel
import torchvision
import sglang.launch_server
PYTHON

touch "$marker"
echo "SGLang is ready in $venv"
