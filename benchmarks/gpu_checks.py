"""The lane checks of gpu.py. A check takes the rest of its key and the options of the command."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import peers
import returns_page as page
from gpu import ROOT, SPEED, plan_of
from returns import load
from speed import ROWS, compile_for

from onejit.base import statistics
from onejit.run.directory import load_results, load_run

NO_PEERS = SimpleNamespace(purejaxrl=None, purejaxql=None)


def resume(_, options) -> dict:
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
            run_onejit("resume", stopped)
        _, _, agents = load_run(whole)
        _, _, resumed = load_run(stopped)
    return {"was stopped": was_stopped, "equal": all_equal(agents, resumed)}


def copies(_, options) -> dict:
    """A training in Gymnasium, whose copies NVIDIA's driver makes, and one that JAX copies for."""
    from onejit.envs.host import cuda

    settings = {"env_name": "onejit.envs.gymnasium:CartPole-v1", "num_envs": 8}
    steps = 4096 if options.small else 40_960
    result = {"by the driver": cuda.driver() is not None}
    outputs = []
    for name, driver in (("driver", cuda.driver), ("JAX", lambda: None)):
        with mock.patch.object(cuda, "driver", driver):
            train = jax.jit(peers.Training("ppo", steps, **settings))
            begun = time.perf_counter()
            outputs.append(jax.block_until_ready(train(jax.random.key(0))["metrics"]))
            result[f"seconds, {name}"] = time.perf_counter() - begun
    return result | {"equal": all_equal(*outputs)}


def returns(name: str, options) -> dict:
    """Final returns of a row's agents here, and of the same row in benchmarks/RESULTS.md."""
    script, flags = load(name)
    seeds = 2 if options.small else page.ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["train", Path(script.__file__).stem, *flags]
        words += ["--num-seeds", seeds, "--seed", page.FIRST_SEED, "--run-dir", run_dir]
        run_onejit(*words)
        here = load_results(run_dir).training_return()
    result = {"here": show_mean(here)}
    for row in page.read_rows():
        if row["row"] == name:
            result[row["device"].partition(",")[0]] = show_mean(page.values_of(row, "final_return"))
    return result


def show_mean(returns) -> str:
    return statistics.show(*statistics.student_interval(returns))


def unrolled(variant: str, options) -> dict:
    """A training whose loops run as they are, or several steps at a time.

    One loop is over environment steps, the other over gradient steps.
    """
    row, _, which = variant.partition("/")
    agents = 2 if options.small else {"ppo": 64, "ppo_minatar": 32}[row]
    steps = 2 * ROWS[row].divisor if options.small else SPEED[row][agents]
    config = ROWS[row].make(NO_PEERS, steps)[0].config
    lengths = {
        "rolled": (),
        "steps": (config.num_steps,),
        "both": (config.num_steps, config.num_minibatches),
    }
    scan = unrolling_scan(jax.lax.scan, lengths[which])
    with mock.patch.object(jax.lax, "scan", scan):
        return time_of(ROWS[row].make(NO_PEERS, steps)[0], agents)


def unrolling_scan(scan, lengths: tuple[int, ...]):
    """`jax.lax.scan`, where loops of these lengths take up to 8 steps at a time."""

    def scan_with_unrolling(step, carry, xs=None, length=None, **options):
        leaves = jax.tree.leaves(xs)
        trips = length if length is not None else len(leaves[0])
        if trips in lengths:
            options.setdefault("unroll", min(8, trips))
        return scan(step, carry, xs, length, **options)

    return scan_with_unrolling


def precision(variant: str, options) -> dict:
    """hopper, whose physics the script computes in full precision, and in TF32."""
    agents = 1 if options.small else 64
    steps = 20_480 if options.small else 81_920
    rounded = mock.patch.object(jax, "default_matmul_precision", contextlib.nullcontext)
    with rounded if variant == "TF32" else contextlib.nullcontext():
        return time_of(peers.ppo_continuous(NO_PEERS, steps)[0], agents)


# --- helpers ---


def time_of(train, agents: int) -> dict:
    """Seconds of the second training, and the program's compilation and kernels."""
    keys = jax.random.split(jax.random.PRNGKey(0), agents)
    compiled, compilation = compile_for(train, keys)
    for _ in range(2):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(keys))
        seconds = time.perf_counter() - begun
    return {"agents": agents, "seconds": seconds, "compilation": compilation} | plan_of(compiled)


def all_equal(tree, other) -> bool:
    """Whether two trees hold the same numbers; NaN equals NaN."""
    equal = jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=True), tree, other)
    return all(jax.tree.leaves(equal))


def start_onejit(*words):
    command = [sys.executable, "-m", "onejit", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def run_onejit(*words) -> None:
    """Raises CalledProcessError."""
    process = start_onejit(*words)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
