"""connect_four, solved exactly by alpha-beta: 1,000 positions with exact values of all moves.

    python benchmarks/connect_four.py    # writes benchmarks/connect_four_positions.txt again

A line of that file is the columns of the moves that lead to a position, 0 to 6, and the outcome for
the player to move of each column if both play perfectly from then on: + a win, = a draw, - a loss,
. a column that is full.
"""

import itertools
import random
from pathlib import Path
from typing import NamedTuple

POSITIONS = Path(__file__).with_name("connect_four_positions.txt")
WIDTH, HEIGHT = 7, 6
SIGNS = {1: "+", 0: "=", -1: "-", None: "."}

# Bit 7 * column + row of a board is a square. The seventh bit of a column stays empty, and lines
# therefore do not wrap.
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
    squares = (stones << 1) & (stones << 2) & (stones << 3)
    for step in (6, 7, 8):
        pair = (stones << step) & (stones << (2 * step))
        squares |= pair & ((stones << (3 * step)) | (stones >> step))
        pair = (stones >> step) & (stones >> (2 * step))
        squares |= pair & ((stones >> (3 * step)) | (stones << step))
    return squares & (SQUARES ^ everything)


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
    moves = playable(board)
    threats = completing(board.all ^ board.mine, board.all)
    forced = moves & threats
    if forced:
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
    """Alpha-beta: the value if it is between low and high, otherwise a bound.

    The player to move cannot win at once.
    """
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
    best = -1
    low_at_start = low
    for square in squares:
        best = max(best, -search(after(board, square), -high, -low, table))
        low = max(low, best)
        if low >= high:
            break
    if best >= high:
        table[key] = (max(least, best), most)
    elif best <= low_at_start:
        table[key] = (least, best)
    else:
        table[key] = (best, best)
    return best


def move_values(board: Board) -> list[int | None]:
    """The outcome of each column for the player to move; None where a column is full."""
    table = {}
    values = []
    for column in range(WIDTH):
        square = playable(board) & COLUMNS[column]
        if not square:
            values.append(None)
        elif wins(board.mine | square):
            values.append(1)
        else:
            values.append(-value(after(board, square), table))
    return values


def replay(columns) -> Board:
    board = Board(0, 0)
    for column in columns:
        board = drop(board, column)
    return board


def random_line(rng: random.Random, plies: int) -> list[int]:
    """Columns of random moves after which nobody can win at once, if there was another move."""
    while True:
        board = Board(0, 0)
        line = []
        while len(line) < plies and safe_moves(board):
            moves = safe_moves(board)
            column = rng.choice([column for column in range(WIDTH) if moves & COLUMNS[column]])
            board = drop(board, column)
            line.append(column)
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
    rng = random.Random(0)
    lines = {}
    for plies in itertools.cycle(range(16, 36)):
        if len(lines) == 1000:
            break
        line = random_line(rng, plies)
        values = move_values(replay(line))
        lines["".join(map(str, line))] = "".join(SIGNS[value] for value in values)
    POSITIONS.write_text("".join(f"{line} {signs}\n" for line, signs in sorted(lines.items())))


if __name__ == "__main__":
    main()
