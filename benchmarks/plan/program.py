"""A compiled program as XLA prints it: its kernels, the bytes that they move, and its loops."""

import math
import re
from typing import NamedTuple

# instructions that run no kernel
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("add-dependency", "opt-barrier"),
}
SLICES = ("slice", "dynamic-slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # the operand that is written
CALLED = r"(?:body|calls|to_apply|\w+_computation|branch_computations)=\{?((?:(?:, )?%[\w.\-]+)+)"
HEADER = r"(ENTRY )?%([\w.\-]+) .*\{$"
INSTRUCTION = r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)"


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
        digits = re.search(r"\d+", kind)
        bits = int(digits[0]) if digits else 0
        if kind == "pred":
            bits = 8
        elements = math.prod(int(dim) for dim in dims.split(",") if dim)
        size += elements * bits // 8
    return size


def read_tables(text: str) -> dict:
    """`{title: {number: numbers or text}}` of the tables above the program."""
    tables = {}
    for title, lines in re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", text, re.MULTILINE):
        table = {}
        for number, row in re.findall(r"^(\d+) (.*)$", lines, re.MULTILINE):
            numbers = [int(n) for n in re.findall(r"=(\d+)", row)]
            table[int(number)] = numbers or row.strip('"')
        tables[title] = table
    return tables


def read_frames(text: str) -> dict:
    """`{number: [(file, line, function), ...]}` of the stack frames, where parents come first."""
    tables = read_tables(text)
    frames = {0: []}
    for number, (location, parent) in tables.get("StackFrames", {}).items():
        file, function, line, *_ = tables["FileLocations"][location]
        frame = (tables["FileNames"][file], line, tables["FunctionNames"][function])
        frames[number] = [frame, *frames[parent - 1]]
    return frames


def read_instruction(match, frames: dict) -> Instruction:
    name, shape, opcode, operands, rest = match.groups()
    if opcode == "custom-call":
        shape = re.sub(r"s8\[\d+\]", "", shape)  # a library's workspace

    def find(pattern):
        return " ".join(re.findall(pattern, rest))

    return Instruction(
        name=name,
        opcode=opcode,
        bytes=shape_bytes(shape),
        operands=re.findall(r"%([\w.\-]+)", operands),
        called=re.findall(r"%([\w.\-]+)", find(CALLED)),
        trips=int(find(r'"known_trip_count":{"n":"(\d+)"') or 0),
        op_name=find(r'op_name="(.*?)"'),
        frames=frames.get(int(find(r"stack_frame_id=(\d+)") or 0), []),
    )


def read_program(text: str) -> dict:
    """`{computation: {name: Instruction}}` in order.

    "ENTRY" runs first. The last instruction of a computation is its result.
    """
    text = re.sub(r"/\*.*?\*/", "", text)
    frames = read_frames(text)
    program = {}
    body = {}
    for line in text.splitlines():
        header = re.match(HEADER, line)
        instruction = re.match(INSTRUCTION, line)
        if header:
            body = {}
            program["ENTRY" if header[1] else header[2]] = body
        elif instruction:
            body[instruction[1]] = read_instruction(instruction, frames)
    return program


# --- bytes ---


def body_of(program: dict, around: dict, kernel: Instruction) -> dict:
    """The instructions of a kernel; a kernel of one instruction is treated as a fusion of it."""
    if kernel.opcode == "fusion":
        return program[kernel.called[0]]
    body = {}
    for name in kernel.operands:
        body[name] = around[name]._replace(opcode="parameter", operands=[])
    body[kernel.name] = kernel
    return body


def outputs_of(body: dict) -> list[Instruction]:
    """The results of a kernel, and the tuples and casts between them and the last instruction."""
    outputs = [next(reversed(body.values()))]
    for instruction in outputs:  # the list grows in the loop
        if instruction.opcode in ("tuple", "bitcast"):
            outputs += [body[name] for name in instruction.operands]
    return outputs


def bytes_moved(program: dict, around: dict, kernel: Instruction) -> int:
    """Bytes that a kernel of the computation `around` reads and writes."""
    body = body_of(program, around, kernel)
    outputs = outputs_of(body)
    output_names = [instruction.name for instruction in outputs]

    written = 0
    for instruction in outputs:
        if instruction.opcode in ("tuple", "bitcast"):
            continue
        if instruction.opcode in UPDATES:
            update = instruction.operands[UPDATES[instruction.opcode]]
            written += body[update].bytes
        else:
            written += instruction.bytes

    needed = dict.fromkeys(body, 0.0)  # the part of each value that is needed
    needed |= dict.fromkeys(output_names, 1.0)
    for instruction in reversed(body.values()):
        for name in instruction.operands:
            part = needed[instruction.name]
            is_first = name == instruction.operands[0]
            if is_first and instruction.opcode in SLICES:
                part *= min(1.0, instruction.bytes / max(1, body[name].bytes))
            if is_first and instruction.opcode in UPDATES and instruction.name in output_names:
                part = 0.0  # the rest of the buffer stays in place
            needed[name] = min(1.0, needed[name] + part)

    read = 0.0
    for instruction in body.values():
        if instruction.opcode == "parameter":
            read += needed[instruction.name] * instruction.bytes
    return round(written + read)


# --- loops ---


def one(kernel, size) -> int:
    return 1


class Loop(NamedTuple):
    """A loop, or the program as a loop of one trip."""

    at: Instruction | None
    trips: int
    runs: int  # runs of its body in the whole training
    depth: int
    kernels: list  # (instruction, bytes) of each kernel in the body, without inner loops
    inner: list
    notes: set

    def total(self, value=one):
        """The sum of `value(kernel, bytes)` over the kernels of one run of the body.

        Inner loops are included.
        """
        own = sum(value(kernel, size) for kernel, size in self.kernels)
        return own + sum(loop.trips * loop.total(value) for loop in self.inner)

    def all(self) -> list:
        """This loop, and all loops inside."""
        loops = [self]
        for loop in self.inner:
            loops += loop.all()
        return loops


def find_loops(program: dict, name: str = "ENTRY", loop: Loop | None = None) -> Loop:
    """The loops of a computation as a tree. Kernels outside of these loops go to `loop`."""
    loop = loop or Loop(None, trips=1, runs=1, depth=0, kernels=[], inner=[], notes=set())
    for instruction in program[name].values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = instruction.trips or 1
            inner = Loop(
                instruction,
                trips=trips,
                runs=trips * loop.runs,
                depth=loop.depth + 1,
                kernels=[],
                inner=[],
                notes=set() if instruction.trips else {"trip count not known"},
            )
            loop.inner.append(find_loops(program, instruction.called[0], inner))
        elif opcode in ("call", "conditional", "async-start"):
            if opcode == "conditional":
                loop.notes.add("conditional")
            longest = max(
                instruction.called, key=lambda branch: find_loops(program, branch).total()
            )
            find_loops(program, longest, loop)
        elif opcode not in FREE and not opcode.endswith(("-done", "-update")):
            loop.kernels.append((instruction, bytes_moved(program, program[name], instruction)))
    return loop


# --- steps ---


def is_of_environment(instruction: Instruction) -> bool:
    """Whether it stems from the method `step` of an environment."""
    return any(re.fullmatch(r"\w+\.step", function) for _, _, function in instruction.frames)


def is_of_gradient(instruction: Instruction) -> bool:
    """Whether it stems from a derivative."""
    return "jvp(" in instruction.op_name


def step_loop(loops: list[Loop], is_part) -> tuple[Loop, int] | None:
    """The loop around a step that runs most often, and the number of kernels in the step.

    Inner loops of the step, such as in a physics engine, belong to it. Other inner loops, such as
    learning, do not.
    """
    most = None
    for loop in loops[1:]:
        if is_part(loop.at):
            continue
        parts = [inner for inner in loop.inner if is_part(inner.at)]
        if not parts and not any(is_part(kernel) for kernel, _ in loop.kernels):
            continue
        kernels = len(loop.kernels) + sum(inner.trips * inner.total() for inner in parts)
        if most is None or loop.runs > most[0].runs:
            most = (loop, kernels)
    return most
