"""Copies between JAX's buffers on an NVIDIA GPU and NumPy arrays, inside a call of the host.

`jax.pure_callback` copies too, but it makes arrays of JAX in between. A step of EnvPool then takes
1.6 times as long (docs/host_environments.md).
"""

import ctypes
import functools

import jax
import numpy as np


class Driver:
    """The functions of NVIDIA's driver that copy. `stream` is a CUDA stream, as a number."""

    def __init__(self, library):
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.cuMemcpyDtoHAsync_v2.argtypes = (pointer, pointer, size, pointer)
        library.cuMemcpyHtoDAsync_v2.argtypes = (pointer, pointer, size, pointer)
        library.cuStreamSynchronize.argtypes = (pointer,)
        self.library = library

    def read(self, buffers, stream: int) -> list[np.ndarray]:
        """NumPy arrays with what the buffers hold, when all earlier work of the stream is done."""
        arrays = [np.empty(buffer.shape, buffer.dtype) for buffer in buffers]
        for array, buffer in zip(arrays, buffers, strict=True):
            host, size = array.ctypes.data, array.nbytes
            self.call("cuMemcpyDtoHAsync_v2", host, address(buffer), size, stream)
        self.call("cuStreamSynchronize", stream)
        return arrays

    def write(self, buffers, arrays, stream: int) -> None:
        for buffer, array in zip(buffers, arrays, strict=True):
            host, size = array.ctypes.data, array.nbytes
            self.call("cuMemcpyHtoDAsync_v2", address(buffer), host, size, stream)
        self.call("cuStreamSynchronize", stream)

    def call(self, name: str, *args) -> None:
        code = getattr(self.library, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name}: error {code} of the CUDA driver")


def address(buffer) -> int:
    return buffer.__cuda_array_interface__["data"][0]


@functools.cache
def driver() -> Driver | None:
    """None where JAX computes on something else than one NVIDIA GPU."""
    if jax.default_backend() != "gpu" or jax.device_count() != 1:
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:  # an AMD GPU
        return None
