#!/bin/bash
# usage: watch.sh JOBID
#
# Attach to every node of a Slurm job: through its doors if train.sbatch has left a key, else
# through srun, which needs nothing in the job but gpuwatch run (or gpuwatch.watch()).
set -euo pipefail

job="${1:?usage: watch.sh JOBID}"
key="${GPUWATCH_KEYS:-$HOME/.gpuwatch-keys}/$job"
port=$((20000 + job % 20000))
mapfile -t nodes < <(scontrol show hostnames "$(squeue --jobs "$job" --noheader --format %N)")

if [[ -r "$key" ]]; then
  targets=()
  for node in "${nodes[@]}"; do
    targets+=("tcp://$node:$port")
  done
  exec gpuwatch attach --key "$key" "${targets[@]}"
fi

ways=()
for node in "${nodes[@]}"; do
  ways+=(--via "srun --jobid $job --overlap --nodes 1 --ntasks 1 --nodelist $node")
done
exec gpuwatch attach "${ways[@]}"
