"""What the scripts reach with the configs that are here, over many seeds: makes docs/results.md, or rows of it, again.

    python benchmarks/returns.py ppo/cartpole dqn/cartpole   # rows by name, SCRIPT/CONFIG
    python benchmarks/returns.py                             # all rows that are not measured yet: hours
    python benchmarks/returns.py --render                    # the page alone, from what was measured
    python benchmarks/returns.py --plan                      # what rows for a GPU would take, by onejit plan

A row is one run of onejit train from start to end. Agents of classic control then play in Gymnasium too, which has
environments of its own. benchmarks/results/SCRIPT_CONFIG.json keeps the returns of each seed, the learning curve,
hardware, versions, commit and command. All rows take seed 100; configs were tuned with others.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))  # read when JAX is imported; onejit train too

import gymnasium
import jax
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onejit import command_line, runs, statistics  # noqa: E402

MEASURED, PAGE, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md", ROOT / "docs" / "figures"
PLANS_FILE = MEASURED / "plans.json"
SEED = 100

SEEDS = {  # of each row
    32: """ppo/cartpole ppo/cartpole_fast pqn/cartpole dqn/cartpole ppo/acrobot pqn/acrobot dqn/acrobot
        ppo/mountaincar pqn/mountaincar ppo_continuous/mountaincar_continuous ppo_continuous/pendulum
        dpo_continuous/pendulum ppo/catch pqn/catch dqn/catch ppo/deepsea pqn/deepsea dqn/deepsea ppo/fourrooms
        pqn/fourrooms dqn/fourrooms ppo/frozenlake pqn/frozenlake dqn/frozenlake ppo_rnn/memory_chain
        ppo_rnn/umbrella_chain ppo_rnn/bandit ppo_continuous/reacher dpo_continuous/reacher
        ppo_continuous/pointrobot dpo_continuous/pointrobot ppo_continuous/hopper dpo_continuous/hopper
        ppo_continuous/inverted_pendulum dpo_continuous/inverted_pendulum ppo_continuous/inverted_double_pendulum
        dpo_continuous/inverted_double_pendulum q_learning_gridworld/gridworld_8x12 q_learning_gridworld/cliff
        q_learning_gridworld/walls""",
    16: """ppo_rnn/cartpole_masked apex_dqn/cartpole apex_dqn/acrobot apex_dqn/catch dqn/mountaincar
        sac/pendulum td3/pendulum
        sac/mountaincar_continuous td3/mountaincar_continuous sac/reacher td3/reacher sac/pointrobot td3/pointrobot""",
    8: """ppo/breakout ppo/asterix ppo/freeway ppo/spaceinvaders pqn/breakout pqn/asterix pqn/freeway
        pqn/spaceinvaders dqn/breakout dqn/asterix dqn/freeway dqn/spaceinvaders apex_dqn/breakout sac/hopper td3/hopper
        sac/inverted_double_pendulum td3/inverted_double_pendulum""",
}
ROWS = {row: seeds for seeds, rows in SEEDS.items() for row in rows.split()}
ALSO = {f"pqn/{game}": ["--total-timesteps", "1e6"] for game in ("breakout", "asterix", "freeway", "spaceinvaders")}
PLANNED = {  # rows for a GPU: seeds
    **{f"ppo_continuous/{robot}": 32 for robot in ("ant", "halfcheetah", "walker2d", "humanoid")},
    **{f"{name}/{robot}": 8 for name in ("sac", "td3") for robot in ("ant", "halfcheetah", "walker2d")},
    **{f"ppo/{game}": 256 for game in ("breakout", "asterix", "freeway", "spaceinvaders", "seaquest")},
    **{f"pqn/{game}": 64 for game in ("breakout", "asterix", "freeway", "spaceinvaders", "seaquest")},
}
LONGER = {row: ["--total-timesteps", "1e7"] for row in PLANNED if row.startswith("ppo/")}
GYMNASIUM = {"CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"}

BLINES = "[gymnax-blines](https://github.com/RobertTLange/gymnax-blines)"
CLEANRL = "[CleanRL](https://docs.cleanrl.dev)"
ZOO = "[RL Zoo](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md)"
OPEN = "[OPEN](https://arxiv.org/abs/2407.07082)"
YOUNG = "[Young and Tian](https://arxiv.org/abs/1903.03176)"
ACTOR_CRITIC, VALUE = ("ppo", "ppo_continuous", "dpo_continuous"), ("dqn", "apex_dqn")
PUBLIC = {  # {environment: [(scripts, best public return, within which steps, whose)]}
    "CartPole-v1": [
        (("ppo",), 500, 1e5, f"PPO, {ZOO}"),
        (VALUE, 498.4, 5e5, f"DQN, {CLEANRL}"),
        (("pqn",), 495.1, 5e5, f"PQN, {CLEANRL}"),
        (("ppo_rnn",), 500, 1e5, f"recurrent PPO, velocities masked, {ZOO}"),
    ],
    "Acrobot-v1": [
        (("ppo",), -86.4, 5e5, f"PPO, {CLEANRL}"),
        (VALUE, -88.9, 5e5, f"DQN, {CLEANRL}"),
        (("pqn",), -95.6, 5e5, f"PQN, {CLEANRL}"),
    ],
    "MountainCar-v0": [
        (("ppo",), -110, 1e6, f"PPO, {ZOO}"),
        (VALUE, -100.8, 1.2e5, f"DQN, {ZOO}"),
    ],
    "Pendulum-v1": [
        (ACTOR_CRITIC, -200.6, 1e6, f"PPO, {BLINES}"),
        (("sac",), -157, 2e4, f"SAC, {ZOO}"),
        (("td3",), -152, 2e4, f"TD3, {ZOO}"),
    ],
    "MountainCarContinuous-v0": [
        (ACTOR_CRITIC, 88.3, 2e4, f"PPO, {ZOO}"),
        (("sac",), 94.7, 5e4, f"SAC, {ZOO}"),
        (("td3",), 93.5, 3e5, f"TD3, {ZOO}"),
    ],
    "Catch-bsuite": [(("ppo", "pqn", *VALUE), 1, 1e5, f"PPO, {BLINES}")],
    "FourRooms-misc": [(("ppo", "pqn", *VALUE), 1, 2e5, f"PPO, {BLINES}")],
    "Breakout-MinAtar": [(("ppo", "pqn"), 50.1, 1e7, f"PPO, {OPEN}"), (VALUE, 10, 5e6, f"DQN, read off, {YOUNG}")],
    "Asterix-MinAtar": [(("ppo", "pqn"), 17.8, 1e7, f"PPO, {BLINES}"), (VALUE, 17, 5e6, f"DQN, read off, {YOUNG}")],
    "Freeway-MinAtar": [(("ppo", "pqn"), 61.8, 1e7, f"PPO, {OPEN}"), (VALUE, 50, 5e6, f"DQN, read off, {YOUNG}")],
    "SpaceInvaders-MinAtar": [
        (("ppo", "pqn"), 167.1, 1e7, f"PPO, {OPEN}"),
        (VALUE, 44, 5e6, f"DQN, read off, {YOUNG}"),
    ],
}
GYMNASIUM_SAYS = "Gymnasium's reward threshold"
YOUNG_HALF = f"half of DQN after 5e6 steps, read off, {YOUNG}"
THRESHOLDS = {  # {environment: (an agent has failed below this return, where that comes from)}
    "CartPole-v1": (475, GYMNASIUM_SAYS),
    "Acrobot-v1": (-100, GYMNASIUM_SAYS),
    "MountainCar-v0": (-110, GYMNASIUM_SAYS),
    "MountainCarContinuous-v0": (90, GYMNASIUM_SAYS),
    "Pendulum-v1": (-200, f"PPO reaches -200.6 after 1e6 steps, {BLINES}; Gymnasium has no threshold"),
    "Catch-bsuite": (0.9, "19 of 20 balls are caught"),
    "DeepSea-bsuite": (0.5, "0.99 with the one reward, 0 or less without it"),
    "FourRooms-misc": (0.9, "9 of 10 episodes reach the goal"),
    "FrozenLake-misc": (0.7, "Gymnasium's reward threshold of FrozenLake-v1, which has the same map"),
    "MemoryChain-bsuite": (0.9, "19 of 20 answers are right"),
    "UmbrellaChain-bsuite": (0.5, "three of four choices are right; the best expected return is 1"),
    "BernoulliBandit-misc": (80, "always pulling the better arm gives 90, a random arm 50"),
    "inverted_pendulum": (950, "Gymnasium's reward threshold of InvertedPendulum-v5, which has the same reward"),
    "inverted_double_pendulum": (
        9100,
        "Gymnasium's reward threshold of InvertedDoublePendulum-v5, which has a similar reward",
    ),
    "GridWorld, gridworld_8x12": (0.9, "9 of 10 episodes reach the goal"),
    "GridWorld, cliff": (-17, "the return of the longest sensible path, along the upper edge"),
    "GridWorld, walls": (0.8, "20 steps to the goal, from a random cell; the farthest is 18 steps away"),
    "Breakout-MinAtar": (5, YOUNG_HALF),
    "Asterix-MinAtar": (8.5, YOUNG_HALF),
    "Freeway-MinAtar": (25, YOUNG_HALF),
    "SpaceInvaders-MinAtar": (22, YOUNG_HALF),
}
FOURROOMS = (
    "the public figure is of PPO, which also reaches 1 here. Most agents reach 0.9 or more. The mean is lowered by "
    "agents that do not find the goal from every start."
)
WHY = {  # {row: why it is below the public return}
    "dqn/mountaincar": "the public figure is of one agent; of the 16 here five play as well or "
    "better, and two have not settled.",
    "pqn/fourrooms": FOURROOMS,
    "dqn/fourrooms": FOURROOMS,
    "sac/mountaincar_continuous": "the public figure is of one agent. Discounts of 0.995, 0.999 and 0.9999, target "
    "entropies of -2 and -3 and a learning rate of 2e-3 ended at 92.7 to 94.2 (6 other seeds each): not nearer.",
}


# --- measuring ---


def load(row: str):
    """The script of a row and its flags."""
    script = runs.load_script(str(ROOT / f"{row.partition('/')[0]}.py"))
    return script, ["--config", f"configs/{row}.yaml", *ALSO.get(row, [])]


def measure(row: str, num_seeds: int, seed: int) -> dict:
    """Train and play, from start to end. Raises CalledProcessError where training fails."""
    script, flags = load(row)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, name = Path(folder) / "run", row.partition("/")[0]
        words = ["-m", "onejit", "train", name, *flags, "--num-seeds", str(num_seeds), "--seed", str(seed)]
        more = ["--run-dir", str(run_dir), "--checkpoint-interval", "0"]
        begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words, *more], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        _, config, agent = runs.load_run(run_dir)
        metrics, record = runs.load_metrics(run_dir), runs.read_record(run_dir)
    lost = statistics.diverged(agent)
    returns = {"final_return": statistics.final_return(metrics), "greedy_return": metrics["evaluation"].mean(axis=1)}
    found = {
        "row": row,
        "script": name,
        "environment": environment_of(row, config),
        "total_timesteps": config.num_updates * config.num_envs * config.num_steps
        + getattr(config, "warmup_timesteps", 0),
        "command": " ".join(["onejit", *words[2:]]),
        **{name: stored(each, lost) for name, each in returns.items()},
        "diverged": int(lost.sum()),
        "curve": learning_curve(script, config, metrics),
        "seconds": seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
    if config.env_name in GYMNASIUM and found["environment"] == config.env_name:
        found["gymnasium_return"] = stored(play_in_gymnasium(script, config, agent), lost)
    found |= {name: record[name] for name in ("started", "device", "versions", "commit", "settings")}
    code = ["git", "status", "--porcelain", "--", "*.py", "configs"]  # other rows change the page
    if not subprocess.run(code, cwd=ROOT, capture_output=True).stdout:
        found["commit"] = found["commit"].removesuffix("-dirty")
    return found | {"processor": processor()}


def stored(returns, lost) -> list:
    """The returns of the seeds as JSON holds them, null for a seed that is `lost` or has none."""
    kept = np.isfinite(returns) & ~lost
    return [round(float(each), 6) if keep else None for each, keep in zip(returns, kept, strict=True)]


def environment_of(row: str, config) -> str:
    """Its name and what makes it another: rows of the same one are compared."""
    name, params = config.env_name.rpartition(":")[2], dict(getattr(config, "env_params", {}))
    if row.startswith("q_learning_gridworld"):
        return f"{name}, {row.partition('/')[2]}"
    others = [str(value) for value in params.values() if isinstance(value, str)]
    if getattr(config, "observe", ()):
        others.append(f"entries {', '.join(map(str, config.observe))} observed")
    return ", ".join([name, *others])


def processor() -> str:
    """The model of the CPU, where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def learning_curve(script, config, metrics) -> dict:
    """Interquartile mean over seeds and its 95 % interval, of up to 100 stretches of the training."""
    stretches = np.array_split(np.arange(config.num_updates), min(100, config.num_updates))
    returns = np.stack(
        [script.mean_return({k: v[:, s] for k, v in metrics.items() if k != "evaluation"}) for s in stretches], 1
    )
    ended = np.isfinite(returns).all(axis=0)  # in each seed
    curve = np.array(statistics.interval(returns[:, ended])) if ended.any() else np.zeros((3, 0))
    steps = [
        (int(s[-1]) + 1) * config.num_envs * config.num_steps + getattr(config, "warmup_timesteps", 0)
        for s in stretches
    ]
    low, high = curve[1:].round(4).tolist()
    return {"steps": np.array(steps)[ended].tolist(), "return": curve[0].round(4).tolist(), "low": low, "high": high}


def play_in_gymnasium(script, config, agents, episodes: int = 8, seed: int = SEED) -> np.ndarray:
    """Mean return of each agent's greedy episodes in Gymnasium's own environment of that name: [num_seeds].

    `agents` has leaves [num_seeds, ...], of a script whose policy has no memory.
    """
    num_seeds = len(jax.tree.leaves(agents)[0])
    start, act = script.make_policy(config)
    choose = jax.jit(jax.vmap(lambda agent, obs: act(agent, start(), obs)[0]))
    agents = jax.tree.map(lambda leaf: np.repeat(leaf, episodes, axis=0), agents)
    envs = gymnasium.make_vec(config.env_name, num_envs=num_seeds * episodes, vectorization_mode="sync")
    space = envs.single_action_space
    obs, _ = envs.reset(seed=seed)
    returns, going = np.zeros(num_seeds * episodes), np.full(num_seeds * episodes, True)
    while going.any():
        action = np.asarray(choose(agents, obs))
        if isinstance(space, gymnasium.spaces.Box):  # policies act in [-1, 1]
            action = space.low + (action + 1) / 2 * (space.high - space.low)
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += np.where(going, reward, 0)
        going &= ~(terminated | truncated)
    envs.close()
    return returns.reshape(num_seeds, episodes).mean(axis=1)


def plan(row: str) -> dict:
    """What an H100 would take, from onejit plan, which needs the packages of requirements-gpu.txt."""
    words = [row.partition("/")[0], "--config", f"configs/{row}.yaml", *LONGER.get(row, []), "--num-seeds"]
    words = ["plan", *words, str(PLANNED[row]), "--gpu", "h100", "--no-most-seeds"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        more = ["--json", str(file)]
        subprocess.run([sys.executable, "-m", "onejit", *words, *more], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(file.read_text())
    kept = {name: found["loops"][0][name] for name in ("kernels", "bytes", "seconds")}
    return {"command": "onejit " + " ".join(words), "memory": found["memory"]["needed"], **kept}


# --- the page ---


def values_of(found: dict, kind: str) -> np.ndarray:
    """The return of each seed, -inf for one that diverged or ended no episode, which is stored as null: [num_seeds]."""
    values = np.array(found[kind], dtype=float)
    return np.where(np.isfinite(values), values, -np.inf)


def mean_of(values) -> list:
    """The mean over the seeds that have a return, and its 95 % interval."""
    finite = values[np.isfinite(values)]
    return statistics.mean_interval(finite) if len(finite) else [-np.inf, np.nan, np.nan]


def threshold_of(found: dict):
    """The return below which an agent has failed, or None."""
    environment = found["environment"]
    return THRESHOLDS.get(environment, THRESHOLDS.get(environment.partition(",")[0], (None,)))[0]


def count_failed(found: dict):
    """How many seeds reach the threshold neither with their final nor with their greedy return; None without one.

    A seed that diverged or ended no episode has failed.
    """
    threshold = threshold_of(found)
    if threshold is None:
        return None
    final, greedy = (values_of(found, kind) for kind in ("final_return", "greedy_return"))
    return int((~np.isfinite(final) | (np.maximum(final, greedy) < threshold)).sum())


def number(steps) -> str:
    return f"{steps:.2g}".replace("e+0", "e")


def public(found: dict):
    """`(return, steps, whose)` of the best public figure for a row's script and environment, or None."""
    environment = found["environment"].partition(",")[0]
    scripts = [each[1:] for each in PUBLIC.get(environment, []) if found["script"] in each[0]]
    return scripts[0] if scripts else None


def falls_short(found: dict) -> bool:
    """Whether the intervals of the means of both returns end below what is public at no more steps."""
    reference = public(found)
    if reference is None or reference[1] > found["total_timesteps"] * 1.1:
        return False
    highs = [np.nanmax(mean_of(values_of(found, kind))) for kind in ("final_return", "greedy_return")]
    return max(highs) < reference[0]


def table(rows: list[dict]) -> list[str]:
    head = ["row", "steps", "seeds", "failed", "final return", "IQM", "worst", "greedy return", "greedy IQM"]
    head += ["in Gymnasium", "public", "minutes"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for found in rows:
        name, _, config = found["row"].partition("/")
        final, greedy = (values_of(found, kind) for kind in ("final_return", "greedy_return"))
        reference, failed, lost = public(found), count_failed(found), int((~np.isfinite(final)).sum())
        cells = [
            f"[{found['row']}](../configs/{name}/{config}.yaml)" + (" **below**" if falls_short(found) else ""),
            number(found["total_timesteps"]),
            f"{len(final)}" + (f", {lost} without a return" if lost else ""),
            "" if failed is None else str(failed),
            statistics.show(*mean_of(final)),
            f"{statistics.interquartile_mean(final):.4g}",
            f"{final.min():.4g}",
            statistics.show(*mean_of(greedy)),
            f"{statistics.interquartile_mean(greedy):.4g}",
            statistics.show(*mean_of(values_of(found, "gymnasium_return"))) if "gymnasium_return" in found else "",
            f"{reference[0]:g} at {number(reference[1])}, {reference[2]}" if reference else "",
            f"{found['seconds'] / 60:.1f} ({found['processor_seconds'] / 60:.1f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(rows: list[dict], path: Path) -> None:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for found in rows:
        curve = found["curve"]
        axes.plot(curve["steps"], curve["return"], label=found["row"])
        axes.fill_between(curve["steps"], curve["low"], curve["high"], alpha=0.2)
    axes.set(title=rows[0]["environment"], xlabel="environment steps of an agent", ylabel="return")
    axes.set_xscale("log" if len({found["total_timesteps"] for found in rows}) > 1 else "linear")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


INTRO = """# Results

This page shows what each script reaches. Each row is a config in `configs/SCRIPT/`, trained by `onejit train` with
seed 100. The configs were tuned with other seeds. `python benchmarks/returns.py SCRIPT/NAME` measures a row again and
writes this page. The page and its figures come from the files in `benchmarks/results/`, which hold the command, the
commit, the versions and the returns of every seed.

- **Final return**: the mean return of the exploring policy over the episodes that ended in the last 10 % of training.
  The table shows the mean over all seeds with its 95 % interval by Student's t. Returns are not normally distributed,
  so an interval may reach beyond the best possible return.
- **IQM**: the interquartile mean over seeds. It ignores the worst and the best quarter of the agents. Read it together
  with the mean and the worst agent.
- **Worst**: the final return of the worst agent.
- **Failed**: the number of agents whose final return and greedy return both lie below a
  [fixed threshold](#thresholds). Agents that diverged or ended no episode count as failed. The cell is empty where no
  threshold is agreed on.
- **Greedy return**: the mean return of 16 greedy episodes after training. All agents play the same 16 episodes, so the
  interval does not include the luck of the start states or, in UmbrellaChain, of the 19 random rewards of 1 or -1.
- **In Gymnasium**: the mean greedy return of the same agents in Gymnasium's own environment of that name, 8 episodes
  per agent.
- **Public**: the best published figure for the same family of algorithms, or for PPO where none was found, with the
  number of steps that its source gives. Sources differ in the number of seeds and in what they measure. A row is marked
  **below** if the intervals of both means lie under a published figure that used no more steps.
- **Minutes**: the time from the start of the command to its end on a machine that was also doing other work, and in
  brackets the processor time of all cores.

The figures show the IQM over seeds with its 95 % bootstrap interval.

If a seed diverged or ended no episode in the last 10 % of training, the column *seeds* says so. Such a seed counts as
-inf in the IQM and as the worst agent. The mean is over the other seeds.
"""


THRESHOLDS_INTRO = """An agent counts as failed if its final return and its greedy return both lie below the threshold
of its environment. One of them is enough, because a policy that explores may score low although it has learned the
task, and because 16 greedy episodes may be unlucky. The thresholds are fixed numbers and do not depend on the results
here."""

PLANS = """These rows need a GPU. The table shows what one H100 would take, which [onejit plan](plan.md) computes from
the program that XLA compiles for it. The returns are not known yet. `python benchmarks/returns.py --plan` makes the
table again."""


def by_environment(found: list[dict]) -> dict:
    """`{environment: rows}`, in the order of ROWS."""
    grouped = {}
    for row in sorted(found, key=lambda each: list(ROWS).index(each["row"])):
        grouped.setdefault(row["environment"], []).append(row)
    return grouped


def figure_name(environment: str) -> str:
    return "results_" + "".join(letter if letter.isalnum() else "_" for letter in environment.lower()) + ".png"


def page(found: list[dict], plans: dict) -> str:
    """docs/results.md from what was measured and planned."""
    parts = [INTRO]
    for environment, rows in by_environment(found).items():
        parts += [f"## {environment}", "\n".join(table(rows))]
        parts += [f"{row['row']}: {WHY[row['row']]}" for row in rows if row["row"] in WHY]
        parts.append(f"![return over steps on {environment}](figures/{figure_name(environment)})")
    machines = {f"{each['processor']}, {each['device']}: {versions(each)}" for each in found}
    parts += ["## Thresholds", thresholds(found)]
    parts += ["## Machines and versions", "\n".join(f"- {machine}" for machine in sorted(machines))]
    if plans:
        parts += planned(plans)
    if missing := [row for row in ROWS if row not in {each["row"] for each in found}]:
        listed = ", ".join(f"[{row}](../configs/{row}.yaml)" for row in missing)
        parts += ["## Not measured by this command yet", f"The comment in the config says what is known. {listed}."]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def thresholds(found: list[dict]) -> str:
    """Below which return an agent counts as failed, for the environments that were measured."""
    lines = ["| environment | threshold | where it comes from |", "|---|---|---|"]
    measured = {each["environment"] for each in found}
    for environment, (threshold, source) in THRESHOLDS.items():
        if any(each == environment or each.partition(",")[0] == environment for each in measured):
            lines.append(f"| {environment} | {threshold:g} | {source} |")
    without = "; ".join(sorted({each["environment"] for each in found if threshold_of(each) is None}))
    said = f"No threshold is agreed on for these environments: {without}." if without else ""
    return "\n\n".join(filter(None, [THRESHOLDS_INTRO, "\n".join(lines), said]))


def planned(plans: dict) -> list[str]:
    """The section of what is sized for a GPU. `plans` {row: what `plan` gave}."""
    lines = ["| row | seeds | memory, GiB | kernels | bytes, TB | minutes at least |", "|---|---|---|---|---|---|"]
    for row, each in plans.items():
        numbers = f"{each['memory'] / 2**30:.2g} | {each['kernels'] / 1e6:.3g} M | {each['bytes'] / 1e12:,.0f}"
        link = f"[{row}](../configs/{row}.yaml){', 1e7 steps' if row in LONGER else ''}"
        lines.append(f"| {link} | {PLANNED[row]} | {numbers} | {each['seconds'] / 60:.2g} |")
    return ["## Sized for a GPU: planned, not measured", PLANS, "\n".join(lines)]


def versions(found: dict) -> str:
    return ", ".join(f"{name} {found['versions'][name]}" for name in ("jax", "gymnax", "brax"))


def read_measured() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*_*.json"))]


def read_plans() -> dict:
    return json.loads(PLANS_FILE.read_text()) if PLANS_FILE.exists() else {}


def render() -> None:
    """Write docs/results.md and its figures."""
    found = read_measured()
    for environment, rows in by_environment(found).items():
        draw(rows, FIGURES / figure_name(environment))
    PAGE.write_text(page(found, read_plans()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help="SCRIPT/CONFIG; those not measured yet where none is given"
    )
    parser.add_argument("--num-seeds", type=int, help="by default 32, 16 or 8, the more the cheaper a row is")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--plan", action="store_true", help="the rows for a GPU: plan those that are not planned yet")
    options = parser.parse_args()
    files = {row: MEASURED / f"{row.replace('/', '_')}.json" for row in ROWS}
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"{unknown[0]}: is not a row{command_line.nearest(unknown[0], ROWS)}")
    for row in PLANNED if options.plan else ():
        plans = read_plans()
        if row not in plans:
            plans[row] = plan(row)
            runs.write(PLANS_FILE, json.dumps(plans, indent=1) + "\n")
    for row in (
        [] if options.render or options.plan else options.rows or [row for row in ROWS if not files[row].exists()]
    ):
        found = measure(row, options.num_seeds or ROWS[row], options.seed)
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        runs.write(files[row], f"{{\n{lines}\n}}\n")
        final, greedy = (values_of(found, kind) for kind in ("final_return", "greedy_return"))
        said = f"final return {statistics.show(*mean_of(final))}, worst agent {final.min():.4g}"
        print(f"{row}: {said}, greedy return {statistics.show(*mean_of(greedy))}", flush=True)
    render()


if __name__ == "__main__":
    main()
