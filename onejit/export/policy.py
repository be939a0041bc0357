"""The greedy policy of one agent as one file: StableHLO by `jax.export`, or ONNX by jax2onnx."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces

from onejit.evaluation import unwrap
from onejit.files import write

PACKAGES = {  # that the formats need
    "stablehlo": ["flatbuffers"],
    "onnx": ["jax2onnx", "onnx", "onnxruntime"],
}
PLATFORMS = ("cpu", "cuda")  # of StableHLO, both in one file


class Policy(NamedTuple):
    """A greedy policy with its agent inside, for a batch of observations.

    `act(*obs, *memory)` returns `[action, *next_memory]`. All arrays are [batch, ...]. A policy
    without memory has one output, and an observation is one array in most scripts. An episode
    begins with a memory of zeros.
    """

    act: Callable
    inputs: dict  # {name: ShapeDtypeStruct without the batch}
    outputs: list[str]


def names_of(tree, name: str) -> list[str]:
    """A name for each array of a pytree: "memory", or "obs_state" and "obs_alive"."""
    names = []
    for path, _ in jax.tree.leaves_with_path(tree):
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        names.append("_".join([name, *parts]))
    return names


def to_bounds(env, env_params) -> Callable:
    """A function from actions of the policy to actions of the environment, both [batch, ...].

    Continuous policies act in [-1, 1], and `env` clips and rescales their actions. Whoever plays
    the file has the environment alone.
    """
    space = unwrap(env).action_space(env_params)
    if not isinstance(space, spaces.Box):
        return lambda action: action
    low = jnp.asarray(space.low, jnp.float32)
    high = jnp.asarray(space.high, jnp.float32)

    def rescale(action):
        action = action.reshape(-1, *space.shape)
        unit = (jnp.clip(action, -1.0, 1.0) + 1.0) / 2.0
        return jnp.clip(low + unit * (high - low), low, high)

    return rescale


def make_policy(script, config, agent) -> Policy:
    """The greedy policy of one agent, with leaves [...]. Raises ValueError."""
    env, env_params = script.make_env(config)
    start, act = script.make_policy(config)
    obs = jax.eval_shape(lambda key: env.reset(key, env_params)[0], jax.random.key(0))
    memory = start()
    if any(np.any(leaf) for leaf in jax.tree.leaves(memory)):
        raise ValueError(f"format: the memory of {script.__file__} does not start with zeros")
    rescale = to_bounds(env, env_params)
    agent = jax.tree.map(jnp.asarray, agent)
    obs_arrays, obs_tree = jax.tree.flatten(obs)
    memory_arrays, memory_tree = jax.tree.flatten(jax.eval_shape(lambda: memory))

    def act_on_batch(*arrays):
        obs = jax.tree.unflatten(obs_tree, arrays[: len(obs_arrays)])
        memory = jax.tree.unflatten(memory_tree, arrays[len(obs_arrays) :])
        action, next_memory = jax.vmap(act, (None, 0, 0))(agent, memory, obs)
        return [rescale(action), *jax.tree.leaves(next_memory)]

    names = names_of(obs, "obs") + names_of(memory, "memory")
    return Policy(
        act=act_on_batch,
        inputs=dict(zip(names, obs_arrays + memory_arrays, strict=True)),
        outputs=["action", *names_of(memory, "next_memory")],
    )


def batch_shapes(policy: Policy) -> list:
    """The shapes of the inputs, with a batch of any size."""
    (batch,) = jax.export.symbolic_shape("batch")
    return [jax.ShapeDtypeStruct((batch, *x.shape), x.dtype) for x in policy.inputs.values()]


# --- formats ---


def to_stablehlo(policy: Policy) -> bytes:
    export = jax.export.export(jax.jit(policy.act), platforms=PLATFORMS)
    return export(*batch_shapes(policy)).serialize()


def branch_of_cpu(*operands, default=None, **branches):
    """`jax.lax.platform_dependent` on a CPU. ONNX has no such choice."""
    return branches.get("cpu", default)(*operands)


def to_onnx(policy: Policy) -> bytes:
    """Raises RuntimeError if the model acts unlike the policy."""
    logging.getLogger("jax2onnx").setLevel(logging.ERROR)  # it misses packages of its examples
    import jax2onnx

    shapes = batch_shapes(policy)
    # Traced before jax2onnx replaces functions of Flax, whose replacements know no `vmap`.
    with mock.patch.object(jax.lax, "platform_dependent", branch_of_cpu):
        traced = jax.make_jaxpr(policy.act)(*shapes)
    model = jax2onnx.to_onnx(
        jax.extend.core.jaxpr_as_fun(traced),
        shapes,
        model_name="policy",
        input_names=list(policy.inputs),
        output_names=policy.outputs,
    ).SerializeToString()
    check_onnx(policy, model)
    return model


def random_inputs(policy: Policy, batch: int) -> dict:
    """Inputs of all dtypes: images over all their values, other whole numbers small."""
    rng = np.random.default_rng(0)
    inputs = {}
    for name, x in policy.inputs.items():
        shape = (batch, *x.shape)
        if jnp.issubdtype(x.dtype, jnp.floating):
            values = rng.normal(size=shape)
        else:
            values = rng.integers(256 if x.dtype == np.uint8 else 2, size=shape)
        inputs[name] = values.astype(x.dtype)
    return inputs


def check_onnx(policy: Policy, model: bytes) -> None:
    """Compare actions and memories in ONNX Runtime. Raises RuntimeError if they differ."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    inputs = random_inputs(policy, batch=16)
    expected = jax.jit(policy.act)(*inputs.values())
    used = {x.name for x in session.get_inputs()}
    outputs = session.run(None, {name: x for name, x in inputs.items() if name in used})
    for name, ours, theirs in zip(policy.outputs, expected, outputs, strict=True):
        if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
            raise RuntimeError(f"ONNX Runtime computes another {name}")


CONVERT = {"stablehlo": to_stablehlo, "onnx": to_onnx}


def save(policy: Policy, form: str, path: Path, script: str) -> None:
    """Write the policy as a file. Raises ValueError if it cannot be converted."""
    try:
        content = CONVERT[form](policy)
    except Exception as error:  # many kinds: of JAX, jax2onnx and ONNX Runtime
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"format = {form}: the policy of {script} cannot be converted ({cause})"
        ) from error
    write(path, lambda file: file.write(content))


def describe(policy: Policy) -> str:
    """Inputs and outputs in words."""
    shapes = []
    for name, x in policy.inputs.items():
        shapes.append(f"{name} [{', '.join(['batch', *map(str, x.shape)])}] {x.dtype}")
    return f"{', '.join(shapes)} -> {', '.join(policy.outputs)}"
