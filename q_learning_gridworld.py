# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.12.8", "gymnax>=1.0.1", "jax>=0.10.2,<0.12", "matplotlib>=3.10", "numpy>=2.0",
#     "pyyaml>=6.0", "safetensors>=0.8", "tqdm>=4.67", "tyro>=1.0.17",
#     "six>=1.17",  # for gymnax, which does not ask for it
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""Tabular Q-learning on a GridWorld, environment included, the whole training in one jit.

Watkins 1989, "Learning from Delayed Rewards"; Watkins & Dayan 1992, "Q-learning"; equation 6.8 of
Sutton & Barto 2018, "Reinforcement Learning", second edition.

The behaviour is epsilon-greedy, and actions of equal value are chosen with equal probability. A
time limit is not a termination: the value of the state after the last step is bootstrapped.

    python q_learning_gridworld.py --num-seeds 30

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import io
import math
import os
import platform
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

# Before JAX is imported: each core of this process is a device, and compiled programs are kept.
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(cores))
cache = os.path.expanduser(f"~/.cache/onejit/jax-{platform.node()}")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"  # not the one of a notebook that starts this script

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import tyro
import yaml
from flax.struct import dataclass as pytree
from gymnax.environments import environment, spaces
from gymnax.wrappers import LogWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save
from tqdm import tqdm

# --- config as a pytree (shared) ---


def register_config(cls):
    """Make a frozen dataclass a pytree whose leaves are its float fields; all others are static."""
    hints = get_type_hints(cls)
    floats = [name for name in hints if hints[name] is float]
    others = [name for name in hints if hints[name] is not float]
    return jax.tree_util.register_dataclass(cls, data_fields=floats, meta_fields=others)


# --- hyperparameters ---


@register_config
@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters and the grid. Cells are written ROW COLUMN, and 0 0 is top left.

    The defaults take a few seconds on two CPU cores. Float fields may be traced, so Python never
    branches on them.
    """

    env_name: Literal["GridWorld"] = "GridWorld"  # the environment; there is no other
    height: int = 8  # rows of the grid
    width: int = 12  # columns of the grid
    start: tuple[int, int] = (7, 11)  # cell in which episodes start, and to which the cliff leads
    random_starts: bool = False  # start episodes in any free cell that the goal can be reached from
    goal: tuple[int, int] = (0, 0)  # goal cell; reaching it ends the episode
    walls: tuple[tuple[int, int], ...] = ()  # cells that cannot be entered
    cliff: tuple[tuple[int, int], ...] = ()  # cells that put the agent back to the start
    cliff_terminates: bool = False  # the cliff ends the episode instead
    step_reward: float = 0.0  # reward of all other steps, also of steps against a wall or border
    goal_reward: float = 1.0  # reward of the step to the goal
    cliff_reward: float = -100.0  # reward of the step onto the cliff
    max_steps_in_episode: int = 1000  # time limit of an episode
    total_timesteps: int = 300_000  # environment steps per agent
    num_steps: int = 1000  # steps per row of the metrics; Q is learned in every step
    lr: float = 0.1  # step size alpha
    gamma: float = 0.9  # discount factor
    epsilon: float = 0.1  # probability of a random action
    q_init: float = 0.0  # initial value of every Q(s, a)

    def __post_init__(self):
        object.__setattr__(self, "total_timesteps", int(self.total_timesteps))  # 2e4 is a float

    @property
    def num_envs(self) -> int:
        return 1

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // self.num_steps


MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])  # up, right, down, left, as (row, column)
NUM_ACTIONS = len(MOVES)


# --- mathematics: arrays in, arrays out ---


def epsilon_greedy(values, epsilon, uniform):
    """A random action with probability `epsilon`, else one of the best. [actions] -> action.

    The first action whose cumulative probability exceeds `uniform`, a number in [0, 1).
    """
    greedy = values == values.max()
    probabilities = epsilon / NUM_ACTIONS + (1.0 - epsilon) * greedy / greedy.sum()
    cumulative = jnp.cumsum(probabilities)[:-1]  # without the last sum, which is 1
    return (cumulative <= uniform).sum()


def pick(values, action):
    """`values[action]`, as a sum: to look it up, CPUs would copy all of Q in each step.

    One agent trains 40 times as fast with this sum, and random numbers drawn before the loop.
    """
    return values.sum(where=jnp.arange(NUM_ACTIONS) == action)


def td_error(value, reward, terminated, next_values, gamma):
    """The temporal-difference error (Sutton & Barto, equation 6.8). `next_values` are Q(s', .)."""
    return reward + gamma * jnp.where(terminated, 0.0, next_values.max()) - value


# --- training ---


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    q: jax.Array  # [cells, actions]
    obs: jax.Array  # the cell
    env_state: Any
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {"q": self.q}


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update adds {config.num_steps} steps"
        )
    if config.max_steps_in_episode < 1:
        raise ValueError(
            f"max_steps_in_episode = {config.max_steps_in_episode}: must be at least 1"
        )
    env, env_params = make_env(config)

    def init(rng):
        env_key, key = jax.random.split(rng)
        obs, env_state = env.reset(env_key, env_params)
        shape = (config.height * config.width, NUM_ACTIONS)
        q = jnp.full(shape, config.q_init, jnp.float32)
        return RunnerState(q=q, obs=obs, env_state=env_state, key=key)

    def step(state, draws):
        """Act, and learn from what followed."""
        uniform, env_key = draws
        obs = state.obs
        action = epsilon_greedy(state.q[obs], config.epsilon, uniform)
        value = pick(state.q[obs], action)
        obs_after_reset, env_state, reward, terminated, _, info = env.step(
            env_key, state.env_state, action, env_params
        )
        next_values = state.q[info["final_observation"]]
        delta = td_error(value, reward, terminated, next_values, config.gamma)
        q = state.q.at[obs, action].add(config.lr * delta)
        state = state._replace(q=q, obs=obs_after_reset, env_state=env_state)
        return state, (value, delta, info)

    def update(state, _=None):
        key, action_key, env_key = jax.random.split(state.key, 3)
        uniforms = jax.random.uniform(action_key, (config.num_steps,))
        env_keys = jax.random.split(env_key, config.num_steps)
        state = state._replace(key=key)
        state, (values, deltas, info) = jax.lax.scan(step, state, (uniforms, env_keys))
        metrics = {"td_loss": jnp.square(deltas).mean(), "q_value": values.mean()}
        return state, metrics | episode_metrics(info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`act(agent, obs) -> action`, the greedy policy."""

    def act(agent, obs):
        return agent["q"][obs].argmax(axis=-1)  # the first of equals

    return act


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """A heat map of max Q of the first agent, with arrows for greedy actions in free cells."""
    env, _ = make_env(config)
    q = np.asarray(runner_state.q[0])  # of [seeds, cells, 4]
    values = np.where(env.can_start, q.max(axis=1), np.nan)
    rows, columns = np.divmod(np.flatnonzero(env.can_start), config.width)
    down, right = MOVES[q[env.can_start].argmax(axis=1)].T

    axes = Figure(layout="constrained").subplots()
    image = axes.imshow(values.reshape(config.height, config.width), cmap="cool")
    axes.quiver(columns, rows, right, -down, pivot="mid")
    axes.plot(env.goal % config.width, env.goal // config.width, "*", markersize=20)
    axes.set(title="agent 0: max Q and greedy actions", xlabel="column", ylabel="row")
    axes.figure.colorbar(image, shrink=0.7)
    axes.figure.savefig(run_dir / "q_values.png", dpi=150)


# --- environment ---


@pytree
class GridState(environment.EnvState):
    cell: jax.Array  # row * width + column; `time` counts the steps of the episode


class GridWorld(environment.Environment):
    """Cells, walls, a cliff and a goal; the observation is the cell.

    A move against a wall or the border leaves the agent where it is. The goal ends the episode. The
    cliff puts the agent back to the start or, with `cliff_terminates`, ends the episode. Rewards,
    which may be traced, and the time limit are read from `params`, which is the config.
    """

    def __init__(self, config: Config):
        self.height = config.height
        self.width = config.width
        self.cliff_terminates = config.cliff_terminates
        (self.start,) = self.cells("start", [config.start])
        (self.goal,) = self.cells("goal", [config.goal])
        all_cells = np.arange(self.height * self.width)
        self.walls = np.isin(all_cells, self.cells("walls", config.walls))
        self.cliff = np.isin(all_cells, self.cells("cliff", config.cliff))

        # Where each action leads from each cell, [cells, actions]: the border and walls stop it.
        rows = all_cells[:, None] // self.width + MOVES[:, 0]
        columns = all_cells[:, None] % self.width + MOVES[:, 1]
        rows = np.clip(rows, 0, self.height - 1)
        columns = np.clip(columns, 0, self.width - 1)
        next_cell = rows * self.width + columns
        self.next_cell = np.where(self.walls[next_cell], all_cells[:, None], next_cell)

        reaches_goal = all_cells == self.goal
        for _ in all_cells:  # a path has fewer steps than there are cells
            reaches_goal |= reaches_goal[self.next_cell].any(axis=1) & ~self.cliff
        self.can_start = reaches_goal & ~self.walls & (all_cells != self.goal)
        if not self.can_start.any():
            raise ValueError(f"goal = {config.goal}: can be reached from no free cell")

        cliff_leads_to_start = self.cliff.any() and not config.cliff_terminates
        if not self.can_start[self.start] and (cliff_leads_to_start or not config.random_starts):
            raise ValueError(
                f"start = {config.start}: must be a free cell that goal = {config.goal} "
                "can be reached from"
            )
        self.starts = np.array([self.start])
        if config.random_starts:
            self.starts = np.flatnonzero(self.can_start)

    def cells(self, name: str, places) -> list[int]:
        """The numbers of cells that are given as (row, column)."""
        for row, column in places:
            if not (0 <= row < self.height and 0 <= column < self.width):
                raise ValueError(
                    f"{name} = {row} {column}: must be in the grid of "
                    f"{self.height} x {self.width} cells"
                )
        return [row * self.width + column for row, column in places]

    def reset_env(self, key, params):
        index = jax.random.randint(key, (), 0, len(self.starts))
        cell = jnp.asarray(self.starts, jnp.int32)[index]
        return cell, GridState(time=jnp.int32(0), cell=cell)

    def step_env(self, key, state, action, params):
        cell = jnp.asarray(self.next_cell, jnp.int32)[state.cell, action]
        at_goal = cell == self.goal
        on_cliff = jnp.asarray(self.cliff)[cell]
        reward = jnp.where(on_cliff, params.cliff_reward, params.step_reward)
        reward = jnp.where(at_goal, params.goal_reward, reward).astype(jnp.float32)
        if self.cliff_terminates:
            terminated = at_goal | on_cliff
        else:
            terminated = at_goal
            cell = jnp.where(on_cliff & ~at_goal, self.start, cell)
        return cell, GridState(time=state.time + 1, cell=cell), reward, terminated, {}

    def observation_space(self, params):
        return spaces.Discrete(self.height * self.width)

    def action_space(self, params):
        return spaces.Discrete(NUM_ACTIONS)


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did."""
    ended = info["returned_episode"]  # [num_steps]
    return {
        "episodic_return": info["returned_episode_returns"].mean(where=ended),
        "episodic_length": info["returned_episode_lengths"].mean(where=ended),
        "episodes": ended.sum(),
    }


def make_env(config: Config):
    """`(env, env_params)`: gymnax's interface; rewards and time limit come from the config."""
    return LogWrapper(GridWorld(config)), config


# --- main (shared) ---


def mean_return(metrics) -> np.ndarray:
    """Mean return of the episodes that ended, NaN where none did. [seeds, updates] -> [seeds]."""
    episodes = metrics["episodes"]
    total = np.where(episodes > 0, episodes * metrics["episodic_return"], 0.0).sum(axis=1)
    count = episodes.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def final_return(agent, metrics, num_updates: int) -> np.ndarray:
    """Mean return of the episodes in the last updates. [seeds], NaN if diverged or without any.

    The last updates are a tenth of `num_updates`, the number that was planned. If no episode ended
    in them, the last update in which one ended counts alone.
    """
    episodes = metrics["episodes"]
    index = np.arange(episodes.shape[1])
    last = np.where(episodes > 0, index, 0).max(axis=1, keepdims=True)
    first = len(index) - math.ceil(num_updates / 10)
    counted = index >= np.minimum(last, first)
    final = mean_return(metrics | {"episodes": counted * episodes})
    for x in jax.tree.leaves(agent):  # a diverged agent may still act, and earn a return
        final[np.isnan(x).any(axis=tuple(range(1, x.ndim)))] = np.nan
    return final


def spread_over_devices(function, num_seeds: int):
    """`function(tree, count)` for all seeds, on as many devices as divide their number evenly.

    `tree` has leaves [seeds, ...]. Its memory is donated: do not use it afterwards.
    """
    num_devices = max(n for n in range(1, jax.device_count() + 1) if num_seeds % n == 0)
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("seed",))
    seeds = PartitionSpec("seed")

    @jax.shard_map(mesh=mesh, in_specs=(seeds, PartitionSpec()), out_specs=seeds, check_vma=False)
    def on_all_devices(tree, count):
        if num_seeds > num_devices:
            return jax.vmap(function, in_axes=(0, None))(tree, count)
        # One seed on each device: on CPUs `vmap` would copy a large state in each update.
        result = function(jax.tree.map(lambda x: x[0], tree), count)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    return jax.jit(on_all_devices, donate_argnums=0)


@contextlib.contextmanager
def catch_signals():
    """A list that Ctrl-C and SIGTERM are added to. A second signal ends the program at once."""
    caught = []
    handlers = {}

    def catch(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train_in_chunks(config: Config, learner, num_seeds: int, seed: int):
    """Train all seeds at once, in at most 200 chunks of updates.

    After each chunk it yields the runner state, leaves [seeds, ...], whose memory the next chunk
    uses again, and the metrics of the chunk, {name: [seeds, updates]}.
    """
    init, update = learner
    update = jax.jit(update)  # traced once
    length = math.ceil(config.num_updates / 200)

    def train_chunk(state, count):
        """`count` updates; the metrics are [length], so that one program does all chunks."""

        def body(i, carry):
            state, metrics = carry
            state, new = update(state)
            return state, jax.tree.map(lambda row, x: row.at[i].set(x), metrics, new)

        _, shapes = jax.eval_shape(update, state)
        if "episodes" not in shapes:
            raise ValueError("update: its metrics lack `episodes`, which `episode_metrics` returns")
        metrics = jax.tree.map(lambda x: jnp.zeros(length, x.dtype), shapes)
        return jax.lax.fori_loop(0, count, body, (state, metrics))

    keys = jax.random.split(jax.random.key(seed), num_seeds)
    state = spread_over_devices(lambda key, _: init(key), num_seeds)(keys, 0)
    train_chunk = spread_over_devices(train_chunk, num_seeds)
    for first in range(0, config.num_updates, length):
        count = min(length, config.num_updates - first)
        state, metrics = train_chunk(state, count)
        while not metrics["episodes"].is_ready():  # signals are handled between lines of Python
            time.sleep(0.001)
        yield state, {name: np.asarray(x)[:, :count] for name, x in metrics.items()}


def as_yaml(config: Config) -> str:
    """The text of config.yaml, in which numbers of NumPy and JAX are Python's."""
    settings = {}
    for name, value in vars(config).items():
        value = dict(value) if name == "env_params" else value  # not the FrozenDict
        settings[name] = jax.tree.map(lambda x: x.item() if hasattr(x, "item") else x, value)
    return yaml.safe_dump(settings, sort_keys=False)


def save_results(settings: str, seed: int, script: bytes, agent, metrics, run_dir: Path) -> None:
    """Write config, metrics, agents and the script."""
    (run_dir / "config.yaml").write_text(settings)
    try:
        np.savez_compressed(run_dir / "metrics.npz", **metrics)
    finally:  # the agents are saved even if the metrics cannot be
        about = {"run": yaml.safe_dump({"script": Path(__file__).stem, "seed": int(seed)})}
        tensors = {}
        for path, x in jax.tree_util.tree_leaves_with_path(agent):
            tensors[jax.tree_util.keystr(path, simple=True, separator=".")] = x
        (run_dir / "agent.safetensors").write_bytes(save(tensors, metadata=about))
    copy = run_dir / Path(__file__).name
    if not copy.exists():  # the results may lie next to the script itself
        copy.write_bytes(script)


def draw_learning_curve(config: Config, metrics, run_dir: Path) -> None:
    """The return in each hundredth of the training: all seeds, mean and two standard errors."""
    num_updates = metrics["episodes"].shape[1]
    chunks = np.array_split(np.arange(num_updates), min(100, num_updates))
    curve = [mean_return({name: x[:, chunk] for name, x in metrics.items()}) for chunk in chunks]
    curve = np.ma.masked_invalid(curve)  # [points, seeds]
    ended = curve.count(axis=1) > 0  # lines go on over points where no episode ended
    curve = curve[ended]
    mean = curve.mean(axis=1)
    error = curve.std(axis=1, ddof=1) / np.sqrt(curve.count(axis=1))
    steps = np.array([chunk[-1] + 1 for chunk in chunks]) * config.num_envs * config.num_steps
    steps = steps[ended] + getattr(config, "warmup_timesteps", 0)
    axes = Figure(layout="constrained").subplots()
    axes.plot(steps, curve, color="gray", linewidth=0.5, alpha=0.3, zorder=0)
    axes.fill_between(steps, mean - 2 * error, mean + 2 * error, color="C0", alpha=0.3)
    axes.plot(steps, mean, color="C0", linewidth=2)
    title = f"{config.env_name}, mean of {curve.shape[1]} seeds"
    axes.set(title=title, xlabel="environment steps", ylabel="episodic return")
    axes.figure.savefig(run_dir / "learning_curve.png", dpi=150)


def main(
    config: Config = Config(), num_seeds: int = 4, seed: int = 0, run_dir: Path | None = None
) -> None:
    """Train agents; write config, metrics, learning curve and networks into a new directory.

    Args:
        config: hyperparameters. `--config FILE.yaml` reads them from a file, and flags win
        num_seeds: agents to train, all at once, spread over the devices
        seed: seed of all random numbers
        run_dir: a new directory for the results; by default runs/SCRIPT/ENVIRONMENT-TIME-RANDOM
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed = {seed}: must be from 0 to 2^32 - 1, others repeat these")
    if num_seeds < 1:
        raise ValueError(f"num_seeds = {num_seeds}: must be at least 1")

    settings = as_yaml(config)
    script = Path(__file__).read_bytes()  # as it trains, also if it is edited meanwhile
    learner = make_learner(config)  # raises its errors before anything is written
    if run_dir is None:
        env_name = config.env_name.rpartition(":")[2]
        name = f"{env_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        run_dir = Path("runs", Path(__file__).stem, name)
    run_dir = Path(run_dir).expanduser()
    if (run_dir / "config.yaml").exists():
        raise FileExistsError(f"run_dir = {run_dir}: has the results of another run")
    run_dir.mkdir(parents=True, exist_ok=True)

    steps_per_update = config.num_envs * config.num_steps * num_seeds
    total = config.num_updates * steps_per_update
    is_terminal = sys.stderr.isatty()
    bar_file = sys.stderr if is_terminal else io.StringIO()
    printed = time.monotonic()
    chunks = []
    with (
        tqdm(total=total, unit="step", unit_scale=True, file=bar_file) as progress,
        catch_signals() as signals,
    ):
        for state, metrics in train_in_chunks(config, learner, num_seeds, seed):
            chunks.append(metrics)
            progress.update(metrics["episodes"].shape[1] * steps_per_update)
            if metrics["episodes"].any():
                progress.set_postfix(episodic_return=np.nanmean(mean_return(metrics)))
            if not (is_terminal or progress.disable) and time.monotonic() - printed > 60:
                print(progress, flush=True)
                printed = time.monotonic()
            if signals:
                break

    metrics = {name: np.concatenate([x[name] for x in chunks], axis=1) for name in chunks[0]}
    save_results(settings, seed, script, state.agent, metrics, run_dir)
    final = final_return(state.agent, metrics, config.num_updates)
    lost = np.isnan(final).sum()
    if lost < num_seeds:
        print(f"training return: mean {np.nanmean(final):.4g}, worst agent {np.nanmin(final):.4g}")
    if lost:
        print(f"{lost} of {num_seeds} seeds diverged, or ended no episode")
    num_updates = metrics["episodes"].shape[1]
    if num_updates < config.num_updates:
        print(f"stopped after {num_updates} of {config.num_updates} updates")

    matplotlib.rcdefaults()  # a user's style may need fonts or LaTeX that this machine lacks
    if report := globals().get("report"):  # a script may define figures of its own
        report(config, state, run_dir)
    draw_learning_curve(config, metrics, run_dir)
    print(f"learning curve: {run_dir / 'learning_curve.png'}")
    print(f"results in {run_dir}")


def read_flags(args: list[str]) -> list[str]:
    """The command line. All flags override what stands in `--config FILE.yaml`."""
    if "--config" in args:
        at = args.index("--config")
        flags = []
        for name, value in yaml.safe_load(Path(args[at + 1]).read_text()).items():
            if isinstance(value, dict):
                value = list(value.items())
            flags += [f"--{name}", *map(str, jax.tree.leaves(value))]
        args = flags + args[:at] + args[at + 2 :]

    def write_out(match):
        return f"{match[1]}{float(match[2]):.16g}"

    # 5e5 may stand for a whole number, also in --total-timesteps=5e5
    return [re.sub(r"(^|=)(\d+(\.\d+)?e\+?\d+)$", write_out, arg) for arg in args]


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # MODULE:NAME may be a file here, or next to this script
    sys.stdout.reconfigure(errors="replace")  # names of folders may have any letters
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
    tyro.cli(main, args=read_flags(sys.argv[1:]), config=markers, description=__doc__)
