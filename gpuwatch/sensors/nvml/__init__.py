"""The NVIDIA backend: NVML, with GPM where the GPU has it.

`backend` is all that others use. `calls` is the way to the library, `device` says what is asked of
a GPU and when, `gpm` and `events` are two of its sources; `decode` and `words` are pure.

Readings of a GPU, by name (every one may be n/a, with its reason):

* every tick: `gpu_util`, `memory_util` (% of time), `memory_used`, `memory_total` (B), `power` (W,
  mean of a second on newer GPUs), `sm_clock`, `memory_clock` (MHz), `clock_events` (NVML's bits;
  `GpuSample.reasons` has them in words); from GPM `sm_active`, `sm_occupancy`, `tensor_active`,
  `dram_active` (% of cycles), and from GPM or counters `pcie_rx`, `pcie_tx`, `nvlink_rx`,
  `nvlink_tx` (B/s, rx is towards the GPU);
* every fifth tick: `temperature`, `memory_temperature` (°C), `power_limit` (W), `ecc_corrected`,
  `ecc_uncorrected` (since the driver was loaded), `processes_memory` (B, of all processes);
* every tenth: `fan` (%), `link_gen`, `link_width` (PCIe now; it rests at a low generation);
* every thirtieth: `persistence` and `mig` (1 on, 0 off);
* once: `sm_clock_max`, `memory_clock_max` (MHz), `link_gen_max`, `link_width_max`, `numa_node`.

A MIG device has memory and, on Hopper and newer, what GPM says of its GPU instance.
"""

from gpuwatch.sensors.nvml.backend import NvmlBackend

__all__ = ["NvmlBackend"]
