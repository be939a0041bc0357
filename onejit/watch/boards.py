"""Boards of Pgx's games of stones: as text, as arrays, and the names of moves."""

import jax
import numpy as np

# the games whose pieces are stones of two colours
STONES = ("tic_tac_toe", "connect_four", "othello", "go_9x9", "go_19x19")

LETTERS = "abcdefghijklmnopqrstuvwxyz"


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
