"""The strength of alphazero's agents: in games, and against exact values of positions.

    python benchmarks/alphazero_strength.py configs/alphazero/tic_tac_toe.yaml --num-seeds 4 \\
        --games 1000 --opening 0
    python benchmarks/alphazero_strength.py configs/alphazero/connect_four.yaml \\
        --run-dir runs/alphazero/connect_four
    python benchmarks/alphazero_strength.py configs/alphazero/connect_four.yaml \\
        --run-dir RUN_DIR --opponents --elo

The opponents are random moves and plain MCTS. Each agent begins half of the games. The first two
moves of a game are random, and therefore games differ. A perfect player may lose some of these
openings. In tic_tac_toe the agent also plays against every line of moves, in connect_four it is
asked for a move in 1,000 solved positions (benchmarks/connect_four.py).

If there is no RUN_DIR, the config is trained into it, with `--checkpoints` of the agents. `--elo`
lets the checkpoints of each run play against each other.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import connect_four
import jax
import jax.numpy as jnp
import numpy as np
import pgx
import scipy.optimize
import scipy.special
import scipy.stats
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

import alphazero
from onejit.run import write
from onejit.run.directory import load_results, load_run, read_config

# --- training with checkpoints ---


def train(config, seed: int, num_seeds: int, run_dir: Path, checkpoints: int) -> None:
    """Train agents into a new run directory, and keep them after 0, 1, 1/2, 1/4, ... of it."""
    init, update = alphazero.make_learner(config)
    update_all = jax.vmap(update) if num_seeds > 1 else over_one(update)
    update_all = jax.jit(update_all, donate_argnums=0)
    state = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(seed), num_seeds))
    kept = [0, *(config.num_updates >> halvings for halvings in range(checkpoints - 1))]
    run_dir.mkdir(parents=True)
    metrics = []
    for done in range(config.num_updates + 1):
        if done in kept:  # what an interrupted training leaves is complete, too
            steps = done * config.num_envs * config.num_steps
            leaves = {
                name: np.asarray(leaf) for name, leaf in flatten_dict(state.agent, sep=".").items()
            }
            save_file(
                leaves,
                run_dir / f"agent_{steps}.safetensors",
                {"script": "alphazero", "seed": str(seed)},
            )
            if done:
                stacked = jax.tree.map(lambda *values: np.stack(values, axis=1), *metrics)
                agents = jax.device_get(state.agent)
                write.save_results(alphazero, config, seed, agents, stacked, run_dir)
        if done < config.num_updates:
            state, new_metrics = update_all(state)
            metrics.append(jax.device_get(new_metrics))
    alphazero.report(config, state, run_dir)


def over_one(function):
    """`function` over a first axis of one, without `vmap`."""

    def over_first(tree):
        result = function(jax.tree.map(lambda leaf: leaf[0], tree))
        return jax.tree.map(lambda leaf: leaf[None], result)

    return over_first


# --- tic_tac_toe, solved exactly ---

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def to_move(board) -> int:
    return 1 if board.count(1) == board.count(2) else 2


def legal(board) -> list[int]:
    return [cell for cell, stone in enumerate(board) if not stone]


def winner(board) -> int:
    for a, b, c in LINES:
        if board[a] and board[a] == board[b] == board[c]:
            return board[a]
    return 0


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
    known = []
    new = {(0,) * 9}
    while new:
        known += sorted(new)
        reached = {after(board, cell) for board in new for cell in legal(board)}
        new = {board for board in reached if not winner(board) and legal(board)}
    return known


def states(boards):
    """Pgx's states of positions, [len(boards), ...]: the stones are placed in turns."""
    lines = []
    for board in boards:
        cells = {player: [i for i in range(9) if board[i] == player] for player in (1, 2)}
        num_moves = len(cells[1]) + len(cells[2])
        lines.append([cells[1 + ply % 2][ply // 2] for ply in range(num_moves)])
    return replay("tic_tac_toe", lines)


def replay(name: str, lines):
    """Pgx's states after lines of moves, [len(lines), ...]."""
    longest = max(map(len, lines))
    moves = np.array([[*line] + [-1] * (longest - len(line)) for line in lines])
    game = pgx.make(name)

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
    """How `act` plays, states [N, ...] -> actions [N]: all positions, and every line of play."""
    boards = positions()
    moves = dict(zip(boards, np.asarray(jax.jit(act)(states(boards))).tolist(), strict=True))
    assert all(move in legal(board) for board, move in moves.items()), "an illegal move"
    optimal = np.mean(
        [-solved(after(board, move)) == solved(board) for board, move in moves.items()]
    )

    def lines(board, player) -> np.ndarray:
        """Lost lines of play and all lines of play, if `act` plays as `player`."""
        if winner(board) or not legal(board):
            return np.array([winner(board) == 3 - player, 1], int)
        replies = [moves[board]] if to_move(board) == player else legal(board)
        return sum(lines(after(board, cell), player) for cell in replies)

    lost, games = lines((0,) * 9, player=1).tolist()
    lost_second, games_second = lines((0,) * 9, player=2).tolist()
    return Play(float(optimal), (lost, lost_second), (games, games_second))


def examine_tic_tac_toe(config, agent) -> Play:
    act = alphazero.make_policy(config)

    def choose(state):
        return act(agent, state)

    return examine(jax.vmap(choose))


# --- connect_four, against solved positions ---


class Judged(NamedTuple):
    kept: float  # share of the positions in which the move keeps the exact value
    kept_where_moves_differ: float  # the same for those in which some move loses value
    random: float  # the same for random moves there, on average
    wrong_sign: float  # share of decided positions whose value has the wrong sign
    error: float  # mean absolute error of the network's value


def judge(actions, values, outcomes) -> Judged:
    """The quality of `actions` and `values` [N], by the exact outcomes of the columns.

    The outcome of a column that is full is None.
    """
    outcomes = np.array(outcomes, dtype=float)  # [N, columns], NaN for None
    best = np.nanmax(outcomes, axis=1)
    reached = outcomes[np.arange(len(outcomes)), actions]
    assert np.isfinite(reached).all(), "an illegal move"
    kept = reached == best
    legal_moves = np.isfinite(outcomes).sum(axis=1)
    random = (outcomes == best[:, None]).sum(axis=1) / legal_moves
    differ = random < 1
    decided = best != 0
    wrong_sign = np.sign(values)[decided] != best[decided]
    return Judged(
        kept=float(kept.mean()),
        kept_where_moves_differ=float(kept[differ].mean()),
        random=float(random[differ].mean()),
        wrong_sign=float(wrong_sign.mean()),
        error=float(np.abs(values - best).mean()),
    )


def examine_connect_four(config, agent) -> Judged:
    lines, outcomes = zip(*connect_four.read(), strict=True)
    act = alphazero.make_policy(config)
    game = alphazero.make_game("connect_four")
    network = alphazero.make_network(config, game)

    @jax.jit
    def play(agent, states):
        actions = jax.vmap(lambda state: act(agent, state))(states)
        return actions, network.apply(agent["params"], states.observation)[1]

    return judge(*map(np.asarray, play(agent, replay("connect_four", lines))), outcomes)


# --- games against an opponent ---


def make_games(config, reply, opening: int):
    """`play(agent, opponent, keys, agent_begins) -> rewards`: games that are played to their end.

    `reply(opponent, key, state)` is the opponent's move.
    """
    game = alphazero.make_game(config.env_name)
    act = alphazero.make_policy(config)

    def play(agent, opponent, key, agent_begins):
        init_key, key = jax.random.split(key)
        state = game.init(init_key)
        me = jnp.where(agent_begins, state.current_player, 1 - state.current_player)

        def move(carry):
            key, state, reward = carry
            key, random_key, reply_key = jax.random.split(key, 3)
            mine = act(agent, state)
            theirs = reply(opponent, reply_key, state)
            action = jnp.where(state.current_player == me, mine, theirs)
            random_action = alphazero.random_move(random_key, state)
            state = game.step(state, jnp.where(state._step_count < opening, random_action, action))
            return key, state, reward + state.rewards[me]

        def goes_on(carry):
            _, state, _ = carry
            return ~state.terminated

        _, _, reward = jax.lax.while_loop(goes_on, move, (key, state, jnp.zeros(())))
        return reward

    return jax.jit(jax.vmap(play, (None, None, 0, 0)))


def make_opponent(config, simulations: int):
    game = alphazero.make_game(config.env_name)
    choose = alphazero.make_mcts(game, simulations) if simulations else alphazero.random_move
    return lambda opponent, key, state: choose(key, state)


def count_outcomes(rewards) -> list[int]:
    """Wins, draws and losses."""
    return [int((rewards == outcome).sum()) for outcome in (1, 0, -1)]


def describe(rewards) -> str:
    """Wins, draws, losses, and the share of wins with its 95 % interval (Wilson)."""
    wins, draws, losses = count_outcomes(rewards)
    interval = scipy.stats.binomtest(wins, len(rewards)).proportion_ci(method="wilson")
    share = f"{wins / len(rewards):.1%} ({interval.low:.1%} to {interval.high:.1%})"
    return f"{wins} won, {draws} drawn, {losses} lost: {share} won"


# --- checkpoints of a run against each other ---


def elo(counts) -> np.ndarray:
    """Ratings [P] by the model of Bradley and Terry, with a mean of 0.

    `counts` are wins, draws and losses [P, P, 3].

    A draw counts as half a win and half a loss. One draw is added to each pair, so that a player
    that never wins has a rating, too.
    """
    points = counts[..., 0] + (counts[..., 1] + 1) / 2
    np.fill_diagonal(points, 0.0)

    def loss_and_gradient(ratings):
        """Of winning points[i, j] games against j: -log sigmoid(r_i - r_j)."""
        difference = ratings[:, None] - ratings
        loss = (points * np.logaddexp(0.0, -difference)).sum()
        slope = -points * scipy.special.expit(-difference)
        return loss, slope.sum(axis=1) - slope.sum(axis=0)

    start = np.zeros(len(points))
    ratings = scipy.optimize.minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B").x
    return (ratings - ratings.mean()) * 400 / np.log(10)


def elo_interval(counts, samples: int = 300) -> np.ndarray:
    """95 % bootstrap intervals of the ratings, over the games of each pair: [2, P]."""
    rng = np.random.default_rng(0)
    i, j = np.triu_indices(len(counts), 1)
    games = counts[i, j].sum(axis=1)
    drawn = np.zeros_like(counts)
    ratings = []
    for _ in range(samples):
        drawn[i, j] = rng.multinomial(games, counts[i, j] / games[:, None])
        drawn[j, i] = drawn[i, j][:, ::-1]
        ratings.append(elo(drawn))
    return np.percentile(ratings, [2.5, 97.5], axis=0)


def round_robin(config, agents: list, keys, begins, opening: int) -> np.ndarray:
    """Wins, draws and losses of each agent against each other one: [P, P, 3]."""
    act = alphazero.make_policy(config)
    play = make_games(config, lambda opponent, key, state: act(opponent, state), opening)
    counts = np.zeros((len(agents), len(agents), 3), int)
    for i, j in itertools.combinations(range(len(agents)), 2):
        rewards = np.asarray(play(agents[i], agents[j], keys, begins))
        counts[i, j] = count_outcomes(rewards)
        counts[j, i] = counts[i, j][::-1]
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument(
        "--run-dir", type=Path, help="a run; if it does not exist, the config is trained into it"
    )
    parser.add_argument("--num-seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoints",
        type=int,
        default=9,
        help="of a training: before, and after 1, 1/2, 1/4, ...",
    )
    parser.add_argument("--games", type=int, default=200, help="against each opponent")
    parser.add_argument(
        "--opening", type=int, default=2, help="random moves at the start of a game"
    )
    parser.add_argument(
        "--search", type=int, nargs="*", default=[0, 32], help="simulations of the agent; 0 is none"
    )
    parser.add_argument(
        "--opponents", type=int, nargs="*", default=[0, 100], help="simulations; 0 is random moves"
    )
    parser.add_argument(
        "--elo", action="store_true", help="the checkpoints of the first agent against each other"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = arguments.run_dir or Path(folder) / "run"
        if not run_dir.exists():
            config = read_config(alphazero, arguments.config)
            train(config, arguments.seed, arguments.num_seeds, run_dir, arguments.checkpoints)
        check_finished(run_dir)
        measure(run_dir, arguments)


def check_finished(run_dir: Path) -> None:
    """Raise ValueError if the training was interrupted: the saved agents have fewer updates."""
    config = read_config(alphazero, run_dir / "config.yaml")
    done = load_results(run_dir).metrics["episodes"].shape[1]
    if done < config.num_updates:
        raise ValueError(f"{run_dir}: has {done} of {config.num_updates} updates; delete it")


def measure(run_dir: Path, arguments) -> None:
    """Print what the agents of a run reach."""
    _, config, agents = load_run(run_dir)
    keys = jax.random.split(jax.random.key(arguments.seed + 1), arguments.games)
    begins = np.arange(arguments.games) % 2 == 0
    for i in range(len(jax.tree.leaves(agents)[0])):
        agent = pick(agents, i)
        for search in arguments.search:
            setting = dataclasses.replace(config, eval_simulations=search)
            name = f"agent {i}, {player_name(search)}"
            if config.env_name == "tic_tac_toe":
                print(f"{name}: {examine_tic_tac_toe(setting, agent)}", flush=True)
            if config.env_name == "connect_four":
                print(f"{name}: {examine_connect_four(setting, agent)}", flush=True)
            for opponent in arguments.opponents:
                play = make_games(setting, make_opponent(config, opponent), arguments.opening)
                rewards = np.asarray(play(agent, None, keys, begins))
                against = f"MCTS with {opponent} simulations" if opponent else "random moves"
                print(f"{name}, against {against}: {describe(rewards)}", flush=True)
    if arguments.elo:
        measure_checkpoints(run_dir, config, arguments, keys, begins)


def measure_checkpoints(run_dir: Path, config, arguments, keys, begins) -> None:
    """Print the Elo ratings of the checkpoints of the first agent."""
    files = run_dir.glob("agent_*.safetensors")
    steps = sorted(int(file.stem.partition("_")[2]) for file in files)
    agents = []
    for count in steps:
        _, _, loaded = load_run(run_dir, file=f"agent_{count}.safetensors")
        agents.append(pick(loaded, 0))
    for search in arguments.search:
        setting = dataclasses.replace(config, eval_simulations=search)
        counts = round_robin(setting, agents, keys, begins, arguments.opening)
        ratings = elo(counts)
        low, high = elo_interval(counts)
        for i in range(len(agents)):
            line = f"{steps[i]} steps, {player_name(search)}:"
            line += f" Elo {ratings[i]:.0f} ({low[i]:.0f} to {high[i]:.0f})"
            if config.env_name == "connect_four":
                line += f", {examine_connect_four(setting, agents[i])}"
            print(line, flush=True)


def pick(agents, i: int):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[i]), agents)


def player_name(search: int) -> str:
    return f"search with {search} simulations" if search else "network alone"


if __name__ == "__main__":
    main()
