"""Kill a run at random moments, resume it, and compare its end with a run left alone.

    python tests/stress/kill_and_resume.py sweep      # onejit sweep, in slices
    python tests/stress/kill_and_resume.py train      # onejit train, in slices

Exits with 1 if the two differ in any bit of their results, or if a file is left half written. Each
kill is a SIGKILL after a random time, up to the time that a start takes and some more seconds. It
is a stress test that takes many minutes and is random, and therefore stands here and not in tests/,
which kill a run at chosen moments.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--max-steps-in-episode=200", "--num-steps=200", "--random-starts=True"]
COMMANDS = {
    "sweep": [
        "-m",
        "onejit",
        "sweep",
        "q_learning_gridworld",
        "--lr",
        "0.1",
        "0.3",
        "0.5",
        "--num-seeds=4",
    ],
    "train": [
        "-m",
        "onejit",
        "train",
        "q_learning_gridworld",
        "--num-seeds=12",
        "--eval-episodes=2",
    ],
}


def start(command, run_dir: Path) -> subprocess.Popen:
    """Begin a run, or go on with it where it has begun."""
    words = (
        [*command[:3], "--resume", run_dir]
        if run_dir.exists()
        else [*command, f"--run-dir={run_dir}"]
    )
    with Path(f"{run_dir}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )


def run_whole(command, run_dir: Path) -> float:
    """Seconds that a run takes which is left alone."""
    begun, process = time.perf_counter(), start(command, run_dir)
    if process.wait():
        raise SystemExit(Path(f"{run_dir}.log").read_text())
    return time.perf_counter() - begun


def look(run_dir: Path) -> tuple[set, set]:
    """What is committed, checkpoints and finished slices, and what is being written."""
    paths = {path for path in run_dir.rglob("*") if run_dir in path.parents}
    writing = {
        path for path in paths if path.suffix == ".partial" or "orbax-checkpoint-tmp" in path.name
    }
    committed = {
        path
        for path in paths
        if path.parent.name == "slices" or (path.is_dir() and path.name.isdigit())
    }
    return committed - writing, writing


def kill_again_and_again(command, run_dir: Path, kills: int, longest: float) -> dict:
    """`{moment: kills}`. The run may end before it has been killed so often."""
    moments = dict.fromkeys(
        ("before it had committed anything", "while it wrote a file", "later"), 0
    )
    for _ in range(kills):
        committed, writing = look(run_dir)
        process = start(command, run_dir)
        try:
            if process.wait(timeout=random.uniform(0, longest)):
                raise SystemExit(Path(f"{run_dir}.log").read_text())
            return moments
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        committed_now, writing_now = look(run_dir)
        early = "later" if committed_now - committed else "before it had committed anything"
        moments["while it wrote a file" if writing_now - writing else early] += 1
    return moments


def differences(run_dir: Path, whole: Path) -> list[str]:
    """Names of what differs: files that are there, arrays, tables."""
    names = sorted(
        {path.name for path in run_dir.iterdir()} ^ {path.name for path in whole.iterdir()}
    )
    names += [
        str(path)
        for path in run_dir.rglob("*")
        if path.name.endswith(".partial") or "tmp" in path.name
    ]
    for file, load in (("metrics.npz", np.load), ("agent.safetensors", load_file)):
        if (whole / file).exists():
            arrays, others = load(run_dir / file), load(whole / file)
            names += [name for name in others if arrays[name].tobytes() != others[name].tobytes()]
    files = ("results.csv", "table.txt", "best.yaml", "config.yaml", "evaluation.npy")
    files = [name for name in files if (whole / name).exists()]
    return names + [
        name for name in files if (run_dir / name).read_bytes() != (whole / name).read_bytes()
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument(
        "--timesteps", type=float, default=3e7, help="of each agent: enough for so many kills"
    )
    parser.add_argument(
        "--memory", type=float, default=0.027, help="GiB: on one device three slices"
    )
    parser.add_argument(
        "--longest",
        type=float,
        default=12.0,
        help="seconds after which a run is killed at the latest",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    random.seed(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    command = [
        *COMMANDS[args.what],
        *SMALL,
        f"--total-timesteps={args.timesteps:.0f}",
        "--checkpoint-interval=0.5",
    ]
    command += [f"--memory={args.memory}"]
    print(f"left alone: {run_whole(command, folder / 'whole'):.1f} s")
    moments = kill_again_and_again(command, folder / "killed", args.kills, args.longest)
    counts = ", ".join(f"{count} {name}" for name, count in moments.items())
    print(f"{sum(moments.values())} kills: {counts}")
    print(f"resumed to the end: {run_whole(command, folder / 'killed'):.1f} s")
    names = differences(folder / "killed", folder / "whole")
    if names:
        raise SystemExit(f"differ: {', '.join(names)}; see {folder}")
    print("the same bit for bit, no file left half written")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
