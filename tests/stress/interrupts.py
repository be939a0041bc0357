"""Interrupt trainings of scripts at random moments, and look for what they leave.

    python tests/stress/interrupts.py                       # all environments, both signals
    python tests/stress/interrupts.py gymnasium --moments 3

Environments are one of gymnax, one of Gymnasium and, if it is installed, one of EnvPool, which run
on the host. Each training gets one Ctrl-C or SIGTERM at a random moment after its first update.
Exits with 1 if a training does not end with exit code 0, if a file is missing or cannot be read, or
if an agent is not finite. It starts dozens of processes, and therefore stands here; tests/ have one
moment of each kind.
"""

import argparse
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.terminal import Terminal

SMALL = ["--num-envs=4", "--num-steps=8", "--num-minibatches=2", "--hidden-sizes", "8"]
ENVIRONMENTS = {
    "gymnax": "CartPole-v1",
    "gymnasium": "onejit.envs.gymnasium:CartPole-v1",
    "envpool": "onejit.envs.envpool:CartPole-v1",
}
FILES = {"config.yaml", "metrics.npz", "learning_curve.png", "agent.safetensors"}
TIME_LIMIT = 180  # seconds


def interrupt(env_name: str, number, moment: float, folder: Path) -> list[str]:
    """Train, interrupt the training `moment` seconds after its first update, and list mistakes."""
    words = ["--env-name", env_name, *SMALL, "--total-timesteps=1e9", "--num-seeds=2"]
    terminal = Terminal()
    process = subprocess.Popen(
        [sys.executable, ROOT / "ppo.py", *words, "--run-dir=run"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=terminal.stderr,
        text=True,
    )
    os.close(terminal.stderr)
    deadline = time.monotonic() + TIME_LIMIT
    while "step/s" not in terminal.said and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(number)
    try:
        said, _ = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return ["it did not end"]
    mistakes = []
    if process.returncode or "results in run" not in said:
        mistakes.append(f"exit code {process.returncode}: {terminal.said[-500:]}")
    missing = FILES - {path.name for path in (folder / "run").iterdir()}
    if missing:
        return [*mistakes, f"missing: {', '.join(sorted(missing))}"]
    updates = np.load(folder / "run" / "metrics.npz")["episodes"].shape[1]
    agents = load_file(folder / "run" / "agent.safetensors")
    if not updates or not all(np.isfinite(leaf).all() for leaf in agents.values()):
        mistakes.append(f"{updates} updates, or an agent that is not finite")
    return mistakes


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environments", nargs="*", choices=[[], *ENVIRONMENTS])
    parser.add_argument("--moments", type=int, default=10, help="of each signal and environment")
    parser.add_argument("--longest", type=float, default=3.0, help="seconds after the first update")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    random.seed(args.seed)
    failed = 0
    for name in args.environments or ENVIRONMENTS:
        if name == "envpool" and importlib.util.find_spec("envpool") is None:
            print("envpool: is not installed")
            continue
        for number in (signal.SIGINT, signal.SIGTERM):
            kept = 0
            for _ in range(args.moments):
                moment = random.uniform(0.0, args.longest)
                with tempfile.TemporaryDirectory() as folder:
                    mistakes = interrupt(ENVIRONMENTS[name], number, moment, Path(folder))
                kept += not mistakes
                for mistake in mistakes:
                    print(f"{name}, {number.name} after {moment:.2f} s: {mistake}")
            failed += args.moments - kept
            print(f"{name}, {number.name}: {kept} of {args.moments} trainings kept their results")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
