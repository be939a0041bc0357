"""The strength of alphazero's agents: against random moves, against plain MCTS, and tic_tac_toe against every move.

    python benchmarks/alphazero_strength.py configs/alphazero/tic_tac_toe.yaml --num-seeds 4 --games 1000 --opening 0
    python benchmarks/alphazero_strength.py configs/alphazero/connect_four.yaml --run-dir runs/alphazero/connect_four

Without a run it trains the config. Each agent begins half of the games. The first two moves of a game are random, and
therefore games differ. A perfect player may lose some of these openings.
"""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pgx  # noqa: E402
import scipy.stats  # noqa: E402

import alphazero  # noqa: E402
from onejit import runs  # noqa: E402

# --- tic_tac_toe, solved exactly ---

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def to_move(board) -> int:
    return 1 if board.count(1) == board.count(2) else 2


def legal(board) -> list[int]:
    return [cell for cell, stone in enumerate(board) if not stone]


def winner(board) -> int:
    return next((board[a] for a, b, c in LINES if board[a] and board[a] == board[b] == board[c]), 0)


def after(board, cell):
    return (*board[:cell], to_move(board), *board[cell + 1 :])


@functools.cache
def solved(board=(0,) * 9) -> int:
    """The outcome for the player to move if both play perfectly: 1, 0 or -1."""
    if winner(board):
        return -1
    return max((-solved(after(board, cell)) for cell in legal(board)), default=0)


@functools.cache
def positions() -> list[tuple[int, ...]]:
    """All positions that moves can reach and in which the game goes on."""
    found, new = [], {(0,) * 9}
    while new:
        found += sorted(new)
        reached = {after(board, cell) for board in new for cell in legal(board)}
        new = {board for board in reached if not winner(board) and legal(board)}
    return found


def states(boards):
    """Pgx's states of positions, [len(boards), ...]: the stones are placed in turns."""
    moves = [[[i for i, stone in enumerate(board) if stone == player] for player in (1, 2)] for board in boards]
    moves = [[cell for pair in zip(x, [*o, None][: len(x)], strict=True) for cell in pair][:9] for x, o in moves]
    moves = np.array([[-1 if cell is None else cell for cell in line] + [-1] * (9 - len(line)) for line in moves])
    game = pgx.make("tic_tac_toe")

    def place(state, move):
        stepped = game.step(state, jnp.maximum(move, 0))
        return jax.tree.map(lambda x, y: jnp.where(move >= 0, x, y), stepped, state), None

    start = game.init(jax.random.key(0))
    return jax.jit(jax.vmap(lambda line: jax.lax.scan(place, start, line)[0]))(jnp.asarray(moves))


class Play(NamedTuple):
    optimal: float  # share of the positions in which the move keeps the best outcome
    losses: tuple[int, int]  # lines of play that are lost as the first and as the second player
    games: tuple[int, int]  # lines of play: all moves of the opponent


def examine(act) -> Play:
    """How `act` plays, a function from states [N, ...] to actions [N]: all positions, and every line of play."""
    boards = positions()
    moves = dict(zip(boards, np.asarray(jax.jit(act)(states(boards))).tolist(), strict=True))
    assert all(move in legal(board) for board, move in moves.items()), "an illegal move"
    optimal = np.mean([-solved(after(board, move)) == solved(board) for board, move in moves.items()])

    def lines(board, player) -> tuple[int, int]:
        if winner(board) or not legal(board):
            return int(winner(board) == 3 - player), 1
        replies = [moves[board]] if to_move(board) == player else legal(board)
        return tuple(map(sum, zip(*(lines(after(board, cell), player) for cell in replies), strict=True)))

    (lost, games), (lost_second, games_second) = lines((0,) * 9, 1), lines((0,) * 9, 2)
    return Play(float(optimal), (lost, lost_second), (games, games_second))


# --- games against an opponent ---


def make_games(config, opponent_simulations: int, opening: int):
    """`play(agent, keys, agent_begins) -> rewards`: a game for each key, played to its end."""
    game, (_, act) = alphazero.make_game(config.env_name), alphazero.make_policy(config)
    mcts = alphazero.make_mcts(game, opponent_simulations) if opponent_simulations else alphazero.random_move

    def play(agent, key, agent_begins):
        init_key, key = jax.random.split(key)
        state = game.init(init_key)
        me = jnp.where(agent_begins, state.current_player, 1 - state.current_player)

        def move(carry):
            key, state, reward = carry
            key, random_key, mcts_key = jax.random.split(key, 3)
            mine, _ = act(agent, (), state)
            theirs = mcts(mcts_key, state)
            action = jnp.where(state.current_player == me, mine, theirs)
            opened = state._step_count >= opening
            state = game.step(state, jnp.where(opened, action, alphazero.random_move(random_key, state)))
            return key, state, reward + state.rewards[me]

        return jax.lax.while_loop(lambda carry: ~carry[1].terminated, move, (key, state, jnp.zeros(())))[2]

    return jax.jit(jax.vmap(play, (None, 0, 0)))


def describe(rewards) -> str:
    """Wins, draws, losses, and the share of wins with its 95 % interval (Wilson)."""
    wins, draws, losses = ((rewards == x).sum() for x in (1, 0, -1))
    interval = scipy.stats.binomtest(int(wins), len(rewards)).proportion_ci(method="wilson")
    share = f"{wins / len(rewards):.1%} ({interval.low:.1%} to {interval.high:.1%})"
    return f"{wins} won, {draws} drawn, {losses} lost: {share} won"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--run-dir", type=Path, help="a finished run; otherwise the config is trained")
    parser.add_argument("--num-seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, default=200)
    parser.add_argument("--opening", type=int, default=2, help="random moves at the start of a game")
    parser.add_argument("--search", type=int, nargs="*", default=[0, 32], help="simulations of the agent; 0 is none")
    parser.add_argument("--opponents", type=int, nargs="*", default=[0, 100], help="simulations; 0 is random moves")
    arguments = parser.parse_args()
    if arguments.run_dir:
        _, config, agents = runs.load_run(arguments.run_dir)
    else:
        config = runs.read_config(alphazero, arguments.config)
        keys = jax.random.split(jax.random.key(arguments.seed), arguments.num_seeds)
        agents = jax.jit(jax.vmap(lambda key: alphazero.make_train(config)(key)["runner_state"].agent))(keys)
    keys = jax.random.split(jax.random.key(arguments.seed + 1), arguments.games)
    begins = np.arange(arguments.games) % 2 == 0
    for i in range(len(jax.tree.leaves(agents)[0])):
        agent = jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), agents)
        for search in arguments.search:
            setting = dataclasses.replace(config, eval_simulations=search)
            name = f"agent {i}, {f'search with {search} simulations' if search else 'network alone'}"
            if config.env_name == "tic_tac_toe":
                _, act = alphazero.make_policy(setting)
                found = examine(lambda s, act=act, agent=agent: jax.vmap(lambda o: act(agent, (), o)[0])(s))
                print(f"{name}: {found}", flush=True)
            for opponent in arguments.opponents:
                rewards = np.asarray(make_games(setting, opponent, arguments.opening)(agent, keys, begins))
                against = f"MCTS with {opponent} simulations" if opponent else "random moves"
                print(f"{name}, against {against}: {describe(rewards)}", flush=True)


if __name__ == "__main__":
    main()
