"""The sampler: what this machine's CPUs, memory, processes and GPUs are doing.

It runs as a child of the node process, ``python -P -m gpuwatch.sensors``, so that a driver call
that hangs or crashes takes nothing else with it. `gpuwatch.sensors.sampler` states the protocol.
"""

__all__: list[str] = []
