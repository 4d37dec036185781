#!/bin/bash
# usage: nodes.sh NODE NODE...
#
# Start one run on several machines over ssh, in a tmux session on each, and watch all of it.
# The machines have the same directory, and bash, whose login shell has torchrun and gpuwatch on its
# PATH; here gpuwatch is on yours.
set -euo pipefail

(($#)) || { echo "usage: nodes.sh NODE NODE..." >&2; exit 2; }
run="train-$(date +%m%d-%H%M)"
launch="gpuwatch run -- torchrun --nnodes=$# --nproc-per-node=${GPUS:-8} \
  --rdzv-id=$run --rdzv-backend=c10d --rdzv-endpoint=$1:29500 train.py"

targets=()
printf -v command '%q' "cd $(printf '%q' "$PWD") && GPUWATCH_RUN_ID=$run $launch"
for node in "$@"; do
  ssh "$node" "tmux new-session -d -s $run bash -lc $command"
  targets+=("ssh://$node")
done
# Leaving the screen leaves the training alone; so does a laptop that is closed. ssh runs a command
# without a login shell, whose PATH may be shorter: this one asks for it.
exec gpuwatch attach --remote-command "bash -lc 'exec gpuwatch \"\$@\"' gpuwatch" "${targets[@]}"
