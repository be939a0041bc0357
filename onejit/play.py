"""Play a board game against an agent of a run, in the terminal.

    onejit play runs/alphazero/connect_four
    onejit play runs/alphazero/connect_four --second --simulations 200

By default the agent that was best in training plays; `--agent` chooses another. Type the name of a move, such as c3,
or of a column where a game has only columns. Ctrl-D ends the game.
"""

import dataclasses
import random
from pathlib import Path

import jax
import tyro

from onejit import boards, runs, statistics


def unwrap(env):
    """The environment inside all wrappers."""
    while hasattr(env, "_env"):
        env = env._env
    return env


def ask(state) -> int:
    """The move that a person types."""
    names = boards.move_names(state)
    while (
        word := input(f"your move ({'XO'[boards.to_move(state) - 1]}): ").strip().lower()
    ) not in names:
        print(f"{word}: is not a legal move; legal are {' '.join(names)}")
    return names[word]


def main(
    run_dir: tyro.conf.Positional[Path],
    agent: int | None = None,
    second: tyro.conf.FlagCreatePairsOff[bool] = False,
    simulations: int | None = None,
    force: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> float:
    """Play a game. Returns the person's reward. Raises ValueError.

    Args:
        run_dir: a finished run of alphazero, or of a copy of it
        agent: number of the agent, from 0; the best of the end of training by default
        second: let the agent begin
        simulations: simulations of the agent's search; the run's eval_simulations by default, 0 for none
        force: use the run's copy of the script although it was edited
    """
    script, config, agents = runs.load_run(run_dir, force)
    game = getattr(unwrap(script.make_env(config)[0]), "game", None)
    if game is None:
        raise ValueError(
            f"run_dir = {run_dir}: {config.env_name} is no board game; play is for runs of alphazero"
        )
    boards.check_stones(game, "play draws")
    number = len(jax.tree.leaves(agents)[0])
    if agent is not None and not 0 <= agent < number:
        raise ValueError(f"agent = {agent}: must be from 0 to {number - 1}")
    if simulations is not None:
        if simulations < 0:
            raise ValueError(f"simulations = {simulations}: must not be negative")
        config = dataclasses.replace(config, eval_simulations=simulations)
    if agent is None:
        agent = int(
            statistics.rank_agents(runs.load_metrics(run_dir), statistics.diverged(agents))[0][-1]
        )
    weights = jax.tree.map(lambda leaf: leaf[agent], agents)
    start, act = script.make_policy(config)
    act, step = jax.jit(act), jax.jit(game.step)
    state, memory = game.init(jax.random.key(random.getrandbits(31))), start()
    person = int(state.current_player) ^ second
    print(f"agent {agent} plays {'X and begins' if second else 'O'}")
    while not state.terminated:
        if int(state.current_player) == person:
            print(boards.text(state))
            try:
                action = ask(state)
            except EOFError:
                print("\nthe game is not finished")
                return 0.0
        else:
            names = boards.move_names(state)
            action, memory = act(weights, memory, state)
            print(
                f"the agent plays {next(name for name, each in names.items() if each == int(action))}"
            )
        state = step(state, action)
    reward = float(state.rewards[person])
    print(
        f"{boards.text(state)}\n{'you win' if reward > 0 else 'the agent wins' if reward < 0 else 'a draw'}"
    )
    return reward
