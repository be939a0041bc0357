"""Population-based training with any script of onejit, in one compiled program.

    pip install -c constraints.txt -e .
    python examples/population.py ppo --samples 16 --lr log-uniform 1e-5 1e-1
    python examples/population.py ppo --config configs/ppo/cartpole_fast.yaml --samples 32 \\
        --num-seeds 5 --lr log-uniform 1e-5 1e-1 --gamma one-minus-log-uniform 0.9 0.999

Jaderberg et al. 2017 (arXiv 1711.09846), with truncation selection. `--samples` agents train
together, each with floats of its own. Every `--interval` updates, each agent of the worst quarter
copies a random agent of the best quarter: its runner state, without the random keys, and its
floats. A copied float is multiplied by 0.8 or 1.25 and clipped to its range. For a field with
`one-minus-log-uniform`, such as gamma, the factor applies to 1 - gamma. `--num-seeds` is the number
of independent populations.

This file relies only on what a script promises (CONTRIBUTING.md): copy it and change it.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from onejit.base import statistics
from onejit.base.files import write
from onejit.base.text import align
from onejit.engine.evaluation import make_player
from onejit.engine.loop import holds, running_episodes
from onejit.envs.host.batch import HostState
from onejit.run.directory import new_run_dir
from onejit.run.write import save_results
from onejit.script.command_line import parse_with, take_script
from onejit.script.configs import write_config
from onejit.script.load import load_script, source_of
from onejit.script.steps import timesteps_until
from onejit.sweep.swept import DISTRIBUTIONS, from_uniform, read_distribution

EPISODES = 16  # greedy episodes of each agent at the end, by which no agent is chosen


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of population-based training."""

    samples: int = 16  # number of agents of a population
    num_seeds: int = 1  # number of independent populations
    # updates between exchanges, a divisor of their number; 0 for about 20 exchanges
    interval: int = 0
    seed: int = 0  # seed of the random key
    run_dir: Path | None = None  # new directory for the results


class Population(NamedTuple):
    """A population while it trains. All arrays are [agents, ...]."""

    runner_state: NamedTuple
    floats: dict  # {field: [agents]}
    returns: jax.Array  # mean return since the last exchange


# --- the command line ---


def read_words(words: list[str]):
    """`(script, config, options, {field: distribution})`. Raises ValueError."""
    name, flags = take_script(words)
    script = load_script(name)
    ranges = {}
    others = {}
    for name, values in flags.items():
        if values and values[0] in DISTRIBUTIONS:
            ranges[name] = read_distribution(script, name, values)
        else:
            others[name] = values
    config, options, _ = parse_with(script, others, Options, __doc__, prog="population.py")
    if not ranges:
        raise ValueError("give a field a range, as in --lr log-uniform 1e-5 1e-1")
    if options.samples < 4:
        raise ValueError(f"samples = {options.samples}: a quarter of the agents needs at least 4")
    if options.interval == 0:
        interval = max(1, config.num_updates // 20)
        while config.num_updates % interval:
            interval -= 1
        options = dataclasses.replace(options, interval=interval)
    if config.num_updates % options.interval or config.num_updates == options.interval:
        updates = f"{config.num_updates} updates"
        raise ValueError(f"interval = {options.interval}: must divide the {updates} and leave two")
    init, _ = script.make_learner(config)
    if holds(jax.eval_shape(init, jax.random.key(0)), HostState):
        raise ValueError(f"env_name = {config.env_name}: an environment outside of JAX has no copy")
    return script, config, options, ranges


# --- the exchange ---


def mean_returns(population: Population, metrics: dict):
    """The mean return [agents] of the episodes of a stretch; -inf for agents that diverged.

    `metrics` are [interval, agents]. An agent without an episode keeps its return.
    """
    episodes = metrics["episodes"]
    totals = jnp.where(episodes > 0, episodes * metrics["episodic_return"], 0.0)
    running_total, num_running = running_episodes(population.runner_state)
    number = episodes.sum(axis=0) + num_running
    means = (totals.sum(axis=0) + running_total) / jnp.maximum(number, 1)
    returns = jnp.where(number > 0, means, population.returns)
    for leaf in jax.tree.leaves(population.runner_state.agent):
        is_finite = jnp.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
        returns = jnp.where(is_finite, returns, -jnp.inf)
    return jnp.where(jnp.isnan(returns), -jnp.inf, returns)


def choose_parents(key, returns):
    """The agent [agents] that each agent copies; most of them copy themselves."""
    order = jnp.argsort(-returns)  # best first
    quarter = len(returns) // 4
    best = order[:quarter]
    worst = order[-quarter:]
    parents = jax.random.choice(key, best, (quarter,))
    return jnp.arange(len(returns)).at[worst].set(parents)


def copy_agents(runner_state, parents):
    """Agents keep their random keys, or copies would explore alike."""

    def copied(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return leaf[parents]

    return jax.tree.map(copied, runner_state)


def perturb(key, values, kind: str, low: float, high: float):
    """Multiply values by 0.8 or 1.25 on the scale of their distribution."""
    factor = jax.random.choice(key, jnp.array([0.8, 1.25]), values.shape)
    is_mirrored = kind == "one-minus-log-uniform"
    changed = 1.0 - (1.0 - values) * factor if is_mirrored else values * factor
    return jnp.clip(changed, low, high)


def exchange(ranges: dict, key, population: Population, is_last):
    """`(population, parents)` after an exchange. After the last stretch there is none."""
    parent_key, float_key = jax.random.split(key)
    num_agents = len(population.returns)
    unchanged = jnp.arange(num_agents)
    parents = jnp.where(is_last, unchanged, choose_parents(parent_key, population.returns))
    has_copied = parents != unchanged

    floats = {}
    for index, (name, values) in enumerate(population.floats.items()):
        copied = values[parents]
        changed = perturb(jax.random.fold_in(float_key, index), copied, *ranges[name])
        floats[name] = jnp.where(has_copied, changed, copied)

    runner_state = copy_agents(population.runner_state, parents)
    return Population(runner_state, floats, population.returns[parents]), parents


# --- training ---


def make_train(script, config, options: Options, ranges: dict):
    """`train(rng) -> (population, metrics, history)` of one population.

    `metrics` are [updates, agents], and `history` has the floats, returns and parents of each
    stretch between exchanges: [stretches, agents].
    """
    num_stretches = config.num_updates // options.interval

    def init_agent(floats, key):
        init, _ = script.make_learner(dataclasses.replace(config, **floats))
        return init(key)

    def update_agent(floats, runner_state):
        _, update = script.make_learner(dataclasses.replace(config, **floats))
        return update(runner_state)

    def train_stretch(population: Population, inputs):
        key, is_last = inputs

        def update_agents(runner_state, _):
            return jax.vmap(update_agent)(population.floats, runner_state)

        runner_state, metrics = jax.lax.scan(
            update_agents, population.runner_state, length=options.interval
        )
        trained = population._replace(runner_state=runner_state)
        trained = trained._replace(returns=mean_returns(trained, metrics))
        after, parents = exchange(ranges, key, trained, is_last)
        history = {"floats": trained.floats, "returns": trained.returns, "parents": parents}
        return after, (metrics, history)

    def train(rng):
        float_key, agent_key, exchange_key = jax.random.split(rng, 3)
        floats = {}
        for index, (name, distribution) in enumerate(ranges.items()):
            key = jax.random.fold_in(float_key, index)
            floats[name] = from_uniform(*distribution, jax.random.uniform(key, (options.samples,)))
        keys = jax.random.split(agent_key, options.samples)
        runner_state = jax.vmap(init_agent)(floats, keys)
        population = Population(runner_state, floats, jnp.full(options.samples, -jnp.inf))

        stretch_keys = jax.random.split(exchange_key, num_stretches)
        is_last = jnp.arange(num_stretches) == num_stretches - 1
        population, (metrics, history) = jax.lax.scan(
            train_stretch, population, (stretch_keys, is_last)
        )
        by_update = {name: v.reshape(-1, options.samples) for name, v in metrics.items()}
        return population, by_update, history

    return train


def play(script, config, agents, seed: int) -> np.ndarray:
    """The mean greedy return of each agent [agents], in episodes that chose none of them."""
    num_agents = len(jax.tree.leaves(agents)[0])
    key = jax.random.fold_in(jax.random.key(seed), 2**31)
    keys = jax.random.split(key, (num_agents, EPISODES))
    returns, _ = jax.jit(make_player(script, config))(agents, keys)
    return np.where(statistics.diverged(agents), -np.inf, np.asarray(returns).mean(axis=1))


# --- results ---


def make_table(floats: dict, returns: np.ndarray, greedy: np.ndarray) -> str:
    """A row for each agent, the best one of each population first. Arrays are [populations, N]."""
    rows = [["population", "agent", *floats, "return", "greedy return"]]
    for population, of_population in enumerate(returns):
        for agent in np.argsort(-of_population):
            at = (population, agent)
            values = [f"{values[at]:.4g}" for values in floats.values()]
            rows.append([*map(str, at), *values, f"{returns[at]:.4g}", f"{greedy[at]:.4g}"])
    return align(rows)


def draw(config, options: Options, ranges: dict, history: dict, path: Path) -> None:
    """The floats of the first population over time, coloured by the return of the stretch."""
    returns = history["returns"][0]  # [stretches, agents]
    ends = [timesteps_until(config, options.interval * (i + 1)) for i in range(len(returns))]
    figure = Figure(figsize=(7, 1 + 2.5 * len(ranges)), layout="constrained")
    panels = figure.subplots(len(ranges), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, (kind, *_)) in zip(panels, ranges.items(), strict=True):
        values = history["floats"][name][0]
        is_mirrored = kind == "one-minus-log-uniform"
        shown = axes.scatter(
            np.repeat(ends, returns.shape[1]),
            (1.0 - values if is_mirrored else values).reshape(-1),
            c=np.where(np.isfinite(returns), returns, np.nan).reshape(-1),
            cmap=matplotlib.colormaps["viridis_r"],
            s=12,
        )
        axes.set_yscale("linear" if kind == "uniform" else "log")
        axes.set_ylabel(f"1 - {name}" if is_mirrored else name)
    panels[-1].set_xlabel("environment steps per agent")
    figure.colorbar(shown, ax=list(panels), label="return since the last exchange")
    figure.savefig(path, dpi=150)


def write_results(script, config, options, ranges, trained, run_dir: Path) -> None:
    """Write the agents and their metrics as a run, the table, the picture and best.yaml."""
    population, metrics, history = jax.tree.map(np.asarray, trained)
    by_agent = {name: np.concatenate(v.swapaxes(1, 2)) for name, v in metrics.items()}
    agents = jax.tree.map(np.concatenate, population.agent)  # [populations * N, ...]
    greedy = play(script, config, agents, options.seed).reshape(options.num_seeds, -1)

    run_dir.mkdir(parents=True)
    save_results(script, config, options.seed, agents, by_agent, run_dir)
    (run_dir / Path(script.__file__).name).write_bytes(source_of(script))
    floats = {name: values[:, -1] for name, values in history["floats"].items()}
    table = make_table(floats, history["returns"][:, -1], greedy)
    write(run_dir / "table.txt", table + "\n")
    draw(config, options, ranges, history, run_dir / "population.png")
    best = np.unravel_index(history["returns"][:, -1].argmax(), greedy.shape)
    best_floats = {name: float(values[best]) for name, values in floats.items()}
    write_config(run_dir / "best.yaml", dataclasses.replace(config, **best_floats))

    print(table)
    mean, low, high = statistics.student_interval(greedy.mean(axis=1))
    print(f"evaluation return of all agents: mean {statistics.show(mean, low, high)}", end=", ")
    print(f"worst {greedy.min():.4g}; results in {run_dir}")


class Trained(NamedTuple):
    """What is kept of populations; random keys, which NumPy cannot hold, are left out."""

    agent: dict


def main(words: list[str]) -> Path:
    try:
        script, config, options, ranges = read_words(words)
    except ValueError as error:
        print(f"population.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    run_dir = options.run_dir or new_run_dir(script, config, prefix="population-")
    train = jax.vmap(make_train(script, config, options, ranges))
    keys = jax.random.split(jax.random.key(options.seed), options.num_seeds)
    population, metrics, history = jax.jit(train)(keys)
    kept = Trained(population.runner_state.agent)
    write_results(script, config, options, ranges, (kept, metrics, history), run_dir)
    return run_dir


if __name__ == "__main__":
    main(sys.argv[1:])
