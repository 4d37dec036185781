"""Runs a script many times without importing torch as often: torch is imported once, then forked.

Reads one JSON line a run on stdin ({"argv": [...], "env": {...}, "out": path, "err": path}) and
answers with its exit code. The script runs at the top level of the child, so that its end is the
interpreter's own: exit codes, atexit, tracebacks.
"""

import gc
import json
import os
import runpy
import sys

import torch._dynamo  # noqa: F401 - what the first optimizer step imports

# The collections at the end of a child would look at all of torch, three times.
gc.freeze()

child = None
for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid == 0:
        child = task
        break
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)

if child is not None:
    for name, fd in (("out", 1), ("err", 2)):
        opened = os.open(child[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(child["env"])
    sys.argv = child["argv"]
    runpy.run_path(child["argv"][0], run_name="__main__")
