"""Programs that compile in a third of the time."""

import functools

import jax

NO_OPTIMIZATION = " ".join(  # flags that XLA has in all supported versions of JAX
    [
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_opt_preset=fast_compile",
    ]
)
# For the fast tier. Later versions have no other emitter, and XLA dies of unknown flags.
OLD_EMITTER = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
QUICKLY = f"{NO_OPTIMIZATION} {OLD_EMITTER}"

# For programs that are compared with others up to rounding, or that take few steps.
jit_quickly = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
