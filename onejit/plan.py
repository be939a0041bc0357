"""Plan a script's training on a GPU without one: its kernels, its memory and a lower bound of its time.

    onejit plan ppo --num-seeds 2048 --gpu h100
    onejit plan sac --config configs/sac/pendulum.yaml --gpu rtx4090 --kernels

XLA compiles `jit(vmap(make_train(config)))` for the GPU in onejit/gpus/NAME.txt, and the compiled program is analysed.
This is a plan, not a measurement. It needs the CUDA wheels of JAX (requirements-gpu.txt), but neither GPU nor driver.

A kernel is an instruction that computes something. A sort or a call of a library counts as one kernel, although it may
start several. The kernels of a loop count once per trip, or once if XLA does not know the trip count. A conditional
counts as its longest branch. The table marks both. Bytes are what a kernel reads and writes; if it slices, gathers from
or updates a buffer in place, only that part counts. A kernel takes at least the time of its start and the time of its
bytes at the GPU's bandwidth. The plan leaves out caches, which save time, and arithmetic, which costs time.
"""

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from onejit import command_line, running, runs

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "opt-barrier",
}
SLICES, UPDATES = (
    ("slice", "dynamic-slice", "gather"),
    {"dynamic-update-slice": 1, "scatter": -1},
)  # operand written
FIELDS = (
    "device_description_str",
    "device_memory_size",
    "memory_bandwidth",
)  # of a GPU, used here as well
PARTS = {  # how to recognize a step: the method `step` of an environment, a derivative
    "environment": lambda each: any(
        re.fullmatch(r"\w+\.step", function) for *_, function in each.frames
    ),
    "gradient": lambda each: "jvp(" in each.op_name,
}
STEPS = {  # config fields whose product is the number of steps in an update; a loop may take several steps at a time
    "environment": ("num_steps", "num_slices"),
    "gradient": (
        "inner_updates",
        "num_slices",
        "update_epochs",
        "num_minibatches",
        "gradient_steps",
    ),
}
POOL = 0.75  # share of a GPU's memory that JAX uses by default


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a plan."""

    num_seeds: int = 256  # agents that train at once on the GPU
    gpu: str = "h100"  # name in onejit/gpus, or file in the same format
    launch_us: float = 2.0  # least time for the start of a kernel, in microseconds
    most_seeds: bool = (
        True  # search for the largest number of seeds that fits, with up to four more compilations
    )
    kernels: bool = False  # list the kernels of each loop, and their origin in the script
    json: Path | None = None  # JSON file to write, for other programs
    memory: float | None = (
        None  # GiB of the GPU to use; three quarters of its memory by default, as in JAX
    )


# --- the program as XLA prints it ---


class Instruction(NamedTuple):
    name: str
    opcode: str
    bytes: int  # of its result
    operands: list[str]
    called: list[str]  # the computations that it runs
    trips: int  # of a loop; 0 where XLA does not know
    op_name: str  # JAX's operation
    frames: list  # (file, line, function), the innermost first


def shape_bytes(shape: str) -> int:
    """The size of a shape such as `(f32[8,2]{1,0}, s32[])`."""
    size = 0
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = 8 if kind == "pred" else int(re.search(r"\d+|$", kind)[0] or 0)
        size += math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8
    return size


def read_frames(text: str) -> dict:
    """`{number: [(file, line, function), ...]}` from the tables above the program, where parents come first."""
    tables, frames = {}, {0: []}
    for title, lines in re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", text, re.MULTILINE):
        rows = re.findall(r"^(\d+) (.*)$", lines, re.MULTILINE)
        tables[title] = {
            int(i): [int(n) for n in re.findall(r"=(\d+)", row)] or row.strip('"')
            for i, row in rows
        }
    for number, (location, parent) in tables.get("StackFrames", {}).items():
        file, function, line, *_ = tables["FileLocations"][location]
        frames[number] = [
            (tables["FileNames"][file], line, tables["FunctionNames"][function]),
            *frames[parent - 1],
        ]
    return frames


def read_program(text: str) -> dict:
    """`{computation: {name: Instruction}}` in order. "ENTRY" runs first. The last instruction is the result."""
    text, program = re.sub(r"/\*.*?\*/", "", text), {}
    frames = read_frames(text)
    called = (
        r"(?:body|calls|to_apply|\w+_computation|branch_computations)=\{?((?:(?:, )?%[\w.\-]+)+)"
    )
    patterns = (
        called,
        r'"known_trip_count":{"n":"(\d+)"',
        r'op_name="(.*?)"',
        r"stack_frame_id=(\d+)",
    )
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line):
            program["ENTRY" if header[1] else header[2]] = body = {}
        elif found := re.match(
            r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)", line
        ):
            name, shape, opcode, operands, rest = found.groups()
            if opcode == "custom-call":
                shape = re.sub(r"s8\[\d+\]", "", shape)  # a library's workspace
            called, trips, op_name, frame = (
                " ".join(re.findall(pattern, rest)) for pattern in patterns
            )
            operands, called = (re.findall(r"%([\w.\-]+)", each) for each in (operands, called))
            of_jax = int(trips or 0), op_name, frames.get(int(frame or 0), [])
            body[name] = Instruction(name, opcode, shape_bytes(shape), operands, called, *of_jax)
    return program


def bytes_moved(program: dict, around: dict, kernel: Instruction) -> int:
    """Bytes that a kernel of the computation `around` reads and writes."""
    if kernel.opcode == "fusion":
        body = program[kernel.called[0]]
    else:  # treat it as a fusion of one kernel
        body = {
            name: around[name]._replace(opcode="parameter", operands=[]) for name in kernel.operands
        }
        body[kernel.name] = kernel
    outputs, moved = [next(reversed(body))], 0.0
    for each in map(body.get, outputs):  # the list grows in the loop
        if each.opcode in ("tuple", "bitcast"):
            outputs += each.operands
        else:
            moved += (
                body[each.operands[UPDATES[each.opcode]]].bytes
                if each.opcode in UPDATES
                else each.bytes
            )
    needed = dict.fromkeys(body, 0.0) | dict.fromkeys(
        outputs, 1.0
    )  # part of each value that is needed
    for each in reversed(body.values()):
        for name in each.operands:
            part, is_first = needed[each.name], name == each.operands[0]
            if is_first and each.opcode in SLICES:
                part *= min(1.0, each.bytes / max(1, body[name].bytes))
            if is_first and each.opcode in UPDATES and each.name in outputs:
                part = 0.0  # the rest of the buffer stays in place
            needed[name] = min(1.0, needed[name] + part)
    return round(
        moved
        + sum(
            needed[each.name] * each.bytes for each in body.values() if each.opcode == "parameter"
        )
    )


# --- loops ---


class Loop(NamedTuple):
    """A loop, or the program as a loop of one trip."""

    at: Instruction | None
    trips: int
    runs: int  # runs of its body in the whole training
    depth: int
    kernels: list  # (instruction, bytes) of each kernel in the body, without inner loops
    inner: list
    notes: set

    def total(self, value=lambda kernel, size: 1):
        """The sum of `value` over the kernels of one run of the body, inner loops included."""
        return sum(value(*each) for each in self.kernels) + sum(
            each.trips * each.total(value) for each in self.inner
        )

    def all(self) -> list:
        return [self, *(each for inner in self.inner for each in inner.all())]


def find_loops(program: dict, name="ENTRY", loop=None) -> Loop:
    """The loops of a computation as a tree. Kernels outside of these loops go to `loop`."""
    loop = loop or Loop(None, 1, 1, 0, [], [], set())
    for each in program[name].values():
        if each.opcode == "while":
            trips, notes = each.trips or 1, set() if each.trips else {"trip count not known"}
            inner = Loop(each, trips, trips * loop.runs, loop.depth + 1, [], [], notes)
            loop.inner.append(find_loops(program, each.called[0], inner))
        elif each.opcode in ("call", "conditional", "async-start"):
            if each.opcode == "conditional":
                loop.notes.add("conditional")
            find_loops(
                program,
                max(each.called, key=lambda branch: find_loops(program, branch).total()),
                loop,
            )
        elif each.opcode not in FREE and not each.opcode.endswith(("-done", "-update")):
            loop.kernels.append((each, bytes_moved(program, program[name], each)))
    return loop


def step_loop(loops: list[Loop], is_part) -> tuple[Loop, int] | None:
    """The loop around a step that runs most often, and the number of kernels in the step.

    Inner loops of the step, such as in a physics engine, belong to it. Other inner loops, such as learning, do not.
    """
    found = []
    for loop in loops[1:]:
        parts = [inner for inner in loop.inner if is_part(inner.at)]
        if not is_part(loop.at) and (parts or any(is_part(kernel) for kernel, _ in loop.kernels)):
            found.append(
                (loop, len(loop.kernels) + sum(inner.trips * inner.total() for inner in parts))
            )
    return max(found, key=lambda each: each[0].runs, default=None)


def at_a_time(config, name: str, runs: int) -> int:
    """Steps of the kind `name` in STEPS in one run of a loop's body, which runs `runs` times."""
    return max(
        1,
        config.num_updates * math.prod(getattr(config, field, 1) for field in STEPS[name]) // runs,
    )


# --- the plan ---


def read_gpu(name: str) -> list[str]:
    """The description of a GPU for XLA, and the values of its FIELDS. Raises ValueError."""
    folder = Path(__file__).parent / "gpus"
    path = next((each for each in (folder / f"{name}.txt", Path(name)) if each.is_file()), None)
    if path is None:
        known = sorted(each.stem for each in folder.glob("*.txt"))
        raise ValueError(
            f"gpu = {name}: no such file; known are {', '.join(known)}{command_line.nearest(name, known)}"
        )
    text = path.read_text()
    found = [re.search(rf'^\s*{field}: *"?(.+?)"?\s*$', text, re.MULTILINE) for field in FIELDS]
    if not all(found):
        raise ValueError(f"gpu = {name}: lacks {FIELDS[found.index(None)]}")
    return [text, *(each[1] for each in found)]


def compiler(script, config, description: str):
    """`compile_size(num_seeds)` for the GPU in the description. Raises ValueError."""
    if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        raise ValueError("gpu: needs the CUDA wheels of JAX: pip install -r requirements-gpu.txt")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description, topology="1x1x1"
        )
    except Exception as error:  # many kinds: of XLA and its plugin
        raise ValueError(f"gpu: XLA rejects its description ({error})") from error

    def compile_size(num_seeds: int):
        on_gpu = jax.sharding.SingleDeviceSharding(topology.devices[0])
        keys = jax.ShapeDtypeStruct((num_seeds,), jax.random.key(0).dtype, sharding=on_gpu)
        with running.naming_the_field(script, config):
            lowered = jax.jit(jax.vmap(script.make_train(config))).lower(keys)
        return lowered.compile()

    return compile_size


def most_seeds(compile_size, tried: dict, limit: float) -> int:
    """The most seeds whose compiled program fits. Each guess is on the line through the last two in `tried`."""
    for _ in range(4):
        (seeds_a, bytes_a), (seeds_b, bytes_b) = list(tried.items())[-2:]
        guess = int(seeds_b + (limit - bytes_b) * (seeds_b - seeds_a) / ((bytes_b - bytes_a) or 1))
        if guess < 1 or guess in tried or 0.98 * limit < bytes_b <= limit:
            break
        tried[guess] = running.program_bytes(compile_size(guess))
    return max(seeds for seeds, needed in tried.items() if needed <= limit)


def make_plan(script, config, options: Options, memory: float | None) -> dict:
    """The plan that `--json` writes, in bytes and seconds. `memory`: GiB of the GPU to use. Raises ValueError."""
    description, device, capacity, bandwidth = read_gpu(options.gpu)
    limit = memory * running.GIB if memory else POOL * float(capacity)
    compile_size = compiler(script, config, description)
    compiled = compile_size(options.num_seeds)
    parts, needed = compiled.memory_analysis(), running.program_bytes(compiled)
    loops = find_loops(read_program(compiled.as_text())).all()

    def seconds(kernel, size):
        return max(options.launch_us / 1e6, size / float(bandwidth))

    def place(each):  # the two innermost functions in the script, if there are any
        own = [frame for frame in each.frames if frame[0] == script.__file__] or each.frames
        names = dict.fromkeys(function.rpartition(".")[2] for *_, function in reversed(own[:2]))
        return f"{' > '.join(names)} ({Path(own[0][0]).name}:{own[0][1]})" if own else ""

    def operation(each):
        return each.op_name.rpartition("while/body/")[2].removeprefix("closed_call/")

    def describe(loop):
        return {
            "loop": (place(loop.at) or loop.at.op_name) if loop.at else "whole training",
            "depth": loop.depth, "trips": loop.trips, "runs": loop.runs, "notes": sorted(loop.notes),
            # of one run of its body, inner loops included, and its own kernels
            "kernels": loop.total(), "bytes": loop.total(lambda _, size: size), "seconds": loop.total(seconds),
            "own": [[each.name, size, place(each), operation(each)] for each, size in loop.kernels],
        }  # fmt: skip

    steps = {name: step_loop(loops, is_part) for name, is_part in PARTS.items()}
    if not steps["environment"]:  # a script without `env.step`
        most = max(loops, key=lambda loop: loop.runs)
        steps["environment"] = most, most.total()

    def describe_step(name, loop, kernels):
        return describe(loop) | {
            "kernels": kernels,
            "at_a_time": at_a_time(config, name, loop.runs),
        }

    return {
        "script": Path(script.__file__).stem, "settings": runs.plain(config), "num_seeds": options.num_seeds,
        "gpu": device, "seconds_per_launch": options.launch_us / 1e6, "bytes_per_second": float(bandwidth),
        "memory": {"needed": needed, "arguments": parts.argument_size_in_bytes, "output": parts.output_size_in_bytes,
                   "temporary": parts.temp_size_in_bytes, "limit": round(limit)},
        "most_seeds": options.most_seeds and most_seeds(compile_size, {0: 0, options.num_seeds: needed}, limit),
        "steps": {name: describe_step(name, *each) for name, each in steps.items() if each},
        "loops": [describe(loop) for loop in loops],
    }  # fmt: skip


def show(plan: dict, kernels: bool) -> None:
    needed, *parts, limit = (
        f"{name} {size / running.GIB:.3g} GiB" for name, size in plan["memory"].items()
    )
    fits = "fits" if plan["memory"]["needed"] <= plan["memory"]["limit"] else "DOES NOT FIT"
    loops, whole = plan["loops"], plan["loops"][0]
    print(
        f"{plan['script']} {plan['settings']['env_name']}, {plan['num_seeds']:,} seeds on one {plan['gpu']}"
    )
    print(f"a plan, not a measurement\n\nmemory   {needed} ({', '.join(parts)}), {limit}: {fits}")
    if plan["most_seeds"]:
        print(f"         {plan['most_seeds']:,} seeds are the most that were found to fit")
    print(f"kernels  {whole['kernels']:,} in the whole training")
    for name, step in plan["steps"].items():
        runs = f"{step['runs']:,} times" + (
            f", {step['at_a_time']} steps at a time" * (step["at_a_time"] > 1)
        )
        kernels_of_one = round(step["kernels"] / step["at_a_time"], 1)
        print(
            f"         {kernels_of_one:,g} in each {name} step: {step['loop']}, which runs {runs}"
        )
    starts, moves = (
        whole["kernels"] * plan["seconds_per_launch"],
        whole["bytes"] / plan["bytes_per_second"],
    )
    print(f"bytes    {whole['bytes'] / 1e12:.3g} TB")
    print(
        f"time     {whole['seconds']:.3g} s at least; starts of kernels {starts:.3g} s, bytes {moves:.3g} s\n"
    )
    width = max(len(row["loop"]) + 2 * row["depth"] for row in loops)
    print(f"{'loop':{width}}{'trips':>9}{'runs':>13}{'kernels':>12}{'MB':>17}{'of the time':>13}")
    for row in loops:
        indent, share = "  " * row["depth"], row["seconds"] * row["runs"] / whole["seconds"]
        numbers = f"{row['trips']:9,}{row['runs']:13,}{row['kernels']:12,}{row['bytes'] / 1e6:17,.1f}{share:13.1%}"
        print("  ".join([f"{indent + row['loop']:{width}}{numbers}", *row["notes"]]))
        for name, size, place, operation in row["own"] if kernels else []:
            print(f"{indent}  {size / 1e6:10.3f} MB  {name}  {place}  {operation}")


def main(words) -> None:
    """Plan as the command line says."""
    name, _, words = command_line.split_words(words)
    script = runs.load_script(name)
    config, options, hosts = command_line.parse_with(script, words, Options, description=__doc__)
    if hosts != command_line.Hosts():
        raise ValueError(
            "coordinator, num_processes, process_id, distributed: a plan is for one GPU"
        )
    plan = make_plan(script, config, options, options.memory)
    show(plan, options.kernels)
    if options.json:
        runs.write(options.json, json.dumps(plan))
