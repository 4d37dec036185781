#!/bin/bash
# usage: tmux.sh COMMAND...
#
# A training above and the monitor below, in a tmux session that outlives the login. Type
# tmux attach -t train to come back to it.
set -euo pipefail

(($#)) || { echo "usage: tmux.sh COMMAND..." >&2; exit 2; }
printf -v command '%q ' "$@"
# The window stays when the training has ended: its card is on it.
tmux new-session -d -s train "gpuwatch run -- $command; exec bash"
tmux split-window -v -l 70% -t train gpuwatch
exec tmux attach-session -t train
