"""Plan a script's training on a GPU without one: its kernels, its memory, and a part of its time.

    python benchmarks/plan ppo --num-seeds 2048 --gpu h100
    python benchmarks/plan sac --config configs/sac/pendulum.yaml --gpu rtx4090 --kernels

XLA compiles `jit(vmap(make_train(config)))` for the GPU in benchmarks/plan/gpus/NAME.txt, and the
compiled program is analysed. This is a plan, not a measurement. It needs the CUDA wheels of JAX
(the extra `gpu`), but neither GPU nor driver.

A kernel is an instruction that computes something. A sort or a call of a library counts as one
kernel, although it may start several. The kernels of a loop count once per trip, or once if XLA
does not know the trip count. A conditional counts as its longest branch. The table marks both.
Bytes are what a kernel reads and writes; if it slices, gathers from or updates a buffer in place,
only that part counts. A kernel is planned with the time of its start, or with the time of its bytes
at the GPU's bandwidth if that is longer. The plan leaves out caches, which save time, and
arithmetic, which costs time: the time of the starts is a lower bound, and the sum is not.
"""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from onejit.base.files import write
from onejit.base.text import nearest
from onejit.engine import memory
from onejit.script import command_line
from onejit.script.configs import plain
from onejit.script.contract import Script
from onejit.script.errors import about_the_config
from onejit.script.load import load_script
from plan.program import (
    Instruction,
    Loop,
    find_loops,
    is_of_environment,
    is_of_gradient,
    read_program,
    step_loop,
)

GPUS = Path(__file__).parent / "gpus"
POOL = 0.75  # share of a GPU's memory that JAX uses by default


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a plan."""

    num_seeds: int = 256  # agents that train at once on the GPU
    gpu: str = "h100"  # name in benchmarks/plan/gpus, or file in the same format
    launch_us: float = 2.0  # least time for the start of a kernel, in microseconds
    # search for the largest number of seeds that fits, with up to four more compilations
    most_seeds: bool = True
    kernels: bool = False  # list the kernels of each loop, and their origin in the script
    json: Path | None = None  # JSON file to write, for other programs
    # GiB of the GPU to use; three quarters of its memory by default, as in JAX
    memory: float | None = None


# --- the GPU ---


class GPU(NamedTuple):
    description: str  # for XLA
    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second


def read_gpu(name: str) -> GPU:
    """A GPU of benchmarks/plan/gpus, or of a file in the same format. Raises ValueError."""
    path = GPUS / f"{name}.txt"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = sorted(file.stem for file in GPUS.glob("*.txt"))
        raise ValueError(
            f"gpu = {name}: no such file; known are {', '.join(known)}{nearest(name, known)}"
        )
    text = path.read_text()

    def read(field):
        match = re.search(rf'^\s*{field}: *"?(.+?)"?\s*$', text, re.MULTILINE)
        if match is None:
            raise ValueError(f"gpu = {name}: lacks {field}")
        return match[1]

    return GPU(
        description=text,
        name=read("device_description_str"),
        memory=float(read("device_memory_size")),
        bandwidth=float(read("memory_bandwidth")),
    )


def compiler(script: Script, config, description: str):
    """`compile_size(num_seeds)` for the GPU in the description. Raises ValueError."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(map(importlib.util.find_spec, plugins)):
        raise ValueError("gpu: needs the CUDA wheels of JAX: pip install -e '.[gpu]'")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description, topology="1x1x1"
        )
    except Exception as error:  # many kinds: of XLA and its plugin
        raise ValueError(f"gpu: XLA rejects its description ({error})") from error

    def compile_size(num_seeds: int):
        on_gpu = jax.sharding.SingleDeviceSharding(topology.devices[0])
        keys = jax.ShapeDtypeStruct((num_seeds,), jax.random.key(0).dtype, sharding=on_gpu)
        with about_the_config(script, config):
            lowered = jax.jit(jax.vmap(script.make_train(config))).lower(keys)
        if "python_gpu_callback" in lowered.as_text():
            name = config.env_name
            raise ValueError(
                f"env_name = {name}: the program calls the host, as for an environment outside JAX "
                "or jax.debug.print; XLA cannot compile that without the GPU"
            )
        return lowered.compile()

    return compile_size


def most_seeds(compile_size, tried: dict, limit: float) -> int:
    """The most seeds whose compiled program fits.

    `tried` {seeds: bytes}. Each guess is on the line through the last two.
    """
    for _ in range(4):
        (seeds_a, bytes_a), (seeds_b, bytes_b) = list(tried.items())[-2:]
        bytes_per_seed = (bytes_b - bytes_a) / (seeds_b - seeds_a)
        if bytes_per_seed == 0:
            bytes_per_seed = 1 / (seeds_b - seeds_a)
        guess = int(seeds_b + (limit - bytes_b) / bytes_per_seed)
        if guess < 1 or guess in tried or 0.98 * limit < bytes_b <= limit:
            break
        tried[guess] = memory.program_bytes(compile_size(guess))
    return max(seeds for seeds, needed in tried.items() if needed <= limit)


# --- the plan ---


def place_of(instruction: Instruction, script: Script) -> str:
    """The two innermost functions in the script that an instruction stems from, if any."""
    frames = [frame for frame in instruction.frames if frame[0] == script.__file__]
    frames = frames or instruction.frames
    if not frames:
        return ""
    functions = [function.rpartition(".")[2] for _, _, function in reversed(frames[:2])]
    names = " > ".join(dict.fromkeys(functions))
    file, line, _ = frames[0]
    return f"{names} ({Path(file).name}:{line})"


def operation_of(instruction: Instruction) -> str:
    """JAX's operation, without the loops around it."""
    return instruction.op_name.rpartition("while/body/")[2].removeprefix("closed_call/")


def describe_loop(loop: Loop, script: Script, seconds) -> dict:
    """A loop in bytes and seconds, of one run of its body with inner loops; `own` without them."""
    name = "whole training"
    if loop.at is not None:
        name = place_of(loop.at, script) or loop.at.op_name
    own = []
    for kernel, size in loop.kernels:
        own.append([kernel.name, size, place_of(kernel, script), operation_of(kernel)])
    return {
        "loop": name,
        "depth": loop.depth,
        "trips": loop.trips,
        "runs": loop.runs,
        "notes": sorted(loop.notes),
        "kernels": loop.total(),
        "bytes": loop.total(lambda kernel, size: size),
        "seconds": loop.total(seconds),
        "own": own,
    }


def environment_steps_at_a_time(config, loop: Loop) -> int:
    """Steps of an environment in one run of a loop's body: more than one if it is unrolled."""
    return max(1, config.num_updates * config.num_steps // loop.runs)


def describe_steps(loops: list[Loop], script: Script, config, seconds) -> dict:
    """The loops around a step of the environment and around a gradient step."""
    environment = step_loop(loops, is_of_environment)
    if environment is None:  # a script without `env.step`
        most = max(loops, key=lambda loop: loop.runs)
        environment = (most, most.total())
    loop, kernels = environment
    at_a_time = environment_steps_at_a_time(config, loop)
    steps = {"environment": describe_loop(loop, script, seconds)}
    steps["environment"] |= {"kernels": kernels, "at_a_time": at_a_time}

    gradient = step_loop(loops, is_of_gradient)
    if gradient is not None:
        loop, kernels = gradient
        steps["gradient"] = describe_loop(loop, script, seconds)
        steps["gradient"] |= {"kernels": kernels, "at_a_time": 1}
    return steps


def make_plan(script: Script, config, options: Options) -> dict:
    """The plan that `--json` writes, in bytes and seconds. Raises ValueError."""
    gpu = read_gpu(options.gpu)
    limit = options.memory * memory.GIB if options.memory else POOL * gpu.memory
    compile_size = compiler(script, config, gpu.description)
    compiled = compile_size(options.num_seeds)
    parts = memory.memory_of(compiled)
    needed = memory.program_bytes(compiled)
    loops = find_loops(read_program(compiled.as_text() or "")).all()
    seconds_per_launch = options.launch_us / 1e6

    def seconds(kernel, size):
        return max(seconds_per_launch, size / gpu.bandwidth)

    most = False
    if options.most_seeds:
        most = most_seeds(compile_size, {0: 0, options.num_seeds: needed}, limit)
    return {
        "script": Path(script.__file__).stem,
        "settings": plain(config),
        "num_seeds": options.num_seeds,
        "gpu": gpu.name,
        "seconds_per_launch": seconds_per_launch,
        "bytes_per_second": gpu.bandwidth,
        "memory": {
            "needed": needed,
            "arguments": parts.argument_size_in_bytes,
            "output": parts.output_size_in_bytes,
            "temporary": parts.temp_size_in_bytes,
            "limit": round(limit),
        },
        "most_seeds": most,
        "steps": describe_steps(loops, script, config, seconds),
        "loops": [describe_loop(loop, script, seconds) for loop in loops],
    }


# --- text ---


def show_memory(plan: dict) -> None:
    sizes = {name: f"{size / memory.GIB:.3g} GiB" for name, size in plan["memory"].items()}
    parts = ", ".join(f"{name} {sizes[name]}" for name in ("arguments", "output", "temporary"))
    fits = "fits" if plan["memory"]["needed"] <= plan["memory"]["limit"] else "DOES NOT FIT"
    print(f"memory   needed {sizes['needed']} ({parts}), limit {sizes['limit']}: {fits}")
    if plan["most_seeds"]:
        print(f"         {plan['most_seeds']:,} seeds are the most that were found to fit")


def show_kernels(plan: dict) -> None:
    print(f"kernels  {plan['loops'][0]['kernels']:,} in the whole training")
    for name, step in plan["steps"].items():
        runs = f"{step['runs']:,} times"
        if step["at_a_time"] > 1:
            runs += f", {step['at_a_time']} steps at a time"
        kernels = round(step["kernels"] / step["at_a_time"], 1)
        print(f"         {kernels:,g} in each {name} step: {step['loop']}, which runs {runs}")


def show_time(plan: dict) -> None:
    whole = plan["loops"][0]
    starts = whole["kernels"] * plan["seconds_per_launch"]
    moves = whole["bytes"] / plan["bytes_per_second"]
    print(f"bytes    {whole['bytes'] / 1e12:.3g} TB")
    parts = f"starts of kernels {starts:.3g} s at least, bytes {moves:.3g} s"
    print(f"time     {whole['seconds']:.3g} s without arithmetic; {parts}")


def show_loops(plan: dict, kernels: bool) -> None:
    """A table of the loops, and of their kernels."""
    loops = plan["loops"]
    whole_seconds = loops[0]["seconds"]
    width = max(len(row["loop"]) + 2 * row["depth"] for row in loops)
    print(f"{'loop':{width}}{'trips':>9}{'runs':>13}{'kernels':>12}{'MB':>17}{'of the time':>13}")
    for row in loops:
        indent = "  " * row["depth"]
        share = row["seconds"] * row["runs"] / whole_seconds
        counts = f"{row['trips']:9,}{row['runs']:13,}{row['kernels']:12,}"
        numbers = f"{counts}{row['bytes'] / 1e6:17,.1f}{share:13.1%}"
        print("  ".join([f"{indent + row['loop']:{width}}{numbers}", *row["notes"]]))
        if kernels:
            for name, size, place, operation in row["own"]:
                print(f"{indent}  {size / 1e6:10.3f} MB  {name}  {place}  {operation}")


def show(plan: dict, kernels: bool) -> None:
    task = f"{plan['script']} {plan['settings']['env_name']}"
    print(f"{task}, {plan['num_seeds']:,} seeds on one {plan['gpu']}")
    print("a plan, not a measurement\n")
    show_memory(plan)
    show_kernels(plan)
    show_time(plan)
    print()
    show_loops(plan, kernels)


def main(words) -> None:
    """Plan as the command line says."""
    name, flags = command_line.take_script(words)
    script = load_script(name)
    config, options, hosts = command_line.parse_with(script, flags, Options, __doc__, prog="plan")
    if hosts != command_line.Hosts():
        raise ValueError(
            "coordinator, num_processes, process_id, distributed: a plan is for one GPU"
        )
    plan = make_plan(script, config, options)
    show(plan, options.kernels)
    if options.json:
        write(options.json, json.dumps(plan))
