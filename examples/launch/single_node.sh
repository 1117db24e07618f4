#!/usr/bin/env bash
# All GPUs of this machine, or two processes where there is none:
#
#   examples/launch/single_node.sh examples/train_gpt.py --steps 300
#   PROCESSES=4 examples/launch/single_node.sh my_script.py
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: $0 SCRIPT [ARGUMENTS...]" >&2; exit 2; }

options=()
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    # A process on the other socket than its GPU copies over the link between the sockets.
    options+=(--numa-binding node)
    processes=${PROCESSES:-gpu}
else
    processes=${PROCESSES:-2}
fi

# Left alone, each process starts as many threads as there are cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --standalone --nproc-per-node "$processes" "${options[@]}" "$@"
