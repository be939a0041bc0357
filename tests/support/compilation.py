"""Programs that compile in half the time."""

import functools

import jax

QUICKLY = " ".join(  # XLA's flags for the fast tier: no optimization
    [
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

# For programs that are compared with others up to rounding, or that take few steps.
jit_quickly = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
