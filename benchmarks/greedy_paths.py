"""Lengths of the greedy paths that tabular Q-learning has found.

    python benchmarks/greedy_paths.py

Each config of q_learning_gridworld trains 32 agents from seed 2000. An agent walks greedily from
the start, or, where episodes start in any cell, from the farthest one. The script writes
benchmarks/results/paths.json: the steps of each agent's path, null where it never reaches
the goal; the steps of a shortest path; and max Q at the first cell, of the median agent.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import q_learning_gridworld as script
from onejit.base import files
from onejit.run.directory import read_config

SEED = 2000
NUM_AGENTS = 32


def steps_to_goal(env) -> np.ndarray:
    """Steps of a shortest path from each cell: [cells], inf where there is none."""
    steps = np.full(len(env.next_cell), np.inf)
    steps[env.goal] = 0
    for _ in range(len(steps)):  # no shortest path is longer
        steps_from_next = np.where(env.cliff[env.next_cell], np.inf, steps[env.next_cell])
        steps = np.minimum(steps, 1 + steps_from_next.min(axis=1))
    return steps


def path_length(env, q, first_cell: int) -> int | None:
    """Steps of the greedy path to the goal: None if it steps on the cliff or walks in a circle."""
    cell = first_cell
    for step in range(len(q) + 1):
        if cell == env.goal:
            return step
        cell = env.next_cell[cell, q[cell].argmax()]
        if env.cliff[cell]:
            return None
    return None


def measure(file: Path) -> dict:
    config = read_config(script, file)
    env, _ = script.make_env(config)
    keys = jax.random.split(jax.random.key(SEED), NUM_AGENTS)
    out = jax.jit(jax.vmap(script.make_train(config)))(keys)
    q = np.asarray(out["runner_state"].agent["q"])  # [agents, cells, actions]
    shortest = steps_to_goal(env)
    farthest = int(np.where(env.can_start, shortest, -1).argmax())
    first_cell = farthest if config.random_starts else env.start
    return {
        "shortest": int(shortest[first_cell]),
        "steps": [path_length(env, q_of_agent, first_cell) for q_of_agent in q],
        "max_q": float(np.median(q[:, first_cell].max(axis=1))),
    }


def main():
    configs = {}
    for file in sorted((ROOT / "configs" / "q_learning_gridworld").glob("*.yaml")):
        configs[file.stem] = measure(file)
        print(file.stem, configs[file.stem])
    results = {
        "command": "python benchmarks/greedy_paths.py",
        "jax": jax.__version__,
        "configs": configs,
    }
    out = ROOT / "benchmarks" / "results" / "paths.json"
    files.write(out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
