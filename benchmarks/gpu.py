"""Measure on one GPU what was measured on CPUs or only planned.

    git clone https://github.com/luchris429/purejaxrl
    pip install --target deps --no-deps flashbax
    PYTHONPATH=deps python benchmarks/gpu.py --purejaxrl purejaxrl
    python benchmarks/gpu.py --small     # a trial of each part on a CPU

The parts run in this order, and none starts after nine minutes (`--seconds`):

- resume: whether a training that was stopped and resumed equals an uninterrupted one, bit for bit;
- returns: final returns of a row of docs/results.md on this device and on a CPU;
- speed: steps per second of ppo, dqn, ppo_rnn and ppo_continuous (hopper) with 1 to 2048 seeds, and
  of PureJaxRL's code; for our programs also the number of kernels, and the planned and the
  measured time;
- unrolled: the speed-up from unrolling the loop of environment steps by 8;
- precision: the time of hopper with its physics in full precision, as in the script, and in TF32.

Speeds are of one training after another one that is not counted. Compilation is not counted
either. A part or row for which no time is left is left out, and the table says so. Writes gpu.json
and gpu.md into the directory --out after each part. Without --purejaxrl there is no peer.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")  # as many as a GPU has
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes of onejit need memory too

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers
import returns_page as page
from returns import load
from speed import ROWS, compile_for

from onejit import files, memory, plan, run_directory, statistics
from onejit.plan import program

SPEED = {  # row of benchmarks/speed.py: seeds, and environment steps of an agent
    "ppo": {1: 51_200, 64: 51_200, 256: 25_600, 2048: 10_240},
    "dqn": {1: 60_000, 64: 60_000, 256: 60_000, 2048: 30_000},  # 10,000 are warm-up
    "ppo_rnn": {1: 20_480, 64: 20_480, 256: 10_240, 2048: 5_120},
    "ppo_continuous": {1: 204_800, 64: 81_920, 256: 40_960},
}
SMALL = {"ppo": {1: 1024, 2: 1024}, "dqn": {1: 10_200}}
PLANNED_GPUS = {"H100": "h100", "A100": "a100", "4090": "rtx4090"}

# --- parts: each returns what goes into gpu.json ---


def resume(options) -> dict:
    """Whether a training stopped by SIGINT and resumed has the agents of an uninterrupted one."""
    flags = ["--num-seeds", "2", "--total-timesteps", "20000" if options.small else "2e6"]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        stopped = Path(folder) / "stopped"
        run_onejit("train", "ppo", *flags, "--run-dir", whole)
        words = ["train", "ppo", *flags, "--run-dir", stopped, "--checkpoint-interval", "1"]
        process = start_onejit(*words)
        while process.poll() is None and not (stopped / "checkpoints").exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.wait()
        was_stopped = not (stopped / "metrics.npz").exists()
        if was_stopped:
            run_onejit("train", "--resume", stopped)
        _, _, agents = run_directory.load_run(whole)
        _, _, resumed = run_directory.load_run(stopped)
    equal = jax.tree.map(np.array_equal, agents, resumed)
    return {"was stopped": was_stopped, "equal": all(jax.tree.leaves(equal))}


def returns(options) -> dict:
    """Final returns of a row's agents here, and of the same row on a CPU."""
    name = "ppo/catch" if options.small else "ppo/cartpole"
    _, flags = load(name)
    seeds = 2 if options.small else page.ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["train", "ppo", *flags, "--num-seeds", seeds, "--seed", page.FIRST_SEED]
        run_onejit(*words, "--run-dir", run_dir)
        here = statistics.final_return(run_directory.load_metrics(run_dir))
    rows = [row for row in page.read_rows() if row["row"] == name]
    of_cpu = [row["final_return"] for row in rows]
    return {"row": name, "here": here.tolist(), "on a CPU": of_cpu[0] if of_cpu else None}


def speed(options) -> list[dict]:
    """Steps per second with the script and its peer, and the plan of our program."""
    rows = []
    for name, of_seeds in (SMALL if options.small else SPEED).items():
        for seeds, steps in of_seeds.items():
            if options.is_late():
                rows.append({"row": name, "seeds": seeds, "left out": "no time left"})
                continue
            rows.append(speed_of(name, seeds, steps, options))
            print(rows[-1], flush=True)
    return rows


def speed_of(name: str, seeds: int, steps: int, options) -> dict:
    steps = max(2, steps // ROWS[name].divisor) * ROWS[name].divisor
    ours, theirs = ROWS[name].make(options, steps)
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    row = {"row": name, "seeds": seeds, "steps": steps}
    for contestant, train in (("script", ours), ("peer", theirs)):
        if train is None:
            continue
        try:
            compiled, compilation = compile_for(train, keys)
            seconds = time_of(compiled, keys)
        except Exception as error:  # such as too little memory
            row[f"{contestant} failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        row[f"{contestant} seconds"] = seconds
        row[f"{contestant} compilation"] = compilation
        if contestant == "script":
            row["plan"] = plan_of(compiled, options)
    return row


def unrolled(options) -> dict:
    """PPO with its loop of environment steps unrolled by 8, and as it is."""
    seeds = 2 if options.small else 256
    steps = 1024 if options.small else 25_600
    ours = peers.ppo(options, steps)[0]
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    as_it_is, _ = compile_for(ours, keys)
    with mock.patch.object(jax.lax, "scan", scan_by_8(jax.lax.scan, ours.config.num_steps)):
        by_8, compilation = compile_for(peers.ppo(options, steps)[0], keys)
    return {
        "seeds": seeds,
        "as it is": time_of(as_it_is, keys),
        "by 8": time_of(by_8, keys),
        "compilation": compilation,
        "kernels": {
            "as it is": plan_of(as_it_is, options)["kernels"],
            "by 8": plan_of(by_8, options)["kernels"],
        },
    }


def scan_by_8(scan, length: int):
    """`jax.lax.scan`, unrolled by 8 where a loop has this length."""

    def scan_with_unrolling(step, carry, xs=None, **options):
        leaves = jax.tree.leaves(xs)
        if leaves and len(leaves[0]) == length and "unroll" not in options:
            options["unroll"] = 8
        return scan(step, carry, xs, **options)

    return scan_with_unrolling


def precision(options) -> dict:
    """hopper, whose physics the script computes in full precision, and in TF32."""
    seeds = 1 if options.small else 64
    steps = 20_480 if options.small else 81_920
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    full, _ = compile_for(peers.ppo_continuous(options, steps)[0], keys)
    with mock.patch.object(jax, "default_matmul_precision", contextlib.nullcontext):
        rounded, _ = compile_for(peers.ppo_continuous(options, steps)[0], keys)
    return {"seeds": seeds, "full": time_of(full, keys), "TF32": time_of(rounded, keys)}


PARTS = {
    "resume": resume,
    "returns": returns,
    "speed": speed,
    "unrolled": unrolled,
    "precision": precision,
}

# --- helpers ---


def start_onejit(*words):
    command = [sys.executable, "-m", "onejit", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def run_onejit(*words) -> None:
    """Raises CalledProcessError."""
    process = start_onejit(*words)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def time_of(compiled, keys) -> float:
    """Seconds of one training, after one that is not counted."""
    jax.block_until_ready(compiled(keys))
    begun = time.perf_counter()
    jax.block_until_ready(compiled(keys))
    return time.perf_counter() - begun


def plan_of(compiled, options) -> dict:
    """Kernels of a compiled program, and their planned seconds, as in onejit plan."""
    loops = program.find_loops(program.read_program(compiled.as_text()))
    result = {"kernels": loops.total(), "memory": memory.program_bytes(compiled)}
    if options.gpu:
        bandwidth = plan.read_gpu(options.gpu).bandwidth
        launch = plan.Options.launch_us / 1e6
        result["seconds"] = loops.total(lambda kernel, size: max(launch, size / bandwidth))
        result["starts of kernels"] = result["kernels"] * launch
    return result


def planned_gpu(device_kind: str) -> str:
    """The file of onejit/gpus for this GPU, or "" if there is none."""
    for part, name in PLANNED_GPUS.items():
        if part in device_kind:
            return name
    return ""


# --- the table ---


def show_speed(row: dict) -> list[str]:
    cells = [row["row"], str(row["seeds"])]
    if "left out" in row:
        return [*cells, row["left out"], "", "", "", "", ""]
    steps = row["seeds"] * row["steps"]
    for contestant in ("script", "peer"):
        failed = row.get(f"{contestant} failed", "")
        seconds = row.get(f"{contestant} seconds")
        cells.append(f"{steps / seconds:,.0f}" if seconds else failed)
    both = "script seconds" in row and "peer seconds" in row
    cells.append(f"{row['peer seconds'] / row['script seconds']:.2f}" if both else "")
    planned = row.get("plan", {})
    cells.append(f"{planned['kernels']:,}" if planned else "")
    cells.append(f"{planned['seconds']:.2f}" if "seconds" in planned else "")
    cells.append(f"{row['script seconds']:.2f}" if "script seconds" in row else "")
    return cells


def table(result: dict) -> str:
    """gpu.md: one table of speeds, and a line for each other part."""
    lines = [f"{result['device']}, jax {result['jax']}, {result['seconds']:.0f} s in all", ""]
    speeds = result.get("speed")
    if isinstance(speeds, list):
        head = ["row", "seeds", "script, steps/s", "peer, steps/s", "ratio"]
        head += ["kernels", "planned, s", "script, s"]
        lines.append(page.markdown(head, [show_speed(row) for row in speeds]))
    for name in PARTS:
        if name in result and not isinstance(result[name], list):
            lines += ["", f"{name}: {show_part(name, result[name])}"]
    return "\n".join(lines) + "\n"


def show_part(name: str, part: dict) -> str:
    if "failed" in part or "left out" in part:
        return ", ".join(part.values())
    if name == "returns":
        here = statistics.show(*statistics.mean_interval(part["here"]))
        of_cpu = "not measured"
        if part["on a CPU"]:
            of_cpu = statistics.show(*statistics.mean_interval(part["on a CPU"]))
        return f"{part['row']} {here} here, {of_cpu} on a CPU"
    if name == "unrolled":
        return f"by 8 {part['as it is'] / part['by 8']:.2f} times as fast, {part['kernels']}"
    if name == "precision":
        return f"TF32 {part['full'] / part['TF32']:.2f} times as fast, {part['seeds']} seeds"
    return str(part)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; by default all")
    peers.add_flags(parser)
    parser.add_argument("--small", action="store_true", help="a trial, small enough for a CPU")
    parser.add_argument("--seconds", type=float, default=540, help="start nothing after this time")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    peers.check_flags(parser, options)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; known are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    options.is_late = lambda: time.perf_counter() - begun > options.seconds
    device = jax.devices()[0]
    options.gpu = planned_gpu(device.device_kind)
    result = {"device": device.device_kind, "jax": jax.__version__}
    for name in options.parts or PARTS:
        if options.is_late():
            result[name] = {"left out": "no time left"}
        else:
            try:
                result[name] = PARTS[name](options)
            except Exception as error:  # the other parts are worth having
                result[name] = {"failed": f"{type(error).__name__}: {error}"}
        result["seconds"] = time.perf_counter() - begun
        files.write(options.out / "gpu.json", json.dumps(result, indent=1) + "\n")
        files.write(options.out / "gpu.md", table(result))
        print(f"{name}: {result[name]}", flush=True)


if __name__ == "__main__":
    main()
