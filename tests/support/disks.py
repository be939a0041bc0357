"""Fixtures: disks that are small, full or cannot be written to."""

import contextlib
import os
import resource
import shutil
import subprocess

import jax
import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of a given size. Only root can; others skip the test."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int, options: str = "rw"):
        if os.name != "posix" or os.geteuid() or not shutil.which("mount"):
            pytest.skip("only root can mount a file system")
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},{options}", "tmpfs", place]
        if subprocess.run(command).returncode:
            pytest.skip("only root can mount a file system")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", place])


@pytest.fixture
def full_disk(small_disk, tmp_path):
    """`with full_disk(kind, size) as (folder, message)`: writing more fails with this message.

    "disk" is a file system of `size` bytes, for which the test must run as root. "files" limits the
    size of each file.
    """

    @contextlib.contextmanager
    def fill(kind: str, size: int):
        if kind == "disk":
            yield small_disk(size), "No space left on device"
            return
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        cache_from = jax.config.jax_persistent_cache_min_compile_time_secs
        # No compiled program is kept meanwhile: its file would be cut off, too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield tmp_path, "File too large"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", cache_from)

    return fill
