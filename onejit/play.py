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
import numpy as np
import tyro

from onejit import run_directory, statistics
from onejit.evaluation import policy_of, unwrap

STONES = ("tic_tac_toe", "connect_four", "othello", "go_9x9", "go_19x19")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

# --- boards of Pgx's games of stones ---


def check_stones(game, what: str) -> None:
    """Raise ValueError if a game has other pieces than stones of two colours."""
    if game.id not in STONES:
        raise ValueError(f"env_name = {game.id}: {what} boards of {', '.join(STONES)}")


def to_move(state) -> int:
    """1 if the player who began is to move, otherwise 2.

    Each move, and each pass, is a step of the game.
    """
    return 1 + int(state._step_count) % 2


def stones(state) -> np.ndarray:
    """0 for empty, 1 and 2 for the stones of the player who began and of the other, [H, W]."""
    observation = np.asarray(state.observation)  # of the player to move
    player = to_move(state)
    opponent = 3 - player
    board = np.zeros(observation.shape[:2], int)
    board[observation[..., 1] > 0] = opponent
    board[observation[..., 0] > 0] = player
    return board


def move_names(state) -> dict[str, int]:
    """The legal actions by the names that people give them: c3 is column c, row 3 from the top."""
    height, width = state.observation.shape[:2]
    if len(state.legal_action_mask) == width:
        names = list(LETTERS[:width])
    else:
        names = []
        for row in range(height):
            names += [f"{letter}{row + 1}" for letter in LETTERS[:width]]
        names.append("pass")
    legal = np.flatnonzero(state.legal_action_mask)
    return {names[action]: int(action) for action in legal}


def text(state) -> str:
    """The board in letters, X for the player who began and O for the other."""
    board = stones(state)
    width = board.shape[1]
    by_column = len(state.legal_action_mask) == width
    lines = ["    " + " ".join(LETTERS[:width])]
    for i, row in enumerate(board):
        number = "" if by_column else str(i + 1)
        lines.append(f"{number:>3} " + " ".join(".XO"[stone] for stone in row))
    return "\n".join(lines)


def after_each_move(states, positions, rewards):
    """An episode `[T, ...]` of an agent's moves as one of both players: `(states, rewards)`.

    `positions` are those after the agent's move and after the reply. The last state has all of the
    reward.
    """

    def in_order(states, after_move, after_reply):
        both = np.stack([np.asarray(after_move), np.asarray(after_reply)], axis=1)
        both = both.reshape(-1, *both.shape[2:])
        return np.concatenate([np.asarray(states)[:1], both])

    after_move, after_reply = positions
    every = jax.tree.map(in_order, states, after_move, after_reply)
    # no reply follows the last move of a game
    new = np.append(True, np.diff(every._step_count) > 0)
    zeros = np.zeros(new.sum() - 1)
    return jax.tree.map(lambda leaf: leaf[new], every), np.append(zeros, np.sum(rewards))


# --- the game ---


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


def best_agent(run_dir: Path, agents) -> int:
    metrics = run_directory.load_metrics(run_dir)
    order, _ = statistics.rank_agents(metrics, statistics.diverged(agents))
    return int(order[-1])


def result_of(reward: float) -> str:
    if reward > 0:
        return "you win"
    return "the agent wins" if reward < 0 else "a draw"


def main(
    run_dir: tyro.conf.Positional[Path],
    agent: int | None = None,
    second: tyro.conf.FlagCreatePairsOff[bool] = False,
    simulations: int | None = None,
    force: tyro.conf.FlagCreatePairsOff[bool] = False,
    trust: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> float:
    """Play a game. Returns the person's reward. Raises ValueError.

    Args:
        run_dir: a finished run of alphazero, or of a copy of it
        agent: number of the agent, from 0; the best of the end of training by default
        second: let the agent begin
        simulations: of the agent's search; the run's eval_simulations by default, 0 for none
        force: use the run's copies of the script and of your modules although they were edited
        trust: execute code outside of the run directory that the run names
    """
    script, config, agents = run_directory.load_run(run_dir, force, trust=trust)
    env, _ = script.make_env(config)
    game = getattr(unwrap(env), "game", None)
    if game is None:
        raise ValueError(
            f"run_dir = {run_dir}: {config.env_name} is no board game; "
            "play is for runs of alphazero"
        )
    check_stones(game, "play draws")
    check_options(agent, len(jax.tree.leaves(agents)[0]), simulations)
    if simulations is not None:
        config = dataclasses.replace(config, eval_simulations=simulations)
    if agent is None:
        agent = best_agent(run_dir, agents)
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
