"""Memory: what is free, and what a compiled program needs."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

GIB = 2**30


def free_in_cgroup(folder: Path, limit_file: str, usage_file: str, prefix: str) -> float:
    """Bytes that a control group still allows. Raises OSError, and ValueError without a limit."""
    limit = int((folder / limit_file).read_text())  # "max" is no number
    used = int((folder / usage_file).read_text())
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split() for line in lines)
    active = int(stat.get(f"{prefix}active_file", 0))
    inactive = int(stat.get(f"{prefix}inactive_file", 0))
    return limit - used + active + inactive  # the kernel's cache of files can be freed


def cgroup_memory(root=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")) -> float:
    """Bytes that the control groups of this process still allow, or infinity."""
    if not own.is_file():
        return math.inf
    free = math.inf
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1
            top = root / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif not controllers:  # version 2
            top = root
            files = ("memory.max", "memory.current", "")
        else:
            continue
        folder = top / path.strip("/")
        parents = [folder, *folder.parents]
        for group in parents[: len(Path(path).parts)]:
            with contextlib.suppress(OSError, ValueError):
                free = min(free, free_in_cgroup(group, *files))
    return free


def host_memory() -> float:
    """Bytes of memory that this process can still allocate."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(free, cgroup_memory())


def free_memory(limit_gib: float | None) -> float:
    """Bytes that may be used on each device, the minimum over all processes."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    if limit_gib:
        free = limit_gib * GIB
    elif all("bytes_limit" in stats for stats in statistics):
        free = 0.9 * min(
            stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in statistics
        )
    elif any(device.platform != "cpu" for device in jax.local_devices()):
        raise ValueError("memory: JAX does not say what is free on this device; give --memory GIB")
    else:  # CPU devices share the host's memory
        free = 0.9 * host_memory() / jax.local_device_count()
    return GIB * float(np.min(multihost_utils.process_allgather(np.float32(free / GIB))))


def memory_of(compiled) -> Any:
    """What XLA has planned for a program."""
    return compiled.memory_analysis()


def program_bytes(compiled, held: int = 0) -> int:
    """Bytes on each device while the program runs, as XLA has planned it.

    `held` is the least size of its arguments.
    """
    stats = memory_of(compiled)
    arguments = max(held, stats.argument_size_in_bytes)
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return arguments + results + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
