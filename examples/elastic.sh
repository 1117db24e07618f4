#!/usr/bin/env bash
# Kill a rank, and watch the job go on with fewer, from its last checkpoint, on one machine without GPUs:
#
#   examples/elastic.sh runs/elastic
#
# Two torchrun agents of one rank each stand for two machines. One is killed, with its rank, at once
# (SIGKILL, as a machine that is gone); the other meets again alone and trains to the end.
set -euo pipefail
out=${1:?usage: $0 FOLDER [ARGUMENTS OF torchtitan_storage.py...]}
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

# Over gloo, a restart finds stale addresses in the agents' own store and hangs: let each start make its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
port=${PORT:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}

agent() { # NAME IS_HOST [ARGUMENTS...]
    "$python" -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$port" --rdzv-id elastic \
        --rdzv-conf "is_host=$2,last_call_timeout=10,keep_alive_interval=1,read_timeout=300" \
        --local-addr 127.0.0.1 --monitor-interval 0.5 \
        "$here/torchtitan_storage.py" --out "$out/checkpoints" "${@:3}" >"$out/$1.log" 2>&1 &
}

with_rank() { # AGENT: its process id, and its rank's, which is in a session of its own
    echo "$1" "$(cat "/proc/$1/task/$1/children" 2>/dev/null)"
}

both_train() { # and there is something to go on from
    grep -qs 'training on 2 rank' "$out/first.log" "$out/second.log" &&
        [ -n "$(find "$out/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null)" ]
}

agent first true "$@" # serves the rendezvous: it is the one that stays
first=$!
agent second false "$@"
second=$!
# shellcheck disable=SC2046  # several ids
trap 'kill -KILL $(with_rank "$first") $(with_rank "$second") 2>/dev/null || true' EXIT

tries=1500
until both_train || [ "$((tries -= 1))" -eq 0 ] || ! kill -0 "$first" 2>/dev/null; do sleep 0.2; done
if ! both_train || ! kill -0 "$first" "$second" 2>/dev/null; then
    echo "no checkpoint came while both trained: see $out/first.log and $out/second.log" >&2
    exit 1
fi
# shellcheck disable=SC2046
kill -KILL $(with_rank "$second")
echo "killed one of two ranks"

status=0
wait "$first" || status=$?
grep -E '^(training|losses)' "$out/first.log" || true
[ "$status" -eq 0 ] || { echo "the job did not go on: see $out/first.log" >&2; exit "$status"; }
echo "it went on, and reached the end"
