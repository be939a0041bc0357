"""The greedy policy of one agent as one file: StableHLO by `jax.export`, or ONNX by jax2onnx."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces

from onejit.base.files import write
from onejit.base.packages import check_packages
from onejit.engine.evaluation import policy_of
from onejit.script.contract import Script
from onejit.script.environment import unwrap

PACKAGES = {"stablehlo": ["flatbuffers"], "onnx": ["onnx", "onnx_ir", "onnxruntime"]}
PLATFORMS = ("cpu", "cuda")  # of StableHLO, both in one file
OPSET = 21  # of ONNX: ONNX Runtime 1.19, of 2024, runs it


class Policy(NamedTuple):
    """A greedy policy with its agent inside.

    `act(*obs, *memory)` returns `[action, *next_memory]` for one observation, which is one array in
    most scripts. A policy without memory has one output. An episode begins with a memory of zeros.
    """

    act: Callable
    inputs: dict  # {name: ShapeDtypeStruct}
    outputs: list[str]


def names_of(tree, name: str) -> list[str]:
    """A name for each array of a pytree: "memory", or "obs_state" and "obs_alive"."""
    names = []
    for path, _ in jax.tree.leaves_with_path(tree):
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        names.append("_".join([name, *parts]))
    return names


def to_bounds(space, action):
    """An action [..., size] of a continuous policy as the environment takes it.

    Continuous policies act in [-1, 1], and `env` clips and rescales their actions. Whoever plays
    the file has the environment alone.
    """
    if not isinstance(space, spaces.Box):
        return action
    low = jnp.asarray(space.low, jnp.float32)
    high = jnp.asarray(space.high, jnp.float32)
    unit = (jnp.clip(action, -1.0, 1.0).reshape(*action.shape[:-1], *space.shape) + 1.0) / 2.0
    return jnp.clip(low + unit * (high - low), low, high)


def make_policy(script: Script, config, agents, seed: int) -> Policy:
    """The greedy policy of one of `agents` [num_seeds, ...]. Raises ValueError."""
    env, env_params = script.make_env(config)
    space = unwrap(env).action_space(env_params)
    start, act = policy_of(script, config)
    obs = jax.eval_shape(lambda key: env.reset(key, env_params)[0], jax.random.key(0))
    memory = start()
    if any(np.any(leaf) for leaf in jax.tree.leaves(memory)):
        name = Path(script.__file__).name
        raise ValueError(f"format: the memory of {name} does not start with zeros")
    agent = jax.tree.map(lambda leaf: jnp.asarray(leaf[seed]), agents)
    obs_arrays, obs_tree = jax.tree.flatten(obs)
    memory_arrays, memory_tree = jax.tree.flatten(jax.eval_shape(lambda: memory))

    def act_on_arrays(*arrays):
        obs = jax.tree.unflatten(obs_tree, arrays[: len(obs_arrays)])
        memory = jax.tree.unflatten(memory_tree, arrays[len(obs_arrays) :])
        action, next_memory = act(agent, memory, obs)
        return [to_bounds(space, action), *jax.tree.leaves(next_memory)]

    names = names_of(obs, "obs") + names_of(memory, "memory")
    return Policy(
        act=act_on_arrays,
        inputs=dict(zip(names, obs_arrays + memory_arrays, strict=True)),
        outputs=["action", *names_of(memory, "next_memory")],
    )


def check_format(form: str) -> None:
    """Raise ValueError if packages that a format needs are not installed."""
    check_packages(f"format = {form}", PACKAGES[form])
    if form == "onnx":  # its requirements ask for an older orbax-checkpoint than onejit's
        check_packages(f"format = {form}", ["jax2onnx"], flags="--no-deps")


def add_batch(policy: Policy, batch) -> list:
    """The shapes of the inputs for a batch."""
    return [jax.ShapeDtypeStruct((batch, *x.shape), x.dtype) for x in policy.inputs.values()]


def any_number():
    """The size of a batch that the file leaves open."""
    (batch,) = jax.export.symbolic_shape("batch")
    return batch


# --- StableHLO ---


def to_stablehlo(policy: Policy) -> tuple[bytes, str]:
    """The file, and the size of its batch in words."""
    export = jax.export.export(jax.jit(jax.vmap(policy.act)), platforms=PLATFORMS)
    return bytes(export(*add_batch(policy, any_number())).serialize()), "batch"


# --- ONNX ---


@contextlib.contextmanager
def in_words_of_onnx():
    """Trace without what ONNX lacks: a choice of the platform, and loops over one step."""
    scan = jax.lax.scan

    def branch_of_cpu(*operands, default: Any = None, **branches):
        return branches.get("cpu", default)(*operands)

    def step_or_scan(f, init, xs=None, length=None, **options):
        arrays = jax.tree.leaves(xs)
        if (length or (arrays and len(arrays[0]))) != 1:
            return scan(f, init, xs, length, **options)
        carry, y = f(init, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda x: x[None], y)

    with (
        mock.patch.object(jax.lax, "platform_dependent", branch_of_cpu),
        mock.patch.object(jax.lax, "scan", step_or_scan),
    ):
        yield


def convert(policy: Policy, act: Callable, batch) -> bytes:
    """An ONNX model of `act`. Raises many kinds of exceptions."""
    import jax2onnx  # pyright: ignore[reportMissingImports]

    shapes = add_batch(policy, batch)
    # Traced before jax2onnx replaces functions of Flax, whose replacements know no `vmap`.
    with in_words_of_onnx():
        traced = jax.make_jaxpr(act)(*shapes)
    model = jax2onnx.to_onnx(
        jax.extend.core.jaxpr_as_fun(traced),
        shapes,
        model_name="policy",
        input_names=list(policy.inputs),
        output_names=policy.outputs,
        opset=OPSET,
    )
    del model.graph.value_info[:]  # shapes inside, of which some are wrong
    return model.SerializeToString()


def to_onnx(policy: Policy) -> tuple[bytes, str]:
    """The file, and the size of its batch in words.

    Try to convert `act` under `vmap`, with a batch, and for one observation at a time.

    jax2onnx has gaps and mistakes, so each model is compared with the policy. Raises what the last
    attempt raises.
    """
    for name in ("jax2onnx", "onnx_ir"):  # they warn of packages that only examples need
        logging.getLogger(name).setLevel(logging.ERROR)

    def act_on_one(*arrays):
        return [y[None] for y in policy.act(*[x[0] for x in arrays])]

    attempts = [
        (jax.vmap(policy.act), any_number(), 16),
        (policy.act, any_number(), 16),
        (act_on_one, 1, 1),
    ]
    failure = None
    for act, batch, tested_batch in attempts:
        try:
            model = convert(policy, act, batch)
            check_onnx(policy, model, tested_batch)
            return model, str(batch)
        except Exception as error:
            failure = error
    assert failure is not None
    raise failure


def random_inputs(policy: Policy, number: int) -> dict:
    """Inputs of all dtypes: images over all their values, other whole numbers small."""
    rng = np.random.default_rng(0)
    inputs = {}
    for name, x in policy.inputs.items():
        shape = (number, *x.shape)
        if jnp.issubdtype(x.dtype, jnp.floating):
            values = rng.normal(size=shape)
        else:
            values = rng.integers(256 if x.dtype == np.uint8 else 2, size=shape)
        inputs[name] = values.astype(x.dtype)
    return inputs


def check_onnx(policy: Policy, model: bytes, batch: int) -> None:
    """Compare outputs of ONNX Runtime for 16 random inputs. Raises RuntimeError if they differ."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal: what fails raises as well
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model, options, providers=providers)
    inputs = random_inputs(policy, 16)
    expected = jax.jit(jax.vmap(policy.act))(*inputs.values())
    for first in range(0, 16, batch):
        part = slice(first, first + batch)
        outputs = session.run(policy.outputs, {name: x[part] for name, x in inputs.items()})
        for name, ours, theirs in zip(policy.outputs, expected, outputs, strict=True):
            ours = ours[part]
            if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
                raise RuntimeError(f"ONNX Runtime computes another {name}")


CONVERT = {"stablehlo": to_stablehlo, "onnx": to_onnx}


def save(policy: Policy, form: str, path: Path, script: str) -> str:
    """Write the policy as a file. Returns its inputs and outputs in words.

    Raises ValueError if the policy cannot be converted.
    """
    try:
        content, batch = CONVERT[form](policy)
    except Exception as error:  # many kinds: of JAX, jax2onnx and ONNX Runtime
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"format = {form}: the policy of {script} cannot be converted ({cause})"
        ) from error
    write(path, content)
    inputs = [in_words(name, x, batch) for name, x in policy.inputs.items()]
    arrays = jax.eval_shape(policy.act, *policy.inputs.values())
    outputs = [in_words(name, x, batch) for name, x in zip(policy.outputs, arrays, strict=True)]
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def in_words(name: str, x, batch: str) -> str:
    """Such as `obs [batch, 4] float32`."""
    return f"{name} [{', '.join([batch, *map(str, x.shape)])}] {x.dtype}"
