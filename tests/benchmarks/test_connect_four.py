"""The solver of connect_four against brute force, and what benchmarks/alphazero_strength.py makes
of its values.
"""

import random
import sys

import jax
import numpy as np
import pytest
from support.files import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import alphazero_strength as strength
import connect_four

LINES = [  # the squares (column, row) of all lines of four
    [(column + i * x, row + i * y) for i in range(4)]
    for column in range(7)
    for row in range(6)
    for x, y in ((1, 0), (0, 1), (1, 1), (1, -1))
    if column + 3 * x < 7 and 0 <= row + 3 * y < 6
]


def squares_of(line) -> dict:
    """`{(column, row): player}` after moves in turns; the first player is 0."""
    board, heights = {}, [0] * 7
    for ply, column in enumerate(line):
        board[column, heights[column]] = ply % 2
        heights[column] += 1
    return board


def has_won(board, player) -> bool:
    return any(all(board.get(square) == player for square in line) for line in LINES)


def brute_force(line) -> list[int | None]:
    """The outcome of each column for the player to move: every game to its end, without pruning."""
    if has_won(squares_of(line), 1 - len(line) % 2):
        return [-1] * 7
    return [
        None if line.count(column) == 6 else -value_by_brute_force([*line, column])
        for column in range(7)
    ]


def value_by_brute_force(line) -> int:
    return max((each for each in brute_force(line) if each is not None), default=0)


def any_line(rng, plies) -> list[int]:
    """Columns of random moves in which nobody has won."""
    while True:
        line = []
        while len(line) < plies and not has_won(squares_of(line), 1 - len(line) % 2):
            line.append(rng.choice([column for column in range(7) if line.count(column) < 6]))
        if len(line) == plies and not has_won(squares_of(line), 1 - plies % 2):
            return line


def test_solver_by_brute_force():
    rng, seen = random.Random(0), set()
    for plies in (*range(35, 42), *range(35, 42)):
        line = any_line(rng, plies)
        expected = brute_force(line)
        assert connect_four.move_values(connect_four.replay(line)) == expected, line
        assert connect_four.value(connect_four.replay(line)) == max(
            each for each in expected if each is not None
        )
        seen |= {*expected}
    assert seen == {1, 0, -1, None}


def test_positions_are_those_of_the_solver():
    """Those in the file, without the earliest, which take long."""
    positions = connect_four.read()
    assert len(positions) == len({tuple(line) for line, _ in positions}) == 1000
    assert {len(line) for line, _ in positions} == {*range(16, 36)}
    for line, outcomes in [each for each in positions if len(each[0]) >= 24][::10]:
        assert connect_four.move_values(connect_four.replay(line)) == outcomes
    best = [max(each for each in outcomes if each is not None) for _, outcomes in positions]
    assert {*best} == {1, 0, -1}


@pytest.mark.slow
def test_positions_are_those_of_pgx():
    """Columns, players and legal moves: winning moves win in Pgx, too."""
    lines, outcomes = zip(*connect_four.read(), strict=True)
    states = strength.replay("connect_four", lines)
    assert not states.terminated.any()
    np.testing.assert_array_equal(
        states.legal_action_mask, [[x is not None for x in each] for each in outcomes]
    )
    game = strength.pgx.make("connect_four")
    for column in range(7):
        after = jax.jit(jax.vmap(lambda state, column=column: game.step(state, column)))(states)
        reward = np.asarray(after.rewards)[np.arange(1000), np.asarray(states.current_player)]
        boards = [connect_four.drop(connect_four.replay(line), column) for line in lines]
        legal = np.asarray(states.legal_action_mask)[:, column]
        won = np.array([connect_four.wins(board.all ^ board.mine) for board in boards])
        np.testing.assert_array_equal(reward[legal] == 1, won[legal])


def test_agents_are_judged_by_exact_values():
    outcomes = [[1, 0, -1, None], [0, 0, None, -1], [-1, -1, -1, -1], [1, 1, 1, 1]]
    found = strength.judge(np.array([0, 3, 2, 1]), np.array([0.5, 0.2, 0.5, 1.0]), outcomes)
    expected = strength.Judged(
        3 / 4, 1 / 2, (1 / 3 + 2 / 3) / 2, 1 / 3, (0.5 + 0.2 + 1.5 + 0.0) / 4
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(AssertionError, match="illegal"):
        strength.judge(np.array([3, 0, 0, 0]), np.zeros(4), outcomes)


def test_elo_of_known_players():
    """Scores that the model gives to players of known strength, and intervals that contain it."""
    ratings = np.array([-200.0, -50.0, 250.0])
    share = 1 / (1 + 10 ** ((ratings[None] - ratings[:, None]) / 400))
    draws = np.minimum(share, 1 - share)
    counts = np.round(
        np.stack([share - draws / 2, draws, 1 - share - draws / 2], axis=-1) * 1e6
    ).astype(int)
    counts[np.arange(3), np.arange(3)] = 0
    np.testing.assert_allclose(strength.elo(counts), ratings, atol=1.0)
    low, high = strength.elo_interval(counts // 10_000, samples=50)
    assert (low < ratings).all() and (ratings < high).all() and (high - low < 200).all()
    never = np.zeros((2, 2, 3), int)
    never[0, 1], never[1, 0] = [0, 0, 100], [100, 0, 0]
    assert -1000 < strength.elo(never)[0] < -300  # finite
