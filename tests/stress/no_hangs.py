"""Train many agents at once, again and again, and count the runs that hang.

    python tests/stress/no_hangs.py                 # as `main` does: no run may hang
    python tests/stress/no_hangs.py --cores 1       # the same on one core
    python tests/stress/no_hangs.py --nproc 1       # with one thread in XLA's pool
    python tests/stress/no_hangs.py --lapack        # only Flax's initialization, which does hang

Each run is a process of its own that trains ppo_continuous.py on Pendulum-v1. See dev/hangs.md. It
is a stress test: a hang is rare, and to see none takes many minutes and an idle machine. Therefore
it stands here and not in tests/.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "ppo_continuous.py"
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24)
LAPACK = """
import sys
import jax
from jax.nn.initializers import orthogonal

def init(key):
    shapes = 2 * [(3, 64), (64, 64), (64, 1)]  # of actor and critic
    return [orthogonal()(key, shape) for key, shape in zip(jax.random.split(key, 6), shapes)]

program = jax.jit(jax.vmap(init))
for seed in range(1000):
    jax.block_until_ready(program(jax.random.split(jax.random.key(seed), int(sys.argv[1]))))
"""


def train(seeds: int, args, folder: str) -> float | None:
    """Seconds that the run took, None where it hung."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(Path(folder, "cache"))}
    environment.pop("NPROC", None)
    if args.nproc:
        environment["NPROC"] = str(args.nproc)
    run_dir = Path(folder, "run")
    command = [sys.executable, SCRIPT, "--env-name", "Pendulum-v1", "--num-envs", 8]
    command += ["--num-minibatches", 4, "--total-timesteps", args.timesteps]
    command += ["--num-seeds", seeds, "--run-dir", run_dir]
    if args.lapack:
        command = [sys.executable, "-c", LAPACK, seeds]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*map(str, command)],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=(lambda: os.sched_setaffinity(0, range(args.cores))) if args.cores else None,
    )
    try:
        if process.wait(args.limit):
            raise SystemExit(f"a run failed: {' '.join(map(str, command))}")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    return time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--cores", type=int, default=0, help="use only so many cores (Linux)")
    parser.add_argument(
        "--nproc", type=int, default=0, help="set NPROC, the size of XLA's thread pool, to this"
    )
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds after which a run counts as hung"
    )
    parser.add_argument("--timesteps", type=int, default=100_000, help="of each agent")
    parser.add_argument(
        "--lapack", action="store_true", help="Flax's orthogonal initialization, 1000 times"
    )
    args = parser.parse_args()
    hung = 0
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.runs):
            seeds = WIDTHS[i % len(WIDTHS)]
            seconds = train(seeds, args, folder)
            hung += seconds is None
            took = "HUNG" if seconds is None else f"{seconds:.1f} s"
            print(f"run {i + 1} of {args.runs}: {seeds} seeds, {took}", flush=True)
    cores, pool = args.cores or os.cpu_count(), args.nproc or "as it is"
    print(
        f"{hung} of {args.runs} runs hung ({cores} cores, NPROC {pool}, limit {args.limit:.0f} s)"
    )
    sys.exit(hung > 0)


if __name__ == "__main__":
    main()
