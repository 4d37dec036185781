"""Runs scripts without importing torch as often: torch is imported once, then forked.

Reads one JSON line a run on stdin ({"id": n, "argv": [...], "env": {...}, "out": path,
"err": path}), or {} to end; answers "n pid" when it has begun and "n pid exit-code" when it has
ended; many may run at a time. A script runs at the top level of its child, so that its end is the
interpreter's own: exit codes, atexit, tracebacks. Two may write to one file. The argument is the
pid of the process that starts it.
"""

import gc
import json
import os
import runpy
import select
import sys

# An orphan, so that tests that look at the children of their own process do not see it.
if os.fork():
    os._exit(0)

import torch._dynamo  # what the first optimizer imports
import torch.distributed
import torch.nn.parallel
import torch.utils.data  # noqa: F401

# The collections at the end of a child would look at all of torch, three times.
gc.freeze()

# It ends with the process that has started it: others that were forked there may have its end of
# the pipe too.
starter = os.pidfd_open(int(sys.argv[1]))
child = None
lines = b""
running: dict[int, int] = {}
while child is None:
    ready = select.select([0, starter], [], [], 0.005 if running else None)[0]
    if starter in ready:
        sys.exit(0)
    if ready:
        lines += os.read(0, 65536)
    while b"\n" in lines and child is None:
        line, _, lines = lines.partition(b"\n")
        task = json.loads(line)
        if not task:
            sys.exit(0)
        pid = os.fork()
        if pid == 0:
            child = task
        else:
            running[pid] = task["id"]
            print(task["id"], pid, flush=True)
    for pid in list(running) if child is None else ():
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            print(running.pop(pid), pid, os.waitstatus_to_exitcode(status), flush=True)

for name, fd in (("out", 1), ("err", 2)):
    opened = os.open(child[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(opened, fd)
    os.close(opened)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update(child["env"])
sys.argv = child["argv"]
# As of a script that is run, and after it what the tests share.
sys.path.append(sys.path[0])
sys.path[0] = os.path.dirname(child["argv"][0])
runpy.run_path(child["argv"][0], run_name="__main__")
