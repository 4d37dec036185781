#!/bin/bash
# usage: pods.sh [JOB [CONTAINER]]
#
# Attach to every pod of a Kubernetes job through kubectl exec: no port, no key.
set -euo pipefail

job="${1:-train}"
container="${2:-train}"
mapfile -t pods < <(
  kubectl get pods --selector "job-name=$job" --field-selector status.phase=Running --output name
)
((${#pods[@]})) || { echo "pods.sh: no pod of the job $job runs" >&2; exit 1; }

ways=()
for pod in "${pods[@]}"; do
  ways+=(--via "kubectl exec -i $pod -c $container --")
done
exec gpuwatch attach "${ways[@]}"
