#!/bin/bash
# usage: watch.sh JOBID
#
# Attach to every node of a Slurm job: through its doors if train.sbatch has left a key, else
# through srun, which needs nothing in the job but gpuwatch run (or gpuwatch.watch()).
set -euo pipefail

job="${1:?usage: watch.sh JOBID}"
key="${GPUWATCH_KEYS:-$HOME/.gpuwatch-keys}/$job"
port=$((20000 + job % 20000))
list="$(squeue --jobs "$job" --noheader --format %N)"
[[ -n "$list" ]] || { echo "watch.sh: job $job has no nodes: it waits, or has ended" >&2; exit 1; }
mapfile -t nodes < <(scontrol show hostnames "$list")
((${#nodes[@]})) || { echo "watch.sh: the nodes $list have no names" >&2; exit 1; }

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
