"""What a GPU would run of a script's whole training, known without one: kernels, memory, a lower bound of the time.

    python tools/plan.py ppo --num-seeds 2048 --gpu h100
    python tools/plan.py sac --config configs/sac/pendulum.yaml --gpu rtx4090 --kernels

XLA compiles `jit(vmap(make_train(config)))` for the GPU that tools/gpus/NAME.txt describes; what it gives is read. It is
a plan, not a measurement. Needs the CUDA wheels of JAX (requirements-gpu.txt), no GPU and no driver.

- A kernel is every instruction that is not a mere name for a value (parameters, constants, tuples, bitcasts). A sort
  and a call of a library count as one each, though some start several. Products are those that XLA takes untuned.
- A loop's kernels are multiplied by its trip count. One that XLA does not know counts as one trip, of a conditional the
  branch with most kernels; both are said.
- Bytes are what each kernel must read and write: of a buffer that it slices, gathers from or updates in place only that
  part. Caches are left out: what stays in the L2 cache between kernels takes less time.
- A kernel takes at least what its start costs (--launch-us) and what its bytes take at the GPU's bandwidth. Arithmetic is
  not counted.
"""

import os

if __name__ == "__main__":  # read when JAX starts; a GPU that is here plays no part
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"  # it would run kernels

import dataclasses
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import results
import training
from jax.experimental import topologies

POOL = 0.75  # of a GPU's memory, which JAX takes unless told otherwise
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"}
FREE |= {"partition-id", "replica-id", "async-done", "async-update", "copy-done", "fusion-done", "custom-call-done"}
SLICES = {"slice", "dynamic-slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # which operand is written into the first one


@dataclasses.dataclass(frozen=True)
class Options:
    """One plan."""

    num_seeds: int = 256  # agents that train at once on the GPU
    gpu: str = "h100"  # a name in tools/gpus, or a file like those
    kernels: bool = False  # list the kernels of each loop, and where in the script each comes from
    most_seeds: bool = True  # look for the most seeds that fit, which compiles up to four times more
    launch_us: float = 2.0  # microseconds that starting a kernel costs at least
    json: Path | None = None  # a file for other programs


# --- the program as XLA prints it ---


class Instruction(NamedTuple):
    name: str
    opcode: str
    elements: int  # of its result
    bytes: int
    operands: list[str]
    called: list[str]  # the computations it runs
    trips: int | None  # of a loop, where XLA knows it
    op_name: str  # the operation of JAX
    frames: list  # (file, line, function), the innermost first


def measure(shape: str) -> tuple[int, int]:
    """Elements and bytes of a shape such as `(f32[8,2]{1,0}, s32[])`."""
    elements = size = 0
    for kind, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        count = math.prod(map(int, filter(None, dims.split(","))))
        bits = 8 if kind == "pred" else int((re.search(r"\d+", kind) or "0")[0])
        elements, size = elements + count, size + count * bits // 8
    return elements, size


def read_frames(text: str) -> dict:
    """Lists of (file, line, function), the innermost first, by the number of the stack frame."""
    tables = {}
    for title, lines in re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", text, re.MULTILINE):
        rows = (line.split(" ", 1) for line in lines.splitlines())
        tables[title] = {
            int(i): row.strip('"') if row[0] == '"' else {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", row)}
            for i, row in rows
        }
    frames = {0: []}
    for number, frame in sorted(tables.get("StackFrames", {}).items()):  # a frame's number is above its parent's
        place = tables["FileLocations"][frame["file_location_id"]]
        file, function = tables["FileNames"][place["file_name_id"]], tables["FunctionNames"][place["function_name_id"]]
        frames[number] = [(file, place["line"], function), *frames[frame["parent_frame_id"] - 1]]
    return frames


def read_program(text: str) -> dict[str, dict[str, Instruction]]:
    """The instructions of each computation by name, in order, the last of which is its result; "ENTRY" is the first."""
    text, frames, program = re.sub(r"/\*.*?\*/", "", text), read_frames(text), {}
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line):
            program["ENTRY" if header[1] else header[2]] = body = {}
        elif found := re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)", line):
            _, name, shape, opcode, inside, rest = found.groups()
            if opcode == "custom-call":
                shape = re.sub(r"s8\[\d+\]", "", shape)  # a library's workspace
            branches = re.findall(r"branch_computations=\{(.*?)\}", rest)
            called = re.findall(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)", rest)
            called += re.findall(r"%([\w.\-]+)", "".join(branches))
            trips, frame = (re.search(each, rest) for each in (r'"known_trip_count":\{"n":"(\d+)"', r"frame_id=(\d+)"))
            op_name = re.search(r'op_name="(.*?)"', rest)
            body[name] = Instruction(
                name,
                opcode,
                *measure(shape),
                operands=re.findall(r"%([\w.\-]+)", inside),
                called=called,
                trips=int(trips[1]) if trips else None,
                op_name=op_name[1] if op_name else "",
                frames=frames.get(int(frame[1]), []) if frame else [],
            )
    return program


def bytes_moved(program: dict, instruction: Instruction, around: dict) -> int:
    """What a kernel reads and writes. `around` holds the instructions of its computation."""
    body = program[instruction.called[0]] if instruction.opcode == "fusion" else None
    if body is None:  # an instruction alone is a fusion of itself
        body = {name: around[name]._replace(opcode="parameter", operands=[]) for name in instruction.operands}
        body[instruction.name] = instruction
    results_of, written = [next(reversed(body))], 0
    for name in results_of:  # grows: of a tuple its elements
        each = body[name]
        if each.opcode in ("tuple", "bitcast") and each.operands:
            results_of += each.operands
        else:
            written += body[each.operands[UPDATES[each.opcode]]].bytes if each.opcode in UPDATES else each.bytes
    portion = dict.fromkeys(body, 0.0)  # of each value, what is needed
    portion |= dict.fromkeys(results_of, 1.0)
    for each in reversed(body.values()):
        for i, name in enumerate(each.operands):
            needed, whole = portion[each.name], body[name].elements
            if i == 0 and each.opcode in UPDATES and each.name in results_of:
                needed = 0.0  # what is not overwritten stays where it is
            elif (i == 0 and each.opcode in SLICES) or each.elements == whole:
                needed *= min(1.0, each.elements / max(whole, 1))
            else:
                needed = float(needed > 0)
            portion[name] = min(1.0, portion[name] + needed)
    read = sum(portion[each.name] * each.bytes for each in body.values() if each.opcode == "parameter")
    return round(read + written)


# --- loops ---


@dataclasses.dataclass
class Loop:
    """A loop of the program, or all of it: then with one trip."""

    instruction: Instruction | None
    trips: int
    runs: int  # of its body in the whole training
    kernels: list = dataclasses.field(default_factory=list)  # (instruction, bytes) of its own, without inner loops
    inner: list = dataclasses.field(default_factory=list)
    notes: list = dataclasses.field(default_factory=list)

    def total(self, value=lambda instruction, size: 1):
        """The sum of `value` over all kernels of one run of the body, inner loops included."""
        return sum(value(*each) for each in self.kernels) + sum(each.trips * each.total(value) for each in self.inner)

    def walk(self, depth=0):
        yield depth, self
        for each in self.inner:
            yield from each.walk(depth + 1)


def find_loops(program: dict, name: str = "ENTRY", loop: Loop | None = None) -> Loop:
    """The loops of a computation, as a tree."""
    loop = loop or Loop(None, 1, 1)
    for each in program[name].values():
        if each.opcode == "while":
            trips = each.trips or 1
            inner = find_loops(program, each.called[-1], Loop(each, trips, trips * loop.runs))
            loop.inner.append(inner)
            inner.notes += [] if each.trips else ["trip count not known, counted as 1"]
        elif each.opcode == "conditional":
            branches = [find_loops(program, branch, Loop(each, 1, loop.runs)) for branch in each.called]
            most = max(branches, key=Loop.total)
            loop.kernels, loop.inner = loop.kernels + most.kernels, loop.inner + most.inner
            loop.notes += [*most.notes, "a conditional counted as its longest branch"]
        elif each.opcode in ("call", "async-start"):
            find_loops(program, each.called[0], loop)
        elif each.opcode not in FREE:
            loop.kernels.append((each, bytes_moved(program, each, program[name])))
    return loop


def function_of(loop: Loop, script) -> str:
    """The script's function in which a loop stands, with file and line."""
    if loop.instruction is None:
        return "whole training"
    file, line, function = place(loop.instruction, script)
    return f"{function.rpartition('.')[2]} ({Path(file).name}:{line})" if file else loop.instruction.op_name


def place(instruction: Instruction, script):
    """The innermost (file, line, function) of the script that an instruction comes from, or else of all."""
    own = [frame for frame in instruction.frames if frame[0] == script.__file__]
    return (own or instruction.frames or [("", 0, "")])[0]


def in_environment(instruction: Instruction) -> bool:
    """Whether a method `step` of a class asked for it: gymnax's, brax's and the scripts' environments have one."""
    return any(re.fullmatch(r"\w+\.step", function) for _, _, function in instruction.frames)


def in_gradient(instruction: Instruction) -> bool:
    return "jvp(" in instruction.op_name


def step_loop(loops: Loop, is_part) -> tuple[Loop, int] | None:
    """The loop, of those around parts of a step the one that runs most often, and the kernels of the step.

    A loop that is itself a part, as that of a physics engine, belongs to the step; other inner loops do not.
    """
    inside = [each for _, each in loops.walk() if each.instruction and not is_part(each.instruction)]
    parts = {id(each): [inner for inner in each.inner if is_part(inner.instruction)] for each in inside}
    found = [each for each in inside if parts[id(each)] or any(is_part(kernel) for kernel, _ in each.kernels)]
    if not found:
        return None
    most = max(found, key=lambda each: each.runs)
    return most, len(most.kernels) + sum(inner.trips * inner.total() for inner in parts[id(most)])


# --- the plan ---


def read_gpu(name: str) -> tuple[str, dict]:
    """The description of a GPU as XLA reads it, and its numbers. Raises ValueError."""
    folder = Path(__file__).parent / "gpus"
    path = next((each for each in (folder / f"{name}.txt", Path(name)) if each.is_file()), None)
    if path is None:
        known = sorted(each.stem for each in folder.glob("*.txt"))
        raise ValueError(f"gpu = {name}: no such file; known are {', '.join(known)}{results.nearest(name, known)}")
    text = path.read_text()
    fields = dict(re.findall(r'^\s*(device_memory_size|memory_bandwidth|device_description_str): "?(.*?)"?$', text, re.M))
    if missing := {"device_memory_size", "memory_bandwidth", "device_description_str"} - set(fields):
        raise ValueError(f"gpu = {path}: does not say {', '.join(sorted(missing))}")
    return text, fields


def make_compiler(script, config, description: str):
    """`compile_size(num_seeds)`, for the GPU of a description. Raises ValueError."""
    if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        raise ValueError("the CUDA wheels of JAX are needed: pip install -r requirements-gpu.txt")
    try:
        gpus = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    except Exception as error:  # of XLA and of the plugin
        raise ValueError(f"gpu: XLA cannot compile for this description ({error})") from error
    on_gpu = jax.sharding.SingleDeviceSharding(gpus.devices[0])

    def compile_size(num_seeds: int):
        keys = jax.ShapeDtypeStruct((num_seeds,), jax.random.key(0).dtype, sharding=on_gpu)
        with training.naming_the_field(script, config):
            lowered = jax.jit(jax.vmap(script.make_train(config))).lower(keys)
        return lowered.compile()

    return compile_size


def most_seeds(compile_size, num_seeds: int, needed: int, limit: float) -> int:
    """The most seeds seen to fit, their program compiled; 0 if none was. Memory is nearly linear in their number."""
    tried = {0: 0, num_seeds: needed}
    for _ in range(4):
        (seeds_a, bytes_a), (seeds_b, bytes_b) = list(tried.items())[-2:]
        guess = int(seeds_b + (limit - bytes_b) * (seeds_b - seeds_a) / (bytes_b - bytes_a or 1))
        if guess < 1 or guess in tried or 0.98 * limit < tried[seeds_b] <= limit:
            break
        tried[guess] = training.program_bytes(compile_size(guess))
    return max(seeds for seeds, size in tried.items() if size <= limit)


def make_plan(script, config, options: Options, limit: float | None) -> tuple[dict, Loop]:
    """What --json writes, and the loops. `limit`: bytes to use of the GPU. Raises ValueError."""
    description, gpu = read_gpu(options.gpu)
    bandwidth, launch = float(gpu["memory_bandwidth"]), options.launch_us / 1e6
    limit, compile_size = limit or POOL * float(gpu["device_memory_size"]), make_compiler(script, config, description)
    compiled = compile_size(options.num_seeds)
    memory, loops = compiled.memory_analysis(), find_loops(read_program(compiled.as_text()))

    def as_dict(depth, loop):
        return {
            "loop": function_of(loop, script), "depth": depth, "trips": loop.trips, "runs": loop.runs,
            "kernels": len(loop.kernels), "kernels_with_inner_loops": loop.total(),
            "bytes_with_inner_loops": loop.total(lambda kernel, size: size),
            "seconds_with_inner_loops": loop.total(lambda kernel, size: max(launch, size / bandwidth)),
            "notes": loop.notes,
        }  # fmt: skip

    rows = [as_dict(*each) for each in loops.walk()]
    steps = {"environment": step_loop(loops, in_environment), "gradient": step_loop(loops, in_gradient)}
    if steps["environment"] is None:  # of a script that does without `env.step`
        most = max((loop for _, loop in loops.walk()), key=lambda loop: loop.runs)
        steps["environment"] = most, most.total()
    num_steps = config.num_updates * config.num_steps  # in each environment of an agent
    plan = {
        "script": Path(script.__file__).stem, "settings": results.plain(config), "num_seeds": options.num_seeds,
        "gpu": gpu["device_description_str"], "memory_limit": round(limit),
        "memory": {
            "whole": training.program_bytes(compiled), "arguments": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes, "output": memory.output_size_in_bytes,
        },
        "kernels": rows[0]["kernels_with_inner_loops"], "bytes": rows[0]["bytes_with_inner_loops"],
        "launch_seconds": launch * rows[0]["kernels_with_inner_loops"],
        "bandwidth_seconds": rows[0]["bytes_with_inner_loops"] / bandwidth,
        "seconds": rows[0]["seconds_with_inner_loops"],
        "steps": {
            name: {"loop": function_of(loop, script), "runs": loop.runs, "kernels": kernels / each}
            for name, (loop, kernels) in ((name, found) for name, found in steps.items() if found)
            for each in [num_steps // loop.runs if name == "environment" and num_steps % loop.runs == 0 else 1]
        },
        "loops": rows,
    }  # fmt: skip
    if options.most_seeds:
        plan["most_seeds"] = most_seeds(compile_size, options.num_seeds, plan["memory"]["whole"], limit)
    return plan, loops


def show(plan: dict, loops: Loop, script, kernels: bool) -> None:
    """Print a plan."""
    gib = {name: f"{size / training.GIB:.3g} GiB" for name, size in plan["memory"].items()}
    limit = f"{plan['memory_limit'] / training.GIB:.3g} GiB"
    fits = "fits in" if plan["memory"]["whole"] <= plan["memory_limit"] else "DOES NOT FIT in"
    print(f"{plan['script']} {plan['settings']['env_name']}, {plan['num_seeds']} seeds, {plan['gpu']}")
    print("A plan, not a measurement: no kernel has run.\n")
    parts = ", ".join(f"{name} {gib[name]}" for name in ("arguments", "temporary", "output"))
    print(f"memory     {gib['whole']} ({parts}), {fits} {limit}")
    if "most_seeds" in plan:
        print(f"           the most seeds seen to fit there: {plan['most_seeds']:,}")
    print(f"kernels    {plan['kernels']:,} in the whole training")
    for name, step in plan["steps"].items():
        print(f"           {step['kernels']:.4g} per {name} step, {step['loop']}, a body that runs {step['runs']:,} times")
    print(f"bytes      {plan['bytes'] / 1e12:.4g} TB")
    print(f"time       at least {plan['seconds']:.3g} s; all starts alone {plan['launch_seconds']:.3g} s, all bytes alone "
          f"{plan['bandwidth_seconds']:.3g} s\n")  # fmt: skip
    width = 2 + max(len(row["loop"]) + 2 * row["depth"] for row in plan["loops"])
    print(f"{'loop':{width}}{'trips':>9}{'runs':>12}{'kernels':>9}{'with inner':>12}{'MB':>10}{'time':>7}")
    for row, (_, loop) in zip(plan["loops"], loops.walk(), strict=True):
        share = row["seconds_with_inner_loops"] * row["runs"] / plan["seconds"]
        print(f"{'  ' * row['depth'] + row['loop']:{width}}{row['trips']:>9,}{row['runs']:>12,}{row['kernels']:>9,}"
              f"{row['kernels_with_inner_loops']:>12,}{row['bytes_with_inner_loops'] / 1e6:>10,.1f}{share:>7.1%}",
              *(f"  {note}" for note in set(row["notes"])))  # fmt: skip
        for each, size in loop.kernels if kernels else []:
            file, line, _ = place(each, script)
            operation = re.sub(r".*(while/body/closed_call|while/body|jit\(train\))/", "", each.op_name)
            print(f"{'  ' * row['depth']}    {size / 1e6:10.3f} MB  {each.name:45} {Path(file).name}:{line}  {operation}")


def main(args=None) -> dict:
    """The command line. Returns the plan."""
    words = sys.argv[1:] if args is None else [str(each) for each in args]
    if words[:1] in ([], ["-h"], ["--help"]):
        raise SystemExit(print(__doc__))
    name, _, words = training.split_words(words)
    script = results.load_script(name)
    config, options, hosts = training.parse_with(script, words, Options, description=__doc__)
    if hosts != training.Hosts(memory=hosts.memory):
        raise ValueError("coordinator, num_processes, process_id, distributed: a plan is of one GPU")
    plan, loops = make_plan(script, config, options, hosts.memory and hosts.memory * training.GIB)
    show(plan, loops, script, options.kernels)
    if options.json:
        results.write(options.json, json.dumps(plan, indent=2))
    return plan


if __name__ == "__main__":
    results.run_tool(main)
