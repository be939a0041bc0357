"""Successive halving against a full sweep: environment steps, time, and the winners trained again.

    python benchmarks/halving.py ppo/cartpole_fast
    python benchmarks/halving.py ppo/breakout sac/pendulum dqn/acrobot
    python benchmarks/halving.py ppo/breakout --rungs 3    # one more row, without a full sweep
    python benchmarks/halving.py --render    # only the table in dev/sweeps.md

An argument is a config. Both sweeps draw the same 64 trials from wide ranges and train them with
the same 4 seeds. The winner of each sweep is then trained with 16 other seeds. The table has the
environment steps without warm-up, the seconds of compiling and of training, and the final return
of the winner with its 95 % interval by Student's t. The results are in
benchmarks/results/halving.json, and the runs in runs/halving/. A row of the same command is not
trained again, and what was stopped is resumed.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from onejit.base import files, statistics

RESULTS = ROOT / "benchmarks" / "results" / "halving.json"
PAGE = ROOT / "dev" / "sweeps.md"

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
    """Run a command of onejit to its end, unless it has finished. Returns its record.

    Raises ValueError if the run was begun by another command.
    """
    file = run_dir / "run.json"
    command = ["onejit", *words, "--run-dir", str(run_dir)]
    if file.is_file():
        record = json.loads(file.read_text())
        if record["command"] != shlex.join(command):
            raise ValueError(f"{run_dir} is of another command, {record['command']}: delete it")
        if "finished" in record:
            return record
        command = ["onejit", "resume", str(run_dir)]
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)
    return json.loads(file.read_text())


def words_of(task: str, name: str, args) -> list[str]:
    """The command of onejit for a sweep: `full`, `halving` or `halving, N rungs`."""
    config = ["--config", f"configs/{task}.yaml"]
    if args.timesteps:
        config.append(f"--total-timesteps={args.timesteps}")
    script = task.split("/")[0]
    words = ["sweep", script, *config, *TASKS[task], f"--samples={args.samples}"]
    if name != "full":
        words += ["--halving", str(args.eta)]
    if args.rungs:
        words += ["--rungs", str(args.rungs)]
    return words


def measure(task: str, name: str, args) -> dict:
    """A row: the sweep and its winner."""
    words = words_of(task, name, args)
    folder = args.folder / re.sub("[/, ]+", "-", f"{task}-{name}")
    record = run(words, folder)
    seeds = ["--num-seeds=16", f"--seed={FRESH}", "--eval-episodes=0"]
    again = run(
        ["train", words[1], "--config", str(folder / "best.yaml"), *seeds],
        folder.with_name(f"{folder.name}-winner"),
    )
    final = again["final return"]
    keys = ("mean", "mean_low", "mean_high", "worst")
    return {
        "steps": record["steps_done"],
        "seconds": record["seconds"],
        "winner": {key: final[key] for key in keys} | {"seconds": again["seconds"]},
        "command": " ".join(["onejit", *words]),
        "commit": record["commit"],
        "device": record["device"],
        "versions": record["versions"],
    }


# --- the table ---


def make_table(results: dict) -> str:
    lines = [
        "| config | sweep | steps | compiling, s | training, s | winner, 16 other seeds | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, rows in results.items():
        for name, row in rows.items():
            winner = row["winner"]
            cells = [
                task,
                name,
                f"{row['steps']:.3g}",
                f"{row['seconds']['compile']:.3g}",
                f"{row['seconds']['train']:.3g}",
                statistics.show(*(winner[key] for key in ("mean", "mean_low", "mean_high"))),
                f"{winner['worst']:.4g}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(page: Path, script: str, table: str) -> None:
    """Write a table between the two comments of a page that name the script."""
    first, last = f"<!-- {script} -->", f"<!-- end of {script} -->"
    before, _, rest = page.read_text().partition(first)
    _, _, after = rest.partition(last)
    page.write_text(f"{before}{first}\n{table}\n{last}{after}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="CONFIG", help=", ".join(TASKS))
    parser.add_argument("--samples", type=int, default=64, help="number of trials")
    parser.add_argument("--eta", type=int, default=3, help="1/eta of the trials go on")
    parser.add_argument(
        "--rungs", type=int, help="number of rungs; by default as many as the trials allow"
    )
    parser.add_argument(
        "--timesteps", type=int, help="environment steps of an agent, instead of the config's"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "halving")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="JSON file for the results; dev/sweeps.md shows only the default file",
    )
    parser.add_argument("--render", action="store_true", help="only write the page")
    args = parser.parse_args()
    unknown = set(args.tasks) - set(TASKS)
    if unknown:
        parser.error(f"{unknown.pop()} is none of {', '.join(TASKS)}")
    for name in ("samples", "eta", "timesteps"):
        if args.results == RESULTS and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name}: needs --results, because the page shows only default values")

    results = json.loads(args.results.read_text()) if args.results.is_file() else {}
    names = [f"halving, {args.rungs} rungs"] if args.rungs else ["full", "halving"]
    for task in args.tasks:
        rows = results.setdefault(task, {})
        for name in names:
            command = " ".join(["onejit", *words_of(task, name, args)])
            if rows.get(name, {}).get("command") != command:
                rows[name] = measure(task, name, args)
                files.write(args.results, json.dumps(results, indent=1) + "\n")
    table = make_table(results)
    print(table)
    if args.results == RESULTS and results:
        write_page(PAGE, "halving.py", table)


if __name__ == "__main__":
    main()
