#!/usr/bin/env bash
# Run this on every node, at about the same time; HEAD is one of them, the same everywhere:
#
#   HEAD=node-0 NODES=2 examples/launch/multi_node.sh examples/train_gpt.py --out /shared/runs/a
#
# --out (the checkpoints' folder) must be on a file system that all nodes share.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: HEAD=host NODES=2 $0 SCRIPT [ARGUMENTS...]" >&2; exit 2; }
: "${HEAD:?give the name or address of one of the nodes, such as HEAD=node-0}"
: "${NODES:?give the number of nodes, such as NODES=2}"
processes=${PROCESSES:-gpu}

# NCCL finds its networks by itself. Set these only where it finds the wrong ones: NCCL_DEBUG=INFO says
# which it took ("NET/IB", or "NET/Socket" where it fell back to TCP), and so does `overlapkit doctor`.
#   NCCL_SOCKET_IFNAME=eth0   the interface over which the ranks find each other; gloo: GLOO_SOCKET_IFNAME
#   NCCL_IB_HCA=mlx5          which adapters carry the data
#   NCCL_DEBUG=WARN           say in the log what NCCL complains about
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Left alone, each process starts as many threads as there are cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

options=(--numa-binding node)
[ "$processes" = gpu ] || options=()
# --max-restarts: a rank that fails makes torchrun start all of them again, from the last checkpoint.
exec torchrun --nnodes "$NODES" --nproc-per-node "$processes" "${options[@]}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${JOB:-overlapkit}" \
    --max-restarts "${RESTARTS:-3}" "$@"
