"""Interrupt trainings of a script at random moments, and look for what they leave.

    python tests/stress/interrupts.py                       # all environments, both signals
    python tests/stress/interrupts.py gymnasium --moments 3

Environments are one of gymnax, one of Gymnasium and, if it is installed, one of EnvPool, which run
on the host. For each environment and signal, one process trains ppo.py again and again. Each
training gets one Ctrl-C or SIGTERM at a random moment after its first chunk. Exits with 1 if an
exception ends a training, if a file is missing or cannot be read, or if an agent is not finite. It
takes minutes, and therefore stands here; tests/ have one moment of each kind.
"""

import argparse
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {
    "gymnax": "CartPole-v1",
    "gymnasium": "onejit.envs.gymnasium:CartPole-v1",
    "envpool": "onejit.envs.envpool:CartPole-v1",
}
FILES = {"config.yaml", "metrics.npz", "learning_curve.png", "agent.safetensors", "ppo.py"}
TIME_LIMIT = 180  # seconds for a training; none takes a tenth of it on an idle machine

TRAININGS = """
import json
import os
import sys
import threading
from pathlib import Path

import ppo
import tqdm

env_name, number, moments = json.loads(sys.argv[1])


class Bar(tqdm.tqdm):
    begun = False

    def update(self, steps):
        if not self.begun:  # after the first chunk
            threading.Timer(moment, os.kill, (os.getpid(), number)).start()
        self.begun = True
        super().update(steps)


ppo.tqdm = Bar
config = ppo.Config(
    env_name=env_name,
    num_envs=4,
    num_steps=8,
    num_minibatches=2,
    hidden_sizes=(8,),
    total_timesteps=200_000,  # chunks of 32 updates
)
for i, moment in enumerate(moments):
    ppo.main(config, num_seeds=2, run_dir=Path(f"run{i}"))
"""


def interrupt(env_name: str, number, moments: list[float], folder: Path) -> list[str]:
    """Train in a process, interrupt each training so many seconds after its first chunk.

    Returns the mistakes. After an exception there are no further trainings.
    """
    command = [sys.executable, "-c", TRAININGS, json.dumps([env_name, number, moments])]
    log = folder / "log"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
                timeout=TIME_LIMIT * len(moments),
            )
        except subprocess.TimeoutExpired:
            return ["they did not end"]
    mistakes = []
    if done.returncode or log.read_text().count("results in run") != len(moments):
        mistakes.append(f"exit code {done.returncode}: {log.read_text()[-500:]}")
    for i in range(len(moments)):
        mistakes += look(folder / f"run{i}")
    return mistakes


def look(run_dir: Path) -> list[str]:
    """What is wrong with the results of a training."""
    if not run_dir.is_dir():
        return [f"{run_dir.name} was not begun"]
    missing = FILES - {path.name for path in run_dir.iterdir()}
    if missing:
        return [f"{run_dir.name}: missing: {', '.join(sorted(missing))}"]
    updates = np.load(run_dir / "metrics.npz")["episodes"].shape[1]
    agents = load_file(run_dir / "agent.safetensors")
    if not updates or not all(np.isfinite(leaf).all() for leaf in agents.values()):
        return [f"{run_dir.name}: {updates} updates, or an agent that is not finite"]
    return []


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environments", nargs="*", choices=[[], *ENVIRONMENTS])
    parser.add_argument("--moments", type=int, default=10, help="of each signal and environment")
    parser.add_argument("--longest", type=float, default=3.0, help="seconds after the first chunk")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    random.seed(args.seed)
    failed = False
    for name in args.environments or ENVIRONMENTS:
        if name == "envpool" and importlib.util.find_spec("envpool") is None:
            print("envpool: is not installed")
            continue
        for number in (signal.SIGINT, signal.SIGTERM):
            moments = [random.uniform(0.0, args.longest) for _ in range(args.moments)]
            with tempfile.TemporaryDirectory() as folder:
                mistakes = interrupt(ENVIRONMENTS[name], number, moments, Path(folder))
            for mistake in mistakes:
                print(f"{name}, {number.name}: {mistake}")
            verdict = "failed" if mistakes else "kept their results"
            print(f"{name}, {number.name}: {args.moments} trainings {verdict}", flush=True)
            failed |= bool(mistakes)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
