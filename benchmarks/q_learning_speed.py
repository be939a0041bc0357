"""Speed of tabular Q-learning on the 8 x 12 GridWorld: the script, a straightforward port to JAX, and a Python loop.

    python benchmarks/q_learning_speed.py
    python benchmarks/q_learning_speed.py --agents 30 --steps 100000 --repeats 7

The port does what one writes first: `env.step` inside a scan, a key split in each step, Q returned from each step. All
learn the same from the same settings; greedy path lengths are printed to show it. Compilation is not counted, and the
programs take turns. The Python loop trains one agent.
"""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import q_learning_gridworld as onejit

CONFIG = onejit.Config(lr=0.1, gamma=0.9, epsilon=0.1)
PORT_STEPS = 20_000  # it stores Q at each step, so that memory bounds what it can train in one piece
PYTHON_STEPS = 50_000


def make_port(steps: int):
    """`train(key) -> q`, one agent: nothing but what the algorithm says, one step after the other."""
    env, env_params = onejit.make_env(CONFIG)

    def choose(key, q, obs):
        explore_key, random_key, tie_key = jax.random.split(key, 3)
        best = q[obs] == q[obs].max()
        greedy = jax.random.choice(tie_key, 4, p=best / best.sum())
        random = jax.random.randint(random_key, (), 0, 4)
        return jnp.where(jax.random.uniform(explore_key) < CONFIG.epsilon, random, greedy)

    def step(carry, _):
        key, q, obs, state = carry
        key, action_key, env_key = jax.random.split(key, 3)
        action = choose(action_key, q, obs)
        next_obs, state, reward, terminated, _, info = env.step(env_key, state, action, env_params)
        target = reward + CONFIG.gamma * jnp.where(terminated, 0.0, q[info["final_observation"]].max())
        q = q.at[obs, action].add(CONFIG.lr * (target - q[obs, action]))
        return (key, q, next_obs, state), q

    def train(key):
        key, reset_key = jax.random.split(key)
        obs, state = env.reset(reset_key, env_params)
        _, history = jax.lax.scan(step, (key, jnp.zeros(env.next_cell.shape), obs, state), None, steps)
        return history  # [steps, cells, 4]

    return train


def train_in_python(steps: int, seed: int) -> np.ndarray:
    """The same in a loop, without JAX."""
    rng, height, width, goal = np.random.default_rng(seed), 8, 12, (0, 0)
    q, position, episode_steps = np.zeros((height, width, 4)), (7, 11), 0
    for _ in range(steps):
        values = q[position]
        if rng.random() < CONFIG.epsilon:
            action = rng.integers(4)
        else:
            action = rng.choice(np.flatnonzero(values == values.max()))
        row, column = position[0] + onejit.MOVES[action][0], position[1] + onejit.MOVES[action][1]
        after = min(max(row, 0), height - 1), min(max(column, 0), width - 1)
        target = 1.0 if after == goal else CONFIG.gamma * q[after].max()
        values[action] += CONFIG.lr * (target - values[action])
        episode_steps += 1
        done = after == goal or episode_steps >= 1000
        position, episode_steps = ((7, 11), 0) if done else (after, episode_steps)
    return q.reshape(-1, 4)


def path_length(q) -> float:
    env, _ = onejit.make_env(CONFIG)
    path, reaches_goal = onejit.greedy_path(env, np.asarray(q), env.starts[0])
    return len(path) - 1 if reaches_goal else np.inf


def compile_for(train, agents: int):
    keys = jax.random.split(jax.random.key(0), agents)
    keys, train = (keys, jax.vmap(train)) if agents > 1 else (keys[0], train)
    return jax.jit(train).lower(keys).compile(), keys


def measure(steps: int, run, *args) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(run(*args))
    return steps / (time.perf_counter() - begun)


def compare(agents: int, args, python: float):
    steps = args.steps or {1: 1_000_000, 30: 300_000}.get(agents, 100_000)
    port_steps = PORT_STEPS if agents < 100 else PORT_STEPS // 10
    script, keys = compile_for(onejit.make_train(dataclasses.replace(CONFIG, total_timesteps=steps)), agents)
    port, _ = compile_for(make_port(port_steps), agents)
    speed = {"script": [], "port": []}
    for _ in range(args.repeats):
        speed["script"].append(measure(agents * steps, script, keys))
        speed["port"].append(measure(agents * port_steps, port, keys))
    ours, theirs = np.median(speed["script"]), np.median(speed["port"])
    q = np.asarray(script(keys)["runner_state"].q)
    lengths = sorted(path_length(each) for each in q.reshape(agents, -1, 4))
    for name, each in speed.items():
        print(f"{agents} agents, {name}: {np.median(each):,.0f} steps/s ({min(each):,.0f} to {max(each):,.0f})")
    print(f"{agents} agents: {ours / theirs:.1f} times the port, {ours / python:.0f} times the Python loop; paths"
          f" after {steps} steps take {lengths[0]} to {lengths[-1]}", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 30, 256])
    parser.add_argument("--steps", type=int, default=0, help="per agent, of the script; by default 1e6, 3e5 and 1e5")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}, jax {jax.__version__}, medians of {args.repeats}")

    python = np.median([measure(PYTHON_STEPS, train_in_python, PYTHON_STEPS, i) for i in range(args.repeats)])
    length = path_length(train_in_python(2 * PYTHON_STEPS, 0))
    print(f"1 agent, Python loop: {python:,.0f} steps/s; greedy path after {2 * PYTHON_STEPS} steps takes {length}")
    for agents in args.agents:
        compare(agents, args, python)


if __name__ == "__main__":
    main()
