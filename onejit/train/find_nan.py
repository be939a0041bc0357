"""Find the first value that is not finite in a run with diverged seeds or metrics that are NaN.

    onejit find-nan RUN_DIR
    onejit train ppo --lr 1e30 --find-nan       train, and look if a seed has diverged

Runs repeat bit for bit. The search therefore starts again from the last checkpoint at which all
seeds are finite, or from the beginning, halves the updates until a single one is left, and
evaluates the operations of this update one by one. It writes no results. Like `onejit resume`, it
deletes incomplete checkpoints and renames damaged ones.
"""

import contextlib
import dataclasses
import linecache
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from onejit.base import statistics
from onejit.base.signals import stopping
from onejit.base.text import plural
from onejit.engine import compilation, hosts, loop
from onejit.engine.checkpoints import newest, restore, updates_of
from onejit.envs import host
from onejit.run.directory import checkpoints_of, script_and_config, with_all_steps
from onejit.run.resume import open_run, options_of
from onejit.script.contract import Script
from onejit.script.steps import timesteps_until
from onejit.train.options import Options

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "distrax", "tensorflow_probability", "chex")

OF_METRICS = "metrics."  # prefix of what is not part of the runner state


TOOL = "onejit find-nan"


class Origin(NamedTuple):
    """The operation that made the first value that is not finite."""

    primitive: str
    value: str  # "NaN" or "infinity"
    names: str  # JAX's stack of names, such as transpose(jvp(Actor))
    frames: list  # (file, line, function), innermost first
    cause: Any  # the Origin of an infinity that became NaN, or None


# --- which leaves are finite ---


def has_floats(leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


@jax.jit
def counts(state, agent, metrics) -> dict:
    """How many entries of each seed are NaN, {path: [seeds]}, and infinite in what was learned.

    A metric may be NaN in an update in which no episode ended.
    """

    def of_each_seed(leaf, is_bad):
        return is_bad(leaf).reshape(len(leaf), -1).sum(axis=1)

    found = {}
    for kind, tree, is_bad in (("NaN", state, jnp.isnan), ("infinite", agent, jnp.isinf)):
        for name, leaf in statistics.named_leaves(tree).items():
            if has_floats(leaf):
                found[f"{name}: {kind}"] = of_each_seed(leaf, is_bad)
    for name, values in metrics.items():
        is_broken = jnp.isnan(values) & (metrics["episodes"] > 0)
        found[f"{OF_METRICS}{name}: NaN"] = is_broken.sum(axis=1)
    return found


def count_bad(carry) -> dict:
    state = carry.runner_state
    found = counts(state, state.agent, carry.metrics)
    return {name: hosts.fetch(count) for name, count in found.items()}


def newly_bad(before: dict, after: dict) -> np.ndarray:
    """Which seeds have a leaf that is not finite and was finite in `before`: [seeds]."""
    return np.any([(before[name] == 0) & (after[name] > 0) for name in after], axis=0)


# --- the first update ---


def last_finite(program, key_data, directory: Path):
    """`(carry, updates done)` of the last checkpoint at which all seeds are finite, or the start.

    Raises OSError.
    """
    hosts.only_first(newest, directory)  # renames damaged checkpoints, which `restore` cannot read
    for update in reversed(hosts.agree(updates_of(directory))):
        carry = restore(directory, update, program)
        if not any(count.any() for count in count_bad(carry).values()):
            return carry, update
    return program.start({}, jax.device_put(key_data, program.sharding)), 0


def first_bad_update(program, carry, done: int):
    """The first update after which a seed is not finite, or None if all stay finite.

    `(carry, update, counts before, counts after)`, with the carry from before this update.
    """
    start = count_bad(carry)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    def advance(carry, first, last):
        own_copy = copy(carry._replace(evaluations=None))  # `advance` donates its argument
        return program.advance(own_copy, {}, first, last)

    chunk = 1
    while done < program.num_updates:
        last = min(done + chunk, program.num_updates)
        later = advance(carry, done, last)
        if newly_bad(start, count_bad(later)).any():
            break
        carry = later
        done = last
        chunk = 2 * chunk
    else:
        return None
    while last - done > 1:
        middle = (done + last) // 2
        later = advance(carry, done, middle)
        if newly_bad(start, count_bad(later)).any():
            last = middle
        else:
            carry = later
            done = middle
    return carry, done, count_bad(carry), count_bad(advance(carry, done, done + 1))


# --- the first operation ---


IS_BAD = {"NaN": jnp.isnan, "infinity": jnp.isinf}


def with_outputs(jaxpr, wanted: list):
    """The jaxpr that computes the variables `wanted`, with all that they need."""
    return jaxpr.replace(outvars=wanted, debug_info=jaxpr.debug_info.with_unknown_names())


def evaluate_flags(jaxpr, consts, args) -> tuple:
    """For each variable of a level, {kind: whether an entry is NaN, or infinite}.

    Also for the cases of each `select_n`: whether a selected entry is.
    """

    def run(consts, args):
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))
        flags = [flag(values[var]) for var in jaxpr.invars]
        selected = []

        for eqn in jaxpr.eqns:
            inputs = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
            parameters = eqn.primitive.get_bind_params(eqn.params)
            outputs = eqn.primitive.bind(*inputs, **parameters)
            if not eqn.primitive.multiple_results:
                outputs = [outputs]
            values.update(zip(eqn.outvars, outputs, strict=True))
            flags += [flag(output) for output in outputs]
            if eqn.primitive.name == "select_n":
                which, *cases = inputs
                selected.append([flag(case, which == i) for i, case in enumerate(cases)])
        return flags, selected

    def flag(value, where=True):
        if not has_floats(value):
            return {kind: jnp.zeros((), bool) for kind in IS_BAD}
        return {kind: (is_bad(value) & where).any() for kind, is_bad in IS_BAD.items()}

    flags, selected = jax.device_get(jax.jit(run)(consts, args))
    variables = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    return dict(zip(variables, flags, strict=True)), iter(selected)


def inner_of(eqn):
    """The jaxpr that an operation such as a call or a custom derivative consists of, or None."""
    for value in eqn.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        consts = getattr(value, "consts", ())
        if not hasattr(jaxpr, "eqns"):
            continue
        if (len(jaxpr.invars), len(jaxpr.outvars)) == (len(eqn.invars), len(eqn.outvars)):
            return jaxpr, consts
    return None


def find_origin(jaxpr, consts, args, output: int, kind: str, names: str = "", frames=()):
    """The Origin of an output of `jaxpr` that is not finite while the inputs `args` are.

    Walks back from the output to the operation that made it of finite values, and into it. None if
    the output comes from an input.
    """
    flags, selected = evaluate_flags(jaxpr, consts, args)
    producers = {}
    cases = {}
    for eqn in jaxpr.eqns:
        for i, var in enumerate(eqn.outvars):
            producers[var] = (eqn, i)
        if eqn.primitive.name == "select_n":
            cases[eqn.outvars[0]] = next(selected)

    def bad_inputs(eqn):
        result = []
        for i, var in enumerate(eqn.invars):
            if isinstance(var, Literal) or var not in flags or not flags[var][kind]:
                continue
            if eqn.primitive.name == "select_n" and not cases[eqn.outvars[0]][i - 1][kind]:
                continue  # it is not selected
            result.append(var)
        return result

    var = jaxpr.outvars[output]
    while var in producers:
        eqn, i = producers[var]
        earlier = bad_inputs(eqn)
        if not earlier:
            return look_into(jaxpr, consts, args, eqn, i, kind, flags, names, frames)
        var = earlier[0]
    return None


def look_into(jaxpr, consts, args, eqn, output, kind, flags, names, frames):
    """The Origin within an operation, or the operation itself."""
    names = f"{names}/{eqn.source_info.name_stack}".strip("/")
    frames = [*frames_of(eqn), *frames]
    variables = [var for var in eqn.invars if not isinstance(var, Literal)]
    evaluate = jax.jit(jaxpr_as_fun(ClosedJaxpr(with_outputs(jaxpr, variables), consts)))
    values = dict(zip(variables, evaluate(*args), strict=True))
    inputs = [var.val if isinstance(var, Literal) else values[var] for var in eqn.invars]
    found = None
    if eqn.primitive.name == "scan":
        found = look_into_scan(eqn, inputs, output, kind, names, frames)
    elif eqn.primitive.name == "cond":
        branch = eqn.params["branches"][int(np.clip(inputs[0], 0, len(eqn.params["branches"]) - 1))]
        found = find_origin(branch.jaxpr, branch.consts, inputs[1:], output, kind, names, frames)
    elif inner := inner_of(eqn):
        inner_jaxpr, inner_consts = inner
        found = find_origin(inner_jaxpr, inner_consts, inputs, output, kind, names, frames)
    if found:
        return found
    cause = None
    if kind == "NaN":
        for var in variables:
            if var in flags and flags[var]["infinity"]:
                outputs = with_outputs(jaxpr, [var])
                cause = find_origin(outputs, consts, args, 0, "infinity", "", frames[1:])
                break
    return Origin(eqn.primitive.name, kind, names, frames, cause)


def num_stacked(variables, of_step) -> int:
    """How many variables of a scan hold a value for each step, where its body has one value."""
    pairs = zip(variables, of_step, strict=True)
    return sum(variable.aval.shape != aval.shape for variable, aval in pairs)


def look_into_scan(eqn, inputs, output, kind, names, frames):
    """The Origin within the first iteration whose results are not finite."""
    body = eqn.params["jaxpr"]
    num_carry = len(eqn.outvars) - num_stacked(eqn.outvars, body.out_avals)
    num_consts = len(inputs) - num_carry - num_stacked(eqn.invars, body.in_avals)
    length = eqn.params["length"]
    shared = inputs[:num_consts]
    carry = inputs[num_consts : num_consts + num_carry]
    rows = inputs[num_consts + num_carry :]
    step = jax.jit(jaxpr_as_fun(body))
    order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    became_infinite = None  # the first iteration that makes an entry of the carry infinite
    for i in order:
        args = [*shared, *carry, *(row[i] for row in rows)]
        results = step(*args)
        for j in {*range(num_carry), output}:
            if not is_any(results[j], kind) or (j < num_carry and is_any(carry[j], kind)):
                continue
            found = find_origin(body.jaxpr, body.consts, args, j, kind, names, frames)
            if found and found.cause is None and became_infinite:
                args, j = became_infinite
                cause = find_origin(body.jaxpr, body.consts, args, j, "infinity", names, frames)
                found = found._replace(cause=cause)
            return found
        for j in range(num_carry):
            is_new = is_any(results[j], "infinity") and not is_any(carry[j], "infinity")
            if kind == "NaN" and is_new and became_infinite is None:
                became_infinite = (args, j)
        carry = results[:num_carry]
    return None


def is_any(value, kind: str) -> bool:
    return has_floats(value) and bool(IS_BAD[kind](value).any())


def frames_of(eqn) -> list:
    """The lines of code that an operation comes from, innermost first, without JAX and the like."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return []
    result = []
    for frame in traceback.frames:
        parts = Path(frame.file_name).parts
        is_library = "site-packages" in parts and (
            parts[parts.index("site-packages") + 1] in LIBRARIES
        )
        if (
            not is_library
            and Path(frame.file_name).is_file()
            and Path(__file__) != Path(frame.file_name)
        ):
            result.append((frame.file_name, frame.line_num, frame.function_name))
    return result


# --- the report ---


def kind_of_value(origin: Origin) -> str:
    """What a value is for the training, from JAX's names of the transformations."""
    if "transpose(" in origin.names:
        return "a gradient"
    functions = {function.rpartition(".")[2] for _, _, function in origin.frames}  # of classes
    if functions & {"step_env", "reset_env"}:
        return "an observation, a reward or a state of the environment"
    if "jvp(" in origin.names:
        return "a loss, or what it is computed from"
    return "a value"


def text_of(origin: Origin) -> str:
    text = f"{origin.value} by the operation {origin.primitive}, {kind_of_value(origin)}\n"
    if origin.names:
        text += f"    names of JAX: {origin.names}\n"
    shown = set()
    for file, number, function in origin.frames:
        if (file, number) not in shown and len(shown) < 3:
            line = linecache.getline(file, number).strip()
            text += f"    {file}, line {number}, in {function}: {line}\n"
            shown.add((file, number))
    if origin.cause:
        text += f"  of an infinity: {text_of(origin.cause)}"
    return text


def trace(function, arg, before: list) -> Origin | None:
    """The Origin of the first result of `function(arg)` that is not finite.

    It is passed over if its entry of `before` is not finite either.
    """
    closed = jax.make_jaxpr(function)(arg)
    args = jax.tree.leaves(arg)
    outputs = jax.jit(jaxpr_as_fun(closed))(*args)
    for kind in ("NaN", "infinity"):
        for i in range(len(outputs)):
            if is_any(outputs[i], kind) and not is_any(before[i], kind):
                found = find_origin(closed.jaxpr, closed.consts, args, i, kind)
                if found:
                    return found
    return None


def trace_update(script: Script, config, state, broken=()) -> Origin | None:
    """The Origin of what is not finite after an update of one seed, and was finite before it.

    `broken` are the metrics that are NaN.
    """
    _, update = script.make_learner(config)

    def results(state):
        next_state, metrics = update(state)
        return next_state, [metrics[name] for name in broken]

    return trace(results, state, before=[*jax.tree.leaves(state), *[0.0] * len(broken)])


def trace_init(script: Script, config, key) -> Origin | None:
    """The Origin of what is not finite before the first update, such as in a warm-up."""
    init, _ = script.make_learner(config)
    return trace(init, key, before=[0.0] * len(jax.tree.leaves(jax.eval_shape(init, key))))


def search_slice(script: Script, config, options, run_dir, program, first: int) -> str | None:
    """What was found in the slice from the seed `first` on, or None."""
    seeds, numbers = loop.runs_of_slice(first, program.size, options.num_seeds)
    key_data = loop.seed_keys(options)[numbers]
    directory = checkpoints_of(run_dir, seeds, options.num_seeds)
    carry, done = last_finite(program, key_data, directory)
    print(
        f"seeds {seeds.start} to {seeds.stop - 1}: the search starts after {plural(done, 'update')}"
    )
    found = first_bad_update(program, carry, done)
    if found is None:
        return None
    carry, update, before, after = found
    seed = int(np.flatnonzero(newly_bad(before, after))[0])
    state = jax.tree.map(lambda leaf: leaf[seed], carry.runner_state)
    state = jax.device_put(state, jax.devices()[0])

    begin = timesteps_until(config, update)
    end = timesteps_until(config, update + 1)
    text = f"seed {first + seed}: the first update with a value that is not finite is {update + 1} "
    text += f"of {config.num_updates}, environment steps {begin} to {end}\n"
    newly = [leaf for leaf in after if before[leaf][seed] == 0 and after[leaf][seed] > 0]
    of_metrics = [leaf for leaf in newly if leaf.startswith(OF_METRICS)]
    broken = [leaf.removeprefix(OF_METRICS).rpartition(":")[0] for leaf in of_metrics]
    origin = trace_update(script, config, state, broken)
    if origin:
        text += f"first: {text_of(origin)}"
    else:  # what is not finite has been there since the start
        origin = trace_init(script, config, jax.random.wrap_key_data(key_data[seed]))
        if origin:
            text += f"first, before all updates: {text_of(origin)}"
            text += "not finite before this update:\n"
            for leaf in before:
                if before[leaf][seed]:
                    text += f"    {leaf} in {plural(int(before[leaf][seed]), 'place')}\n"
    text += "not finite after this update:\n"
    for leaf in newly:
        text += f"    {leaf} in {plural(int(after[leaf][seed]), 'place')}\n"
    return text


def search(script: Script, config, options, run_dir, size: int | None) -> None:
    """Print what was found. Raises ValueError and OSError."""
    if not options.eval_interval:
        options = dataclasses.replace(options, eval_episodes=0)
    program, description = compilation.compile_slices(
        partial(compilation.compile_slice, script, config, [], options=options),
        total=options.num_seeds,
        size=size,
        memory_gib=options.memory,
        seconds=defaultdict(float),
    )
    if loop.holds(program.abstract.runner_state, host.HostState):
        raise ValueError("environments outside of JAX cannot be taken back to an earlier step")
    print(f"{options.num_seeds} seeds in {description}")
    for first in range(0, options.num_seeds, program.size):
        text = search_slice(script, config, options, Path(run_dir), program, first)
        if text:
            print(text, end="")
            return
    print("all values are finite")


def main(run_dir: tyro.conf.Positional[Path], memory: float | None = None) -> Path:
    """Print what was found. Returns `run_dir`. Raises ValueError and OSError.

    Args:
        run_dir: a run of `onejit train`
        memory: GiB of each device to use; 90 % of what is free by default
    """
    with stopping(TOOL, "the results stay as they are"), contextlib.ExitStack() as until_the_end:
        record = open_run(run_dir, until_the_end)
        if record.kind != "train":
            raise ValueError(f"{run_dir}: is a sweep; give a run of onejit train")
        script, config = script_and_config(run_dir, record)
        config = with_all_steps(config, record)
        options = options_of(Options, run_dir, record, memory)
        search(script, config, options, run_dir, record.slice)
    return run_dir
