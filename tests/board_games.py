"""A toy with Pgx's interface; tic_tac_toe solved exactly, and how an agent plays against every line of moves."""

import functools
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pgx


@flax.struct.dataclass
class NimState:
    pile: jax.Array
    current_player: jax.Array
    observation: jax.Array  # one-hot, the size of the pile, [1, SIZE + 1, 1]
    legal_action_mask: jax.Array
    rewards: jax.Array
    terminated: jax.Array
    _step_count: jax.Array


class Nim:
    """Take one (action 0) or two (1) of at most SIZE stones; whoever takes the last one wins.

    Action 2 takes one and keeps the turn. It is legal if `again` is set and more than one stone is left.
    """

    id, num_players, num_actions, longest, SIZE = "nim", 2, 3, 7, 7
    observation_shape = (1, SIZE + 1, 1)
    again = False

    def state(self, pile, player, rewards, terminated, steps):
        mask = jnp.array([pile >= 1, pile >= 2, (pile >= 2) & self.again]) | terminated
        obs = (jnp.arange(self.SIZE + 1) == pile).astype(jnp.float32).reshape(self.observation_shape)
        return NimState(pile, player, obs, mask, rewards, terminated, steps)

    def init(self, key):
        pile_key, player_key = jax.random.split(key)
        pile, player = jax.random.randint(pile_key, (), 4, self.SIZE + 1), jax.random.randint(player_key, (), 0, 2)
        return self.state(pile, player, jnp.zeros(2), jnp.bool_(False), jnp.int32(0))

    def step(self, state, action):
        mover, illegal = state.current_player, ~state.legal_action_mask[action]
        pile = state.pile - jnp.array([1, 2, 1])[action]
        won = jnp.where(jnp.arange(2) == mover, 1.0, -1.0)
        rewards = jnp.where(illegal, -won, jnp.where(pile == 0, won, 0.0))
        player = jnp.where(action == 2, mover, 1 - mover)
        after = self.state(pile, player, rewards, illegal | (pile <= 0), state._step_count + 1)
        ended = state.replace(rewards=jnp.zeros(2))
        return jax.tree.map(lambda x, y: jnp.where(state.terminated, x, y), ended, after)


class NimAgain(Nim):
    again = True


def nim_value(pile, again=False):
    """The outcome for the player to move."""
    return max(nim_values(pile, again)) if pile else -1


def nim_values(pile, again=False) -> list[float]:
    """The outcome of each action for the player to move, minus infinity if it is illegal."""
    values = [-nim_value(pile - 1, again), -nim_value(pile - 2, again) if pile >= 2 else -np.inf]
    return [*values, nim_value(pile - 1, again) if again and pile >= 2 else -np.inf]


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
