"""Train the configs over many seeds, and write what they reach into benchmarks/RESULTS.md.

    python benchmarks/returns.py ppo/cartpole dqn/cartpole   # rows by name, SCRIPT/CONFIG
    python benchmarks/returns.py ppo/breakout@1e7            # the config with --total-timesteps 1e7
    python benchmarks/returns.py ppo/cartpole --publish      # into the repository's own results
    python benchmarks/returns.py                             # all rows without results: the queue
    python benchmarks/returns.py --render                    # only the page, from what is published
    python benchmarks/returns.py --check                     # whether every row keeps the rules
    python benchmarks/returns.py --plan                      # what rows would take on a GPU

A row is one run of onejit train from start to end. Then each agent plays greedy episodes of its
own, and agents of classic control play in Gymnasium's environments too.
The file SCRIPT_CONFIG.json (SCRIPT_CONFIG_STEPS.json) keeps the returns of all seeds, the learning
curve, hardware, versions, commit and command. It is written to runs/returns/. With --publish it is
written to benchmarks/results/, and RESULTS.md, its figures, the guide and the comments of configs
are rewritten.

Rows are measured from base seeds that no tuning has seen. The first is 2000; configs are tuned with
seeds below 1000, and returns.yaml records with which. If a config changed after it was measured,
what was seen of its row may have led to the change, and the row moves to the next base seed that no
tuning has seen, 1000 further. If the script changed, --script-changed moves the rows named.

returns.yaml lists the rows, with thresholds and published scores. returns_page.py writes the page.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

# read when JAX is imported
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(len(os.sched_getaffinity(0))))

import filelock
import gymnasium
import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]

import guide
import origin
import returns_page as page
from returns_page import DATA, ROWS

from onejit.base import files, statistics, text
from onejit.engine import evaluation
from onejit.run.directory import load_results, load_run
from onejit.run.learning_curve import learning_curve
from onejit.run.record import read_record
from onejit.script import command_line, configs
from onejit.script import load as scripts
from onejit.train.options import Options

RUNNING = ROOT / ".cache" / "returns"  # run directories of rows that are not finished
UNPUBLISHED = ROOT / "runs" / "returns"  # files of rows, without --publish
GYMNASIUM = {
    "CartPole-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
}


def load(name: str):
    """The script of a row, and the flags of onejit train."""
    script = scripts.load_script(str(ROOT / f"{name.partition('/')[0]}.py"))
    flags = ["--config", str(page.config_of(name))]
    if "@" in name:
        flags += ["--total-timesteps", name.partition("@")[2]]
    flags += [str(word) for word in DATA["rows"].get(name, {}).get("flags", [])]
    return script, flags


def can_continue(name: str, command: list[str], run_dir: Path) -> bool:
    """Whether the run in `run_dir` is of this command, with the script and config of today."""
    record = read_record(run_dir)
    script = ROOT / f"{name.partition('/')[0]}.py"
    return (
        (record.command or "").partition(" --run-dir")[0] == shlex.join(command)
        and record.sha256 == hashlib.sha256(script.read_bytes()).hexdigest()
        and not has_changed({"row": name, "settings": record.settings})
    )


def run_training(name: str, flags: list[str], run_dir: Path) -> dict:
    """Run onejit train: its command, the seconds it took, its most memory in bytes.

    A training that was killed goes on from its last checkpoint in `run_dir`. Raises
    CalledProcessError, and ValueError if the checkpoint is of another training.
    """
    command = ["onejit", "train", name.partition("/")[0], *flags]
    words = [*command[1:], "--run-dir", str(run_dir), "--checkpoint-interval", "300"]
    resumes = (run_dir / "checkpoints").exists()
    if resumes:
        if not can_continue(name, command, run_dir):
            raise ValueError(f"{run_dir}: is of another command, script or config; delete it")
        words = ["resume", str(run_dir)]
    else:
        shutil.rmtree(run_dir, ignore_errors=True)  # killed before there was a checkpoint
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "onejit", *words], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    training = {
        "command": shlex.join(command),
        "seconds": time.perf_counter() - begun,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }
    if resumes:  # what was spent before is known of the training alone
        training["seconds"] = sum(read_record(run_dir).seconds.values())
        training["processor_seconds"] = None
    return training


def run_dir_of(name: str) -> Path:
    """The run directory of a row that is being measured."""
    return RUNNING / page.file_of(name).stem


def settings_of(name: str) -> dict:
    """The fields of a row's config as it is today, as run.json has them."""
    script, (_, file, *more) = load(name)
    flags = {"": [], "config": [str(ROOT / file)]}
    for field, words in command_line.split_flags(more).items():
        if field in configs.field_names(script):
            flags[field] = words
    config, _, _ = command_line.parse_with(script, flags, Options, description=None)
    return json.loads(json.dumps(configs.plain(config)))


def has_changed(row: dict) -> bool:
    """Whether the config of a measured row has another value today.

    A field that was added since must have the script's default: it trains as before.
    """
    script, _ = load(row["row"])
    measured = json.loads(json.dumps(configs.plain(script.Config()))) | row["settings"]
    return any(measured[key] != value for key, value in settings_of(row["row"]).items())


def seeds_of(name: str, script_changed: bool = False) -> tuple[int, list[int]]:
    """The base seed for a row, and those from which it was measured before something changed."""
    file = page.file_of(name)
    if not file.exists():
        return page.FIRST_SEED, []
    row = json.loads(file.read_text())
    if not script_changed and not has_changed(row):
        return row["seed"], row["earlier_seeds"]
    seed = row["seed"] + 1000
    while seed in page.tuning_of(row)["seeds"]:
        seed += 1000
    return seed, [*row["earlier_seeds"], row["seed"]]


def faults() -> list[str]:
    """What is wrong with the measured rows, in a sentence each."""
    result = []
    for row in page.read_rows():
        name = row["row"]
        if row["seed"] < page.FIRST_SEED:
            result.append(f"{name}: was measured from seed {row['seed']}, not {page.FIRST_SEED}")
        if row["seed"] != row["settings"]["seed"]:
            result.append(f"{name}: was trained from seed {row['settings']['seed']}")
        if row["seed"] in page.tuning_of(row)["seeds"]:
            result.append(f"{name}: was tuned with seed {row['seed']}, from which it was measured")
        if row["seed"] in row["earlier_seeds"]:
            result.append(f"{name}: was measured from seed {row['seed']} with other settings")
        if has_changed(row):
            result.append(f"{name}: its config has changed since it was measured")
    return result


def greedy_returns(script, config, agents, episodes: int, seed: int) -> np.ndarray:
    """Greedy returns of agents with leaves [num_seeds, ...]: [num_seeds, episodes].

    Each agent plays episodes of its own, so that an interval over agents includes their luck.
    """
    options = SimpleNamespace(seed=seed, eval_episodes=episodes)
    evaluate = jax.jit(evaluation.make_evaluation(script, config, options))
    num_seeds = len(jax.tree.leaves(agents)[0])
    return np.asarray(evaluate(agents, np.arange(num_seeds)))


def highest_return(evaluations: dict) -> np.ndarray:
    """Where the mean evaluation return over seeds was highest during training: [num_seeds]."""
    returns = evaluations["returns"]  # [num_seeds, evaluations], NaN of seeds that diverged
    kept = np.where(np.isfinite(returns), returns, -np.inf)
    return returns[:, kept.mean(axis=0).argmax()]


def measure(name: str, num_seeds: int, seed: int, earlier_seeds: list[int]) -> dict:
    """Train and play, from start to end: a row. Raises CalledProcessError if training fails."""
    script, flags = load(name)
    flags = [*flags, "--num-seeds", str(num_seeds), "--seed", str(seed)]
    if "--eval-interval" not in flags:
        flags += ["--eval-episodes", "0"]
    run_dir = run_dir_of(name)
    training = run_training(name, flags, run_dir)
    _, config, agents = load_run(run_dir)
    episodes = DATA["rows"].get(name, {}).get("episodes", 100)
    greedy = greedy_returns(script, config, agents, episodes, seed)
    results = load_results(run_dir)
    metrics = results.metrics
    record = read_record(run_dir)
    evaluations = {}
    if (run_dir / "evaluations.npz").exists():
        evaluations = dict(np.load(run_dir / "evaluations.npz"))

    steps = config.num_updates * config.num_envs * config.num_steps
    steps += getattr(config, "warmup_timesteps", 0)
    lost = statistics.diverged(agents)
    row = {
        "row": name,
        "script": name.partition("/")[0],
        "environment": environment_of(name, config),
        "total_timesteps": steps,
        "seed": seed,
        "earlier_seeds": earlier_seeds,
        "command": training["command"],
        "final_return": stored(results.training_return(), lost),
        "greedy_return": stored(greedy.mean(axis=1), lost),
        "greedy_episodes": episodes,
        "diverged": int(lost.sum()),
        "episodes_at_end": episodes_at_end(config, metrics),
        "curve": training_curve(config, metrics),
        "seconds": training["seconds"],
        "processor_seconds": training["processor_seconds"],
        "peak_memory": training["peak_memory"],
    }
    if evaluations:
        row["evaluation_curve"] = curve_over_seeds(evaluations["timesteps"], evaluations["returns"])
        row["highest_return"] = stored(highest_return(evaluations), lost)
    if "win_rate" in metrics:
        of_wins = metrics | {"episodic_return": metrics["win_rate"]}
        row["win_rate"] = stored(statistics.final_return(of_wins), lost)
    if row["environment"] in GYMNASIUM:
        row["gymnasium_return"] = stored(play_in_gymnasium(script, config, agents, seed), lost)
    for key in ("started", "device", "versions", "commit", "settings"):
        row[key] = getattr(record, key)
    commit = row["commit"].removesuffix("-dirty")
    if not commit:  # a copy without git
        row["commit"] = origin.commit()
    else:
        row["commit"] = f"{commit}-dirty" if code_has_changed(commit) else commit
    row["processor"] = origin.processor()
    return row


def code_has_changed(commit: str) -> bool:
    """Whether scripts or configs differ from the commit, comments aside.

    Other rows change only pages and the comments of configs. If git does not know, they do.
    """
    code = ["--", "*.py", "configs"]
    for command in (
        ["git", "diff", commit, "--ignore-matching-lines=^#", *code],
        ["git", "ls-files", "--others", "--exclude-standard", *code],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True)
        if done.returncode or done.stdout:
            return True
    return False


def stored(returns, lost) -> list:
    """The returns of all seeds for JSON, null for a seed that is `lost` or has none."""
    kept = np.isfinite(returns) & ~lost
    rounded = np.round(returns.astype(float), 6).tolist()
    return [value if keep else None for value, keep in zip(rounded, kept, strict=True)]


def environment_of(name: str, config) -> str:
    """Its name and what makes it another one. Rows of the same environment are compared."""
    environment = config.env_name.rpartition(":")[2]
    if name.startswith("q_learning_gridworld"):
        return f"{environment}, {name.partition('/')[2]}"
    params = dict(getattr(config, "env_params", {}))
    parts = [environment]
    parts += [value for value in params.values() if isinstance(value, str)]
    if "memory_length" in params:
        parts.append(f"{params['memory_length']} steps")
    observe = getattr(config, "observe", ())
    if observe:
        noun = "entry" if len(observe) == 1 else "entries"
        parts.append(f"{noun} {', '.join(map(str, observe))} observed")
    return ", ".join(parts)


def episodes_at_end(config, metrics) -> float:
    """Episodes that end in an environment in the last tenth of the updates, mean over all seeds."""
    num_updates = metrics["episodes"].shape[1]
    episodes = metrics["episodes"][:, num_updates * 9 // 10 :].sum(axis=1).mean()
    return round(float(episodes) / getattr(config, "num_envs", 1), 4)


def training_curve(config, metrics) -> dict:
    """The return of up to 100 stretches of the training, over seeds."""
    metrics = {name: metrics[name] for name in ("episodes", "episodic_return")}
    steps, returns = learning_curve(config, metrics)
    return curve_over_seeds(steps, carried_forward(returns))


def carried_forward(returns) -> np.ndarray:
    """A seed's last return where it ended no episode, [num_seeds, n]: curves reach the end."""
    index = np.where(np.isnan(returns), 0, np.arange(returns.shape[1]))
    last = np.maximum.accumulate(index, axis=1)
    return np.take_along_axis(returns, last, axis=1)


def curve_over_seeds(steps, returns) -> dict:
    """Interquartile mean over seeds and its 95 % interval, of returns [num_seeds, len(steps)].

    A point is over the seeds that have a return there, which `seeds` counts, and is left out if
    fewer than half have one.
    """
    curve = {"steps": [], "return": [], "low": [], "high": [], "seeds": []}
    for step, values in zip(np.asarray(steps).tolist(), returns.T, strict=True):
        finite = values[np.isfinite(values)]
        if 2 * len(finite) < len(values):
            continue
        interval = statistics.bootstrap_interval(statistics.interquartile_mean, finite)
        point = np.array(interval, float)
        point = np.where(np.isnan(point), point[0], point)  # one seed has no interval
        curve["steps"].append(step)
        for key, value in zip(("return", "low", "high"), point.round(4).tolist(), strict=True):
            curve[key].append(value)
        curve["seeds"].append(len(finite))
    return curve


def play_in_gymnasium(script, config, agents, seed: int, episodes: int = 16) -> np.ndarray:
    """Mean return of the agents' greedy episodes in Gymnasium's environment: [num_seeds].

    `agents` has leaves [num_seeds, ...].
    """
    num_seeds = len(jax.tree.leaves(agents)[0])
    num_envs = num_seeds * episodes
    start, act = evaluation.policy_of(script, config)
    act = jax.jit(jax.vmap(act))
    agents = jax.tree.map(lambda leaf: np.repeat(leaf, episodes, axis=0), agents)
    memory = jax.vmap(lambda _: start())(np.arange(num_envs))

    envs = gymnasium.make_vec(config.env_name, num_envs=num_envs, vectorization_mode="sync")
    space = envs.single_action_space
    obs, _ = envs.reset(seed=seed)
    returns = np.zeros(num_envs)
    running = np.full(num_envs, True)
    while running.any():
        action, memory = act(agents, memory, obs)
        action = np.asarray(action)
        if isinstance(space, gymnasium.spaces.Box):  # scripts clip to [-1, 1], and rescale
            action = space.low + (np.clip(action, -1, 1) + 1) / 2 * (space.high - space.low)
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += np.where(running, reward, 0)
        running &= ~(terminated | truncated)
    envs.close()
    return returns.reshape(num_seeds, episodes).mean(axis=1)


def plan(name: str) -> dict:
    """What an H100 would take, from benchmarks/plan, with the packages of the extra `gpu`."""
    planned = page.PLANNED[name]
    command = ["benchmarks/plan", name.partition("/")[0], "--config", f"configs/{name}.yaml"]
    if "steps" in planned:
        command += ["--total-timesteps", planned["steps"]]
    command += ["--num-seeds", str(planned["seeds"]), "--gpu", "h100", "--no-most-seeds"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        subprocess.run(
            [sys.executable, *command, "--json", str(file)],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        result = json.loads(file.read_text())
    loop = result["loops"][0]
    return {
        "command": " ".join(["python", *command]),
        "memory": result["memory"]["needed"],
        "kernels": loop["kernels"],
        "bytes": loop["bytes"],
        "seconds": loop["seconds"],
    }


def make_plans(names: list[str]) -> None:
    plans = page.read_plans()
    for name in names:
        plans[name] = plan(name)
        files.write(page.PLANS_FILE, json.dumps(plans, indent=1) + "\n")


def measure_and_keep(name: str, num_seeds: int, script_changed: bool, folder: Path) -> None:
    """Measure a row and write its file to `folder`, unless another process measures it."""
    lock = filelock.FileLock(run_dir_of(name).with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        print(f"{name}: another process measures it", flush=True)
        return
    with lock:
        measure_alone(name, num_seeds, script_changed, folder)


def measure_alone(name: str, num_seeds: int, script_changed: bool, folder: Path) -> None:
    """Measure a row whose lock this process holds, write its file, then delete the training."""
    row = measure(name, num_seeds, *seeds_of(name, script_changed))
    file = keep(row, folder)
    shutil.rmtree(run_dir_of(name))
    worst = page.values_of(row, "final_return").min()
    print(
        f"{name}: training return {page.show_interval(row, 'final_return')}, worst agent"
        f" {worst:.4g}, evaluation return {page.show_interval(row, 'greedy_return')};"
        f" written to {file}",
        flush=True,
    )


def keep(row: dict, folder: Path) -> Path:
    """Write the file of a measured row."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / page.file_of(row["row"]).name
    files.write(file, "{\n" + ",\n".join(lines) + "\n}\n")
    return file


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="ROW",
        help="SCRIPT/CONFIG or SCRIPT/CONFIG@STEPS; by default all rows without results",
    )
    parser.add_argument("--num-seeds", type=int, help="by default as in returns.yaml")
    parser.add_argument(
        "--script-changed",
        action="store_true",
        help="measure ROWs from their next base seeds",
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write into benchmarks/results/, and RESULTS.md, figures, guide and configs from it",
    )
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure nothing; exit with 1 if a row was measured from a seed that tuning has seen, "
        "or if its config has changed since",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="what a GPU would take: plan ROWs again, by default those that are not planned yet",
    )
    options = parser.parse_args()
    if options.script_changed and not options.rows:
        parser.error("--script-changed: name the rows")
    known = page.PLANNED if options.plan else ROWS
    for name in options.rows:
        if name not in known:
            parser.error(f"{name}: is not a row{text.nearest(name, known)}")
    if options.check:
        wrong = faults()
        print("\n".join(wrong) or "every row keeps the rules")
        sys.exit(1 if wrong else 0)
    if options.plan:
        make_plans(options.rows or [name for name in page.PLANNED if name not in page.read_plans()])
    elif not options.render:
        folder = page.MEASURED if options.publish else UNPUBLISHED
        for name in options.rows or page.not_measured():
            if not options.rows and (folder / page.file_of(name).name).exists():
                continue  # another process has measured it
            num_seeds = options.num_seeds or ROWS[name]
            measure_and_keep(name, num_seeds, options.script_changed, folder)
    if options.publish or options.plan or options.render:
        page.render()
        guide.write()


if __name__ == "__main__":
    main()
