"""connect_four, solved exactly by alpha-beta, and 1,000 positions with the exact value of every move.

    python benchmarks/connect_four.py    # writes benchmarks/connect_four_positions.txt again

A line of that file is the columns of the moves that lead to a position, 0 to 6, and the outcome for the player to move
of each column if both play perfectly from then on: + a win, = a draw, - a loss, . a column that is full.
"""

import itertools
import random
from pathlib import Path
from typing import NamedTuple

POSITIONS = Path(__file__).with_name("connect_four_positions.txt")
WIDTH, HEIGHT = 7, 6
SIGNS = {1: "+", 0: "=", -1: "-", None: "."}

# Bit 7 * column + row of a board is a square. The seventh bit of each column stays empty, so that lines do not wrap.
COLUMNS = [((1 << HEIGHT) - 1) << (7 * column) for column in range(WIDTH)]
BOTTOM = sum(1 << (7 * column) for column in range(WIDTH))
SQUARES = sum(COLUMNS)
CENTER_FIRST = [COLUMNS[column] for column in (3, 2, 4, 1, 5, 0, 6)]


class Board(NamedTuple):
    mine: int  # stones of the player to move
    all: int  # stones of both players


def wins(stones: int) -> bool:
    """Whether four stones are in a line."""
    for step in (1, 6, 7, 8):  # up, the two diagonals, right
        pairs = stones & (stones >> step)
        if pairs & (pairs >> (2 * step)):
            return True
    return False


def completing(stones: int, everything: int) -> int:
    """The empty squares that would complete four of `stones` in a line."""
    found = (stones << 1) & (stones << 2) & (stones << 3)
    for step in (6, 7, 8):
        pair = (stones << step) & (stones << (2 * step))
        found |= pair & ((stones << (3 * step)) | (stones >> step))
        pair = (stones >> step) & (stones >> (2 * step))
        found |= pair & ((stones >> (3 * step)) | (stones << step))
    return found & (SQUARES ^ everything)


def playable(board: Board) -> int:
    return (board.all + BOTTOM) & SQUARES


def after(board: Board, square: int) -> Board:
    """The board from the opponent's side, after a stone on `square`, a bit."""
    return Board(board.all ^ board.mine, board.all | square)


def drop(board: Board, column: int) -> Board:
    return after(board, playable(board) & COLUMNS[column])


def legal(board: Board) -> list[int]:
    return [column for column in range(WIDTH) if playable(board) & COLUMNS[column]]


def safe_moves(board: Board) -> int:
    """The playable squares after which the opponent cannot win at once."""
    moves, threats = playable(board), completing(board.all ^ board.mine, board.all)
    if forced := moves & threats:
        if forced & (forced - 1):  # two threats at once
            return 0
        moves = forced
    return moves & ~(threats >> 1)  # not below a square where the opponent wins


def value(board: Board, table: dict | None = None) -> int:
    """The outcome for the player to move if both play perfectly: 1, 0 or -1. Nobody has won yet."""
    if completing(board.mine, board.all) & playable(board):
        return 1
    return search(board, -1, 1, {} if table is None else table)


def search(board: Board, low: int, high: int, table: dict) -> int:
    """Alpha-beta: the value if it is between low and high, otherwise a bound. The player to move cannot win at once."""
    moves = safe_moves(board)
    if not moves:
        return -1 if playable(board) else 0
    if board.all.bit_count() >= WIDTH * HEIGHT - 2:
        return 0
    key = board.mine + board.all  # names the position
    least, most = table.get(key, (-1, 1))
    low, high = max(low, least), min(high, most)
    if low >= high:
        return low if least >= high else high
    squares = [square for column in CENTER_FIRST if (square := moves & column)]
    squares.sort(
        key=lambda square: -completing(board.mine | square, board.all | square).bit_count()
    )
    best, begun = -1, low
    for square in squares:
        best = max(best, -search(after(board, square), -high, -low, table))
        low = max(low, best)
        if low >= high:
            break
    table[key] = (
        (max(least, best), most)
        if best >= high
        else (least, best)
        if best <= begun
        else (best, best)
    )
    return best


def move_values(board: Board) -> list[int | None]:
    """The outcome of each column for the player to move; None where a column is full."""
    table, found = {}, []
    for column in range(WIDTH):
        square = playable(board) & COLUMNS[column]
        won = square and wins(board.mine | square)
        found.append(None if not square else 1 if won else -value(after(board, square), table))
    return found


def replay(columns) -> Board:
    board = Board(0, 0)
    for column in columns:
        board = drop(board, column)
    return board


def random_line(rng: random.Random, plies: int) -> list[int]:
    """Columns of random moves. Nobody can win at once after any of them, unless no other move was left."""
    while True:
        board, line = Board(0, 0), []
        while len(line) < plies and (moves := safe_moves(board)):
            column = rng.choice([column for column in range(WIDTH) if moves & COLUMNS[column]])
            board, line = drop(board, column), [*line, column]
        if len(line) == plies and not completing(board.mine, board.all) & playable(board):
            return line


def read() -> list[tuple[list[int], list[int | None]]]:
    """`(columns of the moves, outcome of each column)` of the positions in the file."""
    outcomes = {sign: outcome for outcome, sign in SIGNS.items()}
    lines = [line.split() for line in POSITIONS.read_text().splitlines()]
    return [
        ([int(column) for column in line], [outcomes[sign] for sign in signs])
        for line, signs in lines
    ]


def main() -> None:
    rng, lines = random.Random(0), {}
    for plies in itertools.cycle(range(16, 36)):
        if len(lines) == 1000:
            break
        line = random_line(rng, plies)
        lines["".join(map(str, line))] = "".join(SIGNS[each] for each in move_values(replay(line)))
    POSITIONS.write_text("".join(f"{line} {signs}\n" for line, signs in sorted(lines.items())))


if __name__ == "__main__":
    main()
