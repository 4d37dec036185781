"""What NVML's numbers mean, in words: return codes, clock-event bits, Xids.

Sources: nvml.h for the codes and bits; NVIDIA's document of Xid errors for the Xids, of which
those that mean a program's own mistake, not the card's, are marked.
"""

__all__ = [
    "DRIVER_GONE",
    "FUNCTION_NOT_FOUND",
    "GPU_LOST",
    "LASTING",
    "LIBRARY_NOT_FOUND",
    "LIMITING_BITS",
    "NO_GPM",
    "TIMEOUT",
    "UNREADABLE",
    "WRONG_MODULE",
    "clock_reasons",
    "driver_sentence",
    "lost_sentence",
    "value_sentence",
    "xid_is_hardware",
    "xid_sentence",
]

UNREADABLE = -1
"""Ours: the library answered with something that is no text or number."""
WRONG_MODULE = -2
"""Ours: the Python module pynvml is another project's."""
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13

LASTING = frozenset({3, 4, 6, FUNCTION_NOT_FOUND})
"""Not supported, no permission, not found, not in this driver: asked again only now and then."""

GPU_LOST = frozenset({15, 16})
"""Nothing of this one device can be read: lost, or waiting for its reset."""

DRIVER_GONE = frozenset({1, 9, 17, 18})
"""Nothing of any device can be read before the library is initialised again."""

NO_GPM = (
    "no GPM before Hopper (GeForce: before Blackwell); data-centre cards from Volta on have it "
    "through DCGM: github.com/NVIDIA/dcgm-exporter"
)

_DRIVER = {
    4: "NVML gives this user no permission (NVML 4): run gpuwatch as a user who may run nvidia-smi",
    9: "the NVIDIA driver is not loaded (NVML 9): load it (modprobe nvidia) or reboot",
    12: "no NVIDIA driver on this machine (libnvidia-ml.so.1 not found)",
    13: "this NVIDIA driver is too old for NVML (NVML 13): install driver 450 or newer",
    15: "a GPU is lost and the driver does not start (NVML 15): reboot this machine",
    17: "the operating system blocks the GPUs (NVML 17): give this process or container access to "
    "/dev/nvidiactl and /dev/nvidia*",
    18: "the NVIDIA library and the loaded driver differ in version (NVML 18): reboot, or reload "
    "the nvidia kernel modules, after a driver update",
    20: "the NVIDIA driver is out of memory (NVML 20): free some memory of this machine",
    999: "the NVIDIA driver gives an unknown error (NVML 999): in a container, restart it (it lost "
    "its devices, as after systemctl daemon-reload); else look for Xid in dmesg",
    WRONG_MODULE: "the Python module pynvml is not NVIDIA's: pip uninstall pynvml nvidia-ml-py3 "
    "py3nvml, then pip install --force-reinstall nvidia-ml-py",
}

_VALUE = {
    2: "NVML refuses the question (NVML 2)",
    3: "not supported by this GPU or driver (NVML 3)",
    4: "no permission (NVML 4): run as root, or ask who runs this machine",
    6: "not found (NVML 6)",
    13: "the driver is too old for it (NVML 13): update it",
    15: "GPU is lost (NVML 15)",
    16: "GPU needs a reset (NVML 16)",
    19: "in use by another program (NVML 19)",
    20: "the driver is out of memory (NVML 20)",
    21: "no data yet (NVML 21)",
    27: "not ready (NVML 27)",
    999: "unknown error (NVML 999): look for Xid in dmesg",
    UNREADABLE: "NVML's answer cannot be read",
}

_LOST = {
    15: "GPU is lost (NVML 15): it fell off the bus or its driver gave it up; look for Xid in "
    "dmesg, then reset it (nvidia-smi --gpu-reset) or reboot",
    16: "GPU needs a reset (NVML 16): end its processes, then nvidia-smi --gpu-reset, or reboot",
}

_CLOCK_BITS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability limit",
}

LIMITING_BITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Power and heat: the card runs slower than asked. Idle and chosen clocks do not count."""

_XIDS = {
    13: "graphics engine exception: an illegal access or instruction of a kernel",
    31: "memory page fault: a kernel used an address that is not mapped",
    43: "the GPU stopped a program's work after its error",
    45: "a program's work was removed, after another error or a kill",
    48: "uncorrectable memory error (double-bit ECC)",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    63: "a memory row is being replaced (row remapping)",
    64: "a memory row could not be replaced (row remapping failed)",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of corrected memory errors",
    94: "contained memory error: the program that met it ends",
    95: "uncontained memory error: reset the GPU",
    109: "context switch timeout: a kernel hangs",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) reported an error",
    121: "chip-to-chip link (C2C) error",
    140: "unrecovered memory error",
    154: "the GPU needs recovery: reset or reboot as dmesg says",
}

_APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})


def driver_sentence(code: int) -> str:
    """Return why the driver gives nothing at all, with the remedy."""
    return _DRIVER.get(code, f"NVML does not start (error {code}): see whether nvidia-smi runs")


def value_sentence(code: int) -> str:
    """Return why one value cannot be read."""
    return _VALUE.get(code, f"not readable (NVML {code})")


def lost_sentence(code: int) -> str:
    """Return why a device gives nothing any more, with the remedy."""
    return _LOST.get(code, driver_sentence(code))


def clock_reasons(bits: int) -> tuple[str, ...]:
    """Return the set bits of NVML's clocks-event reasons as words, unknown ones as numbers."""
    found = []
    bit = 1
    while bit <= bits and bit < 1 << 64:
        if bits & bit:
            found.append(_CLOCK_BITS.get(bit, f"clock event {bit:#x}"))
        bit <<= 1
    return tuple(found)


def xid_sentence(xid: int) -> str:
    """Return one line about an Xid."""
    return f"Xid {xid}: {_XIDS.get(xid, 'see the document of Xid errors by NVIDIA')}"


def xid_is_hardware(xid: int) -> bool:
    """Say whether an Xid points at the card rather than at a program."""
    return xid not in _APPLICATION_XIDS
