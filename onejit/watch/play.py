"""Play a board game against an agent of a run, in the terminal.

    onejit play runs/alphazero/connect_four
    onejit play runs/alphazero/connect_four --second --simulations 200

By default the agent that was best in training plays; `--agent` chooses another. Type the name of a
move, such as c3, or of a column where a game has only columns. Ctrl-D ends the game.
"""

import dataclasses
import random
from pathlib import Path

import jax
import tyro

from onejit.engine.evaluation import policy_of
from onejit.run.directory import load_run, rank_agents_of_run
from onejit.script.environment import unwrap
from onejit.watch.boards import STONES, move_names, text, to_move


def ask(state) -> int:
    """The move that a person types."""
    names = move_names(state)
    question = f"your move ({'XO'[to_move(state) - 1]}): "
    while True:
        word = input(question).strip().lower()
        if word in names:
            return names[word]
        print(f"{word}: is not a legal move; legal are {' '.join(names)}")


def check_options(agent: int | None, num_agents: int, simulations: int | None) -> None:
    """Raise ValueError if an option is out of its range."""
    if agent is not None and not 0 <= agent < num_agents:
        raise ValueError(f"agent = {agent}: must be from 0 to {num_agents - 1}")
    if simulations is not None and simulations < 0:
        raise ValueError(f"simulations = {simulations}: must not be negative")


def result_of(reward: float) -> str:
    if reward > 0:
        return "you win"
    return "the agent wins" if reward < 0 else "a draw"


def main(
    run_dir: tyro.conf.Positional[Path],
    agent: int | None = None,
    second: bool = False,
    simulations: int | None = None,
) -> float:
    """Play a game. Returns the person's reward. Raises ValueError.

    Args:
        run_dir: a finished run of alphazero, or of a copy of it
        agent: number of the agent, from 0; the best of the end of training by default
        second: let the agent begin
        simulations: of the agent's search; the run's eval_simulations by default, 0 for none
    """
    script, config, agents = load_run(run_dir)
    env, _ = script.make_env(config)
    game = getattr(unwrap(env), "game", None)
    if game is None:
        raise ValueError(
            f"run_dir = {run_dir}: {config.env_name} is no board game; "
            "play is for runs of alphazero"
        )
    if game.id not in STONES:
        raise ValueError(f"env_name = {game.id}: play draws boards of {', '.join(STONES)}")
    check_options(agent, len(jax.tree.leaves(agents)[0]), simulations)
    if simulations is not None:
        config = dataclasses.replace(config, eval_simulations=simulations)
    if agent is None:
        order, _ = rank_agents_of_run(run_dir, agents)
        agent = int(order[-1])
    weights = jax.tree.map(lambda leaf: leaf[agent], agents)
    start, act = policy_of(script, config)
    act = jax.jit(act)
    step = jax.jit(game.step)
    state = game.init(jax.random.key(random.getrandbits(31)))
    memory = start()
    person = int(state.current_player) ^ second
    print(f"agent {agent} plays {'X and begins' if second else 'O'}")
    while not state.terminated:
        if int(state.current_player) == person:
            print(text(state))
            try:
                action = ask(state)
            except EOFError:
                print("\nthe game is not finished")
                return 0.0
        else:
            names = {number: name for name, number in move_names(state).items()}
            action, memory = act(weights, memory, state)
            print(f"the agent plays {names[int(action)]}")
        state = step(state, action)
    reward = float(state.rewards[person])
    print(f"{text(state)}\n{result_of(reward)}")
    return reward
