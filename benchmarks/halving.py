"""Successive halving against a full sweep: environment steps, time, and the winners trained again.

    python benchmarks/halving.py ppo/cartpole_fast
    python benchmarks/halving.py ppo/breakout sac/pendulum dqn/acrobot

An argument is a config. Both sweeps draw the same 64 trials from wide ranges and train them with
the same 4 seeds. The winner of each sweep is then trained with 16 other seeds. Printed are the
environment steps without warm-up, the seconds of compiling and of training, and the final return
of the winner with its 95 % interval by Student's t. The runs are in runs/halving/. What has
finished is not trained again, and what was stopped is resumed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LR = ["log-uniform", "1e-5", "1e-1"]
GAMMA = ["--gamma", "one-minus-log-uniform", "0.9", "0.999"]
OF_PPO = ["--lr", *LR, *GAMMA, "--gae-lambda", "uniform", "0.5", "1"]
OF_PPO += ["--ent-coef", "log-uniform", "1e-4", "1e-1"]
TASKS = {
    "ppo/cartpole_fast": OF_PPO,
    "ppo/breakout": OF_PPO,
    "sac/pendulum": [
        "--policy-lr",
        *LR,
        "--q-lr",
        *LR,
        *GAMMA,
        "--tau",
        "log-uniform",
        "1e-3",
        "1e-1",
    ],
    "dqn/acrobot": ["--lr", *LR, *GAMMA, "--epsilon-finish", "log-uniform", "1e-3", "0.3"],
}
FRESH = 2000  # base seed of the winners' second training; the sweeps have base seed 0


def run(words: list[str], run_dir: Path) -> dict:
    """Run a command of onejit to its end, unless it has finished. Returns its record."""
    record = run_dir / "run.json"
    if record.is_file():
        words = [words[0], "--resume", str(run_dir)]
        if "finished" in json.loads(record.read_text()):
            return json.loads(record.read_text())
    else:
        words = [*words, "--run-dir", str(run_dir)]
    command = [sys.executable, "-m", "onejit", *words]
    subprocess.run(command, check=True, cwd=ROOT)
    return json.loads(record.read_text())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--samples", type=int, default=64, help="number of trials")
    parser.add_argument("--eta", type=int, default=3, help="1/eta of the trials go on")
    parser.add_argument("--timesteps", type=int, help="of an agent, instead of the config's")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "halving")
    args = parser.parse_args()

    rows = [
        "| config | sweep | steps | s | winner, 16 other seeds | worst |",
        "|---|---|---|---|---|---|",
    ]
    for task in args.tasks:
        script = task.split("/")[0]
        config = ["--config", str(ROOT / "configs" / f"{task}.yaml")]
        if args.timesteps:
            config.append(f"--total-timesteps={args.timesteps}")
        sweep = ["sweep", script, *config, *TASKS[task], f"--samples={args.samples}"]
        for name, options in {"full": [], "halving": ["--halving", str(args.eta)]}.items():
            folder = args.folder / f"{task.replace('/', '-')}-{name}"
            record = run([*sweep, *options], folder)
            best = ["train", script, "--config", str(folder / "best.yaml")]
            again = run(
                [*best, "--num-seeds=16", f"--seed={FRESH}", "--eval-episodes=0"],
                folder.with_name(f"{folder.name}-winner"),
            )
            final = again["final return"]
            seconds = record["seconds"]["compile"] + record["seconds"]["train"]
            interval = f"{final['mean_low']:.4g} to {final['mean_high']:.4g}"
            cells = [
                task,
                name,
                f"{record['steps_done']:.3g}",
                f"{seconds:.0f}",
                f"{final['mean']:.4g} ({interval})",
                f"{final['worst']:.4g}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
