"""Boards of Pgx's games of stones, for the terminal and for pictures."""

import jax
import numpy as np

STONES = ("tic_tac_toe", "connect_four", "othello", "go_9x9", "go_19x19")


def check_stones(game, what: str) -> None:
    """Raise ValueError if a game has other pieces than stones of two colours."""
    if game.id not in STONES:
        raise ValueError(f"env_name = {game.id}: {what} boards of {', '.join(STONES)}")


def stones(state) -> np.ndarray:
    """0 for empty, 1 and 2 for the stones of the player who began and of the other, [H, W]."""
    mine, theirs = np.moveaxis(
        np.asarray(state.observation)[..., :2], -1, 0
    )  # of the player to move
    return (
        np.where(mine, 1, np.where(theirs, 2, 0))
        if to_move(state) == 1
        else np.where(mine, 2, theirs.astype(int))
    )


def to_move(state) -> int:
    """1 if the player who began is to move, otherwise 2. Each move, and each pass, is a step of the game."""
    return 1 + int(state._step_count) % 2


def move_names(state) -> dict[str, int]:
    """The legal actions by the names that people give them: c3 is column c, row 3 from the top."""
    height, width = state.observation.shape[:2]
    letters = "abcdefghijklmnopqrstuvwxyz"[:width]
    legal = np.flatnonzero(state.legal_action_mask)
    if len(state.legal_action_mask) == width:
        return {letters[action]: int(action) for action in legal}
    cells = [f"{letters[column]}{row + 1}" for row in range(height) for column in range(width)]
    names = [*cells, "pass"]
    return {names[action]: int(action) for action in legal}


def text(state) -> str:
    """The board in letters, X for the player who began and O for the other."""
    board = stones(state)
    letters = "abcdefghijklmnopqrstuvwxyz"[: board.shape[1]]
    by_column = len(state.legal_action_mask) == board.shape[1]
    rows = [
        f"{'' if by_column else i + 1:>3} " + " ".join(".XO"[x] for x in row)
        for i, row in enumerate(board)
    ]
    return "\n".join(["    " + " ".join(letters), *rows])


def after_each_move(states, positions, rewards):
    """An episode `[T, ...]` of an agent's moves as one of the moves of both players: `(states, rewards)`.

    `positions` are those after the agent's move and after the reply. The last state has all of the reward.
    """
    first = jax.tree.map(lambda leaf: leaf[:1], states)

    def in_order(first, *two):
        both = np.stack([np.asarray(leaf) for leaf in two], axis=1)
        return np.concatenate([np.asarray(first), both.reshape(-1, *both.shape[2:])])

    every = jax.tree.map(in_order, first, *positions)
    new = np.append(
        True, np.diff(every._step_count) > 0
    )  # no reply follows the last move of a game
    return jax.tree.map(lambda leaf: leaf[new], every), np.append(
        np.zeros(new.sum() - 1), np.sum(rewards)
    )
