"""Kill a run at random moments, resume it, and compare its end with a run left alone.

    python tests/stress/kill_and_resume.py sweep      # onejit sweep, in slices
    python tests/stress/kill_and_resume.py halving    # onejit sweep --halving, three rungs
    python tests/stress/kill_and_resume.py train      # onejit train, in slices
    python tests/stress/kill_and_resume.py module     # onejit train, an environment of one's own

Exits with 1 if the two differ in any bit of their results, if a file is left half written, or if no
kill came after a checkpoint. Each kill is a SIGKILL or a SIGHUP. One in four comes at a random time
of the start, which `--longest` must cover on the machine, and the others up to a second after the
process has written its first checkpoint. After every other kill the newest checkpoint is damaged if
there is an older one: its largest file is cut off, or 64 of its bytes are changed. In `module`, the
module of the environment is changed after each kill. It is a stress test that takes many minutes
and is random, and therefore stands here and not in tests/, which kill a run at chosen moments.
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
    "sweep": "sweep q_learning_gridworld --lr 0.1 0.3 0.5 --num-seeds=4",
    "halving": "sweep q_learning_gridworld --lr 0.1 0.2 0.3 0.5 --num-seeds=4 --halving=2",
    "train": "train q_learning_gridworld --num-seeds=12 --eval-episodes=2",
    "module": "train ppo --env-name=mine:Mine --num-envs=4 --num-minibatches=2 --hidden-sizes 8 "
    "--num-seeds=4 --eval-episodes=2",
}
FILES = {
    "mine.py": """
import gymnax
from gymnax.environments.classic_control import cartpole
from rules import SCALE


class Mine(cartpole.CartPole):
    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, SCALE * reward, terminated, info


gymnax.register("Mine", Mine)
""",
    "rules.py": "SCALE = 2.0\n",
}


def start(command, run_dir: Path) -> subprocess.Popen:
    """Begin a run, or go on with it where it has begun."""
    words = [*command, f"--run-dir={run_dir}"]
    if (run_dir / "run.json").exists():
        words = ["resume", run_dir]
    with Path(f"{run_dir}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "onejit", *words],
            cwd=run_dir.parent,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def run_whole(command, run_dir: Path) -> float:
    """Seconds that a run takes which is left alone."""
    begun, process = time.perf_counter(), start(command, run_dir)
    if process.wait():
        raise SystemExit(Path(f"{run_dir}.log").read_text())
    return time.perf_counter() - begun


def look(run_dir: Path) -> tuple[set, set]:
    """What is committed, checkpoints and finished slices, and what is being written."""
    paths = set()
    for folder, folders, files in os.walk(run_dir):  # rglob fails if a folder vanishes
        paths |= {Path(folder, name) for name in folders + files}
    writing = {path for path in paths if path.suffix == ".partial"}
    committed = {
        path
        for path in paths
        if path.parent.name == "slices" or (path.is_dir() and path.name.isdigit())
    }
    return committed - writing, writing


def damage_newest_checkpoint(run_dir: Path) -> str:
    """Damage the newest checkpoint of a slice that has two of them. Returns what was done."""
    of_slices = {}
    for path in run_dir.rglob("*"):
        if path.is_dir() and path.name.isdigit() and any(path.glob("*.npz")):
            of_slices.setdefault(path.parent, []).append(path)
    for checkpoints in of_slices.values():
        if len(checkpoints) < 2:
            continue
        newest = max(checkpoints, key=lambda path: int(path.name))
        files = [path for path in newest.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        if random.random() < 0.5:
            largest.write_bytes(data[: len(data) // 2])
            return "a checkpoint was cut off"
        for place in random.sample(range(len(data)), min(64, len(data))):
            data[place] ^= 0xFF
        largest.write_bytes(data)
        return "64 bytes of a checkpoint were changed"
    return ""


def wait_for_a_commit(process, run_dir: Path, committed: set) -> None:
    """Until the process has written a checkpoint, or a slice, or has ended."""
    while process.poll() is None and not look(run_dir)[0] - committed:
        time.sleep(0.05)


def kill_again_and_again(command, run_dir: Path, kills: int, longest: float) -> dict:
    """`{fault: how often}`. The run may end before it has been killed so often."""
    moments = dict.fromkeys(
        (
            "killed before it had committed anything",
            "killed while it wrote a file",
            "killed after a commit",
            "stopped by SIGHUP",
            "a checkpoint was cut off",
            "64 bytes of a checkpoint were changed",
        ),
        0,
    )
    for kill in range(kills):
        committed, writing = look(run_dir)
        process = start(command, run_dir)
        seconds = random.uniform(0, longest)
        if random.random() < 0.75:
            wait_for_a_commit(process, run_dir, committed)
            seconds = random.uniform(0, 1)
        try:
            if process.wait(timeout=seconds):
                raise SystemExit(Path(f"{run_dir}.log").read_text())
            return moments
        except subprocess.TimeoutExpired:
            number = random.choice([signal.SIGKILL, signal.SIGHUP])
            os.killpg(process.pid, number)
            code = process.wait()
        committed_now, writing_now = look(run_dir)
        if code == 128 + signal.SIGHUP:
            moments["stopped by SIGHUP"] += 1
        elif writing_now - writing:
            moments["killed while it wrote a file"] += 1
        elif committed_now - committed:
            moments["killed after a commit"] += 1
        else:
            moments["killed before it had committed anything"] += 1
        fault = damage_newest_checkpoint(run_dir) if kill % 2 else ""
        if fault:
            moments[fault] += 1
        if (run_dir / "run.json").is_file():  # it has its own copy
            (run_dir.parent / "rules.py").write_text(f"SCALE = {kill + 3}.0\n")
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
    files = ("results.csv", "table.txt", "best.yaml", "config.yaml")
    files += ("evaluation.npy",)
    files = [name for name in files if (whole / name).exists()]
    return names + [
        name for name in files if (run_dir / name).read_bytes() != (whole / name).read_bytes()
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--timesteps", type=float, default=2e6, help="of each agent: enough for so many kills"
    )
    parser.add_argument(
        "--memory", type=float, default=0.0018, help="GiB: on one device three slices"
    )
    parser.add_argument(
        "--longest",
        type=float,
        default=30.0,
        help="seconds that a start takes at most",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    random.seed(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    command = [
        *COMMANDS[args.what].split(),
        f"--total-timesteps={args.timesteps:.0f}",
        "--checkpoint-interval=0.5",
    ]
    if args.what != "module":
        command += [*SMALL, f"--memory={args.memory}"]
    print(f"left alone: {run_whole(command, folder / 'whole'):.1f} s", flush=True)
    moments = kill_again_and_again(command, folder / "killed", args.kills, args.longest)
    counts = ", ".join(f"{count} {name}" for name, count in moments.items())
    print(f"faults: {counts}", flush=True)
    if not moments["killed after a commit"]:
        raise SystemExit("no kill came after a checkpoint: --timesteps must be larger")
    print(f"resumed to the end: {run_whole(command, folder / 'killed'):.1f} s")
    names = differences(folder / "killed", folder / "whole")
    if names:
        raise SystemExit(f"differ: {', '.join(names)}; see {folder}")
    print("the same bit for bit, no file left half written")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
