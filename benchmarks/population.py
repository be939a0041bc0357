"""Population-based training against tuned configs and random search, with equal environment steps.

    python benchmarks/population.py ppo/cartpole_fast
    python benchmarks/population.py ppo/breakout ppo_continuous/pendulum ppo/acrobot
    python benchmarks/population.py dqn/cartpole    # copied replays against kept ones
    python benchmarks/population.py --render        # only the table in dev/sweeps.md

An argument is a config. Its rows are trained from seed 2000. No tuning has seen this
seed, except for ppo/acrobot: its tuning began with the winners of the random search below.

- tuned: the config as it is, with 5 x 32 seeds
- random: 5 independent random searches of 32 trials with one seed; the winner of each
- pbt: 5 populations of 32 agents with the same ranges; all agents of the final populations
- keep_replay: as pbt, but that agents keep their own replay (dqn alone)

Each agent then plays 16 greedy episodes of its own. Intervals are Student's t over the agents of
`tuned`, over the winners of `random`, and over the means of the populations. The results are in
benchmarks/results/population.json, and the runs in runs/population/. A row that is there is not
trained again, and what was stopped is resumed.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))  # read when JAX is imported

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from halving import GAMMA, LR, OF_PPO, run, write_page
from returns import greedy_returns

from onejit import files, run_directory, statistics

RESULTS = ROOT / "benchmarks" / "results" / "population.json"
PAGE = ROOT / "dev" / "sweeps.md"
FIRST_SEED = 2000
EPISODES = 16

OF_DQN = ["--lr", *LR, *GAMMA, "--epsilon-finish", "log-uniform", "1e-3", "0.3"]
TASKS = {  # ranges, and updates between exchanges
    "ppo/cartpole_fast": (OF_PPO, 10),
    "ppo/breakout": (OF_PPO, 2),
    "ppo_continuous/pendulum": (OF_PPO, 4),
    "ppo/acrobot": (OF_PPO, 4),
    "dqn/cartpole": (OF_DQN, 625),
}
ROWS = {
    "tuned": "tuned config",
    "random": "random search, the winners",
    "pbt": "PBT, all agents",
    "pbt_best": "PBT, the best agents",
    "keep_replay": "PBT with kept replays, all agents",
    "keep_replay_best": "PBT with kept replays, the best agents",
}


# --- training ---


def play(run_dir: Path, seed: int) -> np.ndarray:
    """Mean greedy returns of the agents of a run, -inf if they have diverged: [agents]."""
    script, config, agents = run_directory.load_run(run_dir)
    returns = greedy_returns(script, config, agents, EPISODES, seed).mean(axis=1)
    return np.where(statistics.diverged(agents), -np.inf, returns)


def summary(values: np.ndarray, all_agents: np.ndarray, record: dict, steps: int) -> dict:
    """A row. The interval is over `values`, and the worst agent is one of `all_agents`."""
    mean, low, high = statistics.student_interval(values)
    numbers = {"mean": mean, "low": low, "high": high, "worst": all_agents.min()}
    row = {name: float(value) if np.isfinite(value) else None for name, value in numbers.items()}
    return row | {
        "values": [float(value) if np.isfinite(value) else None for value in values],
        "agents": len(all_agents),
        "steps": steps,
        "command": record["command"].replace(f"{ROOT}/", ""),
        "commit": record["commit"],
        "device": record["device"],
        "seconds": record["seconds"],
    }


def measure_tuned(script: str, config: list[str], folder: Path, sizes) -> dict:
    seeds = sizes.populations * sizes.agents
    words = [f"--num-seeds={seeds}", f"--seed={FIRST_SEED}", "--eval-episodes=0"]
    record = run(["train", script, *config, *words], folder / "tuned")
    greedy = play(folder / "tuned", FIRST_SEED)
    return {"tuned": summary(greedy, greedy, record, record["steps_done"])}


def measure_random(script: str, config: list[str], ranges, folder: Path, sizes) -> dict:
    """The row of independent searches. Its command is the first one's."""
    winners = []
    records = []
    for search in range(sizes.populations):
        run_dir = folder / f"random-{search}"
        words = [f"--samples={sizes.agents}", "--num-seeds=1", f"--seed={FIRST_SEED + search}"]
        words += ["--keep=1"]
        record = run(["sweep", script, *config, *ranges, *words], run_dir)
        records.append(record)
        (agents,) = (run_dir / "agents").iterdir()
        winners.append(play(agents, FIRST_SEED + search)[0])
    winners = np.array(winners)
    seconds = [record["seconds"] for record in records]
    total = {"seconds": {name: sum(of_one[name] for of_one in seconds) for name in seconds[0]}}
    steps = sum(record["steps_done"] for record in records)
    return {"random": summary(winners, winners, records[0] | total, steps)}


def measure_pbt(name: str, script: str, config, ranges, interval, folder: Path, sizes) -> dict:
    words = ["--pbt", f"--samples={sizes.agents}", f"--num-seeds={sizes.populations}"]
    words += [f"--exploit-interval={interval}", f"--seed={FIRST_SEED}"]
    if name == "keep_replay":
        words.append("--keep-replay")
    run_dir = folder / name
    record = run(["sweep", script, *config, *ranges, *words], run_dir)
    of_agents = np.load(run_dir / "evaluation.npy").mean(axis=2)
    greedy = record["greedy return"]
    rows = {}
    for suffix, which in {"": "all agents", "_best": "best agents"}.items():
        values = np.array(greedy[which]["of_populations"], float)
        worst = of_agents.reshape(-1) if which == "all agents" else values
        rows[name + suffix] = summary(values, worst, record, record["steps_done"])
    return rows


def measure(task: str, name: str, sizes) -> dict:
    """The rows of a task that a name of ROWS stands for."""
    ranges, interval = TASKS[task]
    folder = sizes.folder / task.replace("/", "-")
    config = ["--config", str((ROOT / "configs" / f"{task}.yaml").relative_to(ROOT))]
    if sizes.timesteps:
        config.append(f"--total-timesteps={sizes.timesteps}")
    script = task.split("/")[0]
    interval = sizes.interval or interval
    if name == "tuned":
        return measure_tuned(script, config, folder, sizes)
    if name == "random":
        return measure_random(script, config, ranges, folder, sizes)
    return measure_pbt(name, script, config, ranges, interval, folder, sizes)


# --- the table ---


def make_table(results: dict) -> str:
    lines = [
        "| config | method | greedy return | worst agent | steps | s |",
        "|---|---|---|---|---|---|",
    ]
    for task, rows in results.items():
        for name, label in ROWS.items():
            if name not in rows:
                continue
            row = rows[name]
            numbers = [np.nan if row[key] is None else row[key] for key in ("mean", "low", "high")]
            worst = "not finite" if row["worst"] is None else f"{row['worst']:.4g}"
            seconds = row["seconds"]["compile"] + row["seconds"]["train"]
            cells = [task, label, statistics.show(*numbers), worst, f"{row['steps']:.3g}"]
            lines.append(f"| {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="CONFIG", help=", ".join(TASKS))
    parser.add_argument("--agents", type=int, default=32, help="number of agents in a population")
    parser.add_argument("--populations", type=int, default=5, help="number of populations")
    parser.add_argument(
        "--timesteps", type=int, help="environment steps of an agent, instead of the config's"
    )
    parser.add_argument("--interval", type=int, help="updates between exchanges")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "population")
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
    for name in ("agents", "populations", "timesteps", "interval"):
        if args.results == RESULTS and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name}: needs --results, because the page shows only default values")

    results = json.loads(args.results.read_text()) if args.results.is_file() else {}
    for task in args.tasks:
        rows = results.setdefault(task, {})
        names = ["tuned", "random", "pbt"]
        if task.startswith("dqn/"):
            names.append("keep_replay")
        for name in names:
            if name not in rows:
                rows |= measure(task, name, args)
                files.write(args.results, json.dumps(results, indent=1) + "\n")
    table = make_table(results)
    print(table)
    if args.results == RESULTS and results:
        write_page(PAGE, "population.py", table)


if __name__ == "__main__":
    main()
