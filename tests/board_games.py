"""tic_tac_toe solved exactly, and how an agent plays against every line of moves."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pgx

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
