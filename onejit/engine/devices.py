"""The devices of all processes.

Importing this module gives JAX a CPU device per core and a compilation cache, as the scripts do.
It has to be imported before JAX starts.
"""

import contextlib
import os
import platform

import jax

from onejit.base.cores import number_of_cores


def use_all_cores() -> None:
    """One CPU device per core, unless the user has chosen a number."""
    chosen = "device_count" in os.environ.get("XLA_FLAGS", "")
    if chosen or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", number_of_cores())


def use_compilation_cache() -> None:
    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return
    # Not the scripts' directory: JAX can limit only a directory that had this limit from the start.
    folder = os.path.expanduser(f"~/.cache/onejit/limited-{platform.node()}")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", 2**31)


use_all_cores()
use_compilation_cache()


def smallest_slice(num_runs: int) -> int:
    """The smallest slice of `num_runs` runs that keeps all devices busy.

    Larger slices are multiples of it.
    """
    if jax.process_count() > 1:
        return jax.device_count()
    return min(num_runs, jax.device_count())
