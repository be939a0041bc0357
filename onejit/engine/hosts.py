"""Several processes that train together: joining them, and agreeing on values."""

import json
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

import onejit.engine.devices  # noqa: F401 - before JAX starts

HEARTBEAT = 20  # seconds without a sign of life from a process until the others give up


def connect(hosts) -> None:
    """Join the other processes, if there are any. Raises ValueError."""
    names = ("coordinator", "num_processes", "process_id")
    missing = [name for name in names if getattr(hosts, name) is None]
    if hosts.distributed:
        if len(missing) < 3:
            given = "coordinator, num_processes and process_id"
            raise ValueError(f"distributed: finds {given} itself; give none of them")
        name = "distributed"
    else:
        if len(missing) == 3:
            return
        check_hosts(hosts, missing)
        name = f"coordinator = {hosts.coordinator}"
    try:
        jax.distributed.initialize(
            coordinator_address=hosts.coordinator,
            num_processes=hosts.num_processes,
            process_id=hosts.process_id,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: the processes cannot be joined ({error})") from error


def check_hosts(hosts, missing: list[str]) -> None:
    """Raise ValueError if the options of hosts are not complete or not possible."""
    if missing:
        raise ValueError(
            f"{missing[0]}: is missing; coordinator, num_processes and process_id go together"
        )
    if not 0 <= hosts.process_id < hosts.num_processes:
        raise ValueError(f"process_id = {hosts.process_id}: must be from 0 to num_processes - 1")
    host, colon, port = hosts.coordinator.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f"coordinator = {hosts.coordinator}: must be HOST:PORT")


def is_first() -> bool:
    return jax.process_index() == 0


def agree(value):
    """The value that process 0 has, on all processes. JSON must be able to hold it."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if is_first() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.frombuffer(text if is_first() else bytes(size), np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(buffer)))


def only_first(function, *args):
    """Call a function on process 0 alone.

    All processes get its result, or its ValueError or OSError.
    """
    answer = {}
    if is_first():
        try:
            answer["value"] = function(*args)
        except OSError as error:
            answer["os_error"] = str(error)
        except ValueError as error:
            answer["value_error"] = str(error)
    answer = agree(answer)
    if "os_error" in answer:
        raise OSError(answer["os_error"])
    if "value_error" in answer:
        raise ValueError(answer["value_error"])
    return answer["value"]


def fetch(tree):
    """Gather a tree of arrays from all processes into NumPy arrays."""
    return multihost_utils.process_allgather(tree, tiled=True)


def latest(values: Sequence[int]) -> int:
    """The first of `values` on any process, or 0."""
    own = values[0] if values else 0
    return int(np.max(multihost_utils.process_allgather(np.int32(own))))
