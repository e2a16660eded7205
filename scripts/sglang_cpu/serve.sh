#!/usr/bin/env bash
# Serves a small dense Hugging Face model with the real SGLang on a CPU.
#
#   serve.sh MODEL PORT [further launch_server flags]
#
# The environment is $BASE_RL_ENGINE__SGLANG_VENV, else base-rl/sglang-cpu-0.5.23 in the user's cache directory.
# Start-up takes one to two minutes: send nothing until GET /health_generate answers 200.
# LoRA: --enable-lora --max-lora-rank 16 --lora-target-modules q_proj k_proj v_proj o_proj --lora-backend torch_native
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

model=${1:?usage: serve.sh MODEL PORT [flags]}
port=${2:?usage: serve.sh MODEL PORT [flags]}
shift 2

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${BASE_RL_ENGINE__SGLANG_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/base-rl/sglang-cpu-0.5.23}
if [ ! -f "$venv/.sglang-cpu-ready" ]; then
  echo "there is no SGLang in $venv: run 'make sglang-cpu' first" >&2
  exit 1
fi

# The flags are those of proxy/engines/launch.py; a test keeps the two lists equal.
# Without TORCHDYNAMO_DISABLE the first constrained request waits a minute for a C++ compiler.
export SGLANG_USE_CPU_ENGINE=1 PYTHONWARNINGS=ignore PYTHONPATH="$here/shim" TORCHDYNAMO_DISABLE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
  --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch \
  --disable-overlap-schedule --grammar-backend llguidance \
  --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled \
  --max-total-tokens 32768 --max-running-requests 32 --incremental-streaming-output "$@"
