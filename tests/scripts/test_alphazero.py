"""AlphaZero against brute force: a toy game, tic_tac_toe solved exactly, and what is shown."""

import itertools
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from board_games import Nim, nim_values
from PIL import Image
from support.compilation import jit_quickly
from support.files import ROOT
from support.small import small_config

import alphazero
from onejit.watch import play, render
from onejit.watch.boards import after_each_move, move_names, text, to_move
from onejit.watch.drawing import drawing_of
from onejit.watch.formats import check_formats

sys.path.insert(0, str(ROOT / "benchmarks"))

import alphazero_strength as strength

from onejit.engine.evaluation import policy_of


def tiny(**overrides):
    """A training on the toy, without the opponent's search, which takes long to compile."""
    settings = dict(env_name="board_games:Nim", hidden_sizes=(8,), opponent_simulations=0)
    return alphazero.Config(**settings | overrides)


def states_of(game, piles):
    """The toy's states in which player 1 moves. To be called in a jit: it is many programs."""
    none = (jnp.zeros(2), jnp.bool_(False), jnp.int32(0))
    return jax.vmap(lambda pile: game.state(pile, jnp.int32(1), *none))(piles)


# --- pieces ---


def test_neighborhoods_and_a_dense_layer_are_a_convolution():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 5, 4, 3)), rng.normal(size=(3, 3, 3, 7))

    @jit_quickly
    def outputs(x, kernel):
        names = ("NHWC", "HWIO", "NHWC")
        theirs = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)
        return alphazero.neighborhoods(x) @ kernel.reshape(-1, 7), theirs

    np.testing.assert_allclose(*outputs(x, kernel), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network", ["mlp", "residual"])
def test_networks(network):
    config = tiny(network=network, channels=8, num_blocks=1)
    net = alphazero.make_network(config, alphazero.make_game("tic_tac_toe"))
    obs = np.random.default_rng(0).random((5, 3, 3, 2)) < 0.5

    @jit_quickly
    def outputs(obs):
        params = jax.tree.map(lambda leaf: leaf + 0.5, net.init(jax.random.key(1), obs))
        return params, net.apply(params, obs), net.apply(params, obs[2])

    params, (logits, value), one = jax.device_get(outputs(obs))
    assert logits.shape == (5, 9) and value.shape == (5,) and np.abs(value).max() <= 1
    np.testing.assert_allclose(one[0], logits[2], rtol=1e-3, atol=1e-4)
    assert ("LayerNorm_0" in params["params"]) == (network == "residual")


# --- search ---


def test_plain_mcts_finds_the_winning_moves():
    game = Nim()
    choose = jax.vmap(alphazero.make_mcts(game, 100))
    piles, keys = np.array([1, 2, 4, 5, 7] * 4), jax.random.split(jax.random.key(0), 20)
    moves = np.asarray(jit_quickly(lambda piles: choose(keys, states_of(game, piles)))(piles))
    assert all(nim_values(pile)[move] == 1 for pile, move in zip(piles, moves, strict=True))


# --- the environment: a game against an opponent ---


def test_match_is_the_game_from_the_agent_s_side():
    """The agent is always to move.

    Rewards are its own, also for the opponent's moves; both sides begin games.
    """
    env, env_params = alphazero.make_env(tiny())
    assert int(env_params.max_steps_in_episode) == 7

    def play(key):
        def step(carry, key):
            obs, state = carry
            obs, state, reward, terminated, truncated, info = env.step(
                key, state, jnp.int32(0), env_params
            )
            return (obs, state), (carry[0], reward, terminated, truncated, info)

        reset_key, key = jax.random.split(key)
        return jax.lax.scan(step, env.reset(reset_key, env_params), jax.random.split(key, 30))[1]

    found = jit_quickly(lambda key: jax.vmap(play)(jax.random.split(key, 20)))(jax.random.key(0))
    obs, rewards, terminated, truncated, info = jax.device_get(found)
    assert (obs.current_player == 0).all() and not obs.terminated.any() and not truncated.any()
    after, replied = info["positions"]
    final = info["final_observation"]
    np.testing.assert_array_equal(after.pile, obs.pile - 1)
    np.testing.assert_array_equal(final.pile, replied.pile)
    assert ((final.pile == 0) == terminated).all()
    won = np.where(after.pile == 0, 1.0, np.where(replied.pile == 0, -1.0, 0.0))
    np.testing.assert_array_equal(rewards, won)
    replies = after.pile - replied.pile
    assert set(replies[after.pile > 1].tolist()) == {1, 2} and (replies[after.pile == 1] == 1).all()
    begun = obs._step_count[:, 1:][terminated[:, :-1]]
    assert set(begun.tolist()) == {0, 1} and 0.3 < begun.mean() < 0.7


# --- boards ---


def test_boards_as_text_and_the_names_of_moves():
    game = alphazero.make_game("connect_four")
    step, state = jit_quickly(game.step), jit_quickly(game.init)(jax.random.key(0))
    for column in (3, 3, 0):
        state = step(state, column)
    assert text(state).splitlines()[0] == "    a b c d e f g"
    assert [line.split() for line in text(state).splitlines()[-2:]] == [
        list("...O..."),
        list("X..X..."),
    ]
    assert move_names(state) == dict(zip("abcdefg", range(7), strict=True)) and to_move(state) == 2
    names = move_names(jit_quickly(alphazero.make_game("othello").init)(jax.random.key(0)))
    assert names == {"d3": 19, "c4": 26, "f5": 37, "e6": 44}


def test_moves_of_both_players_in_order():
    """An episode of the toy's states: after each move of either player, without a reply to the last
    move.
    """
    make = jax.vmap(lambda steps: Nim().state(0, 0, jnp.zeros(2), False, steps))
    numbers = np.array([[1, 3, 5], [2, 4, 6], [3, 5, 6]])
    made = jax.device_get(jit_quickly(jax.vmap(make))(numbers))
    states, after, replied = (jax.tree.map(lambda leaf, i=i: leaf[i], made) for i in range(3))
    states, rewards = after_each_move(states, (after, replied), np.array([0.0, 0.0, 1.0]))
    assert states._step_count.tolist() == [1, 2, 3, 4, 5, 6]
    assert rewards.tolist() == [0, 0, 0, 0, 0, 1]


# --- the solver, and whole trainings ---


def test_solver_of_tic_tac_toe():
    """Known figures of the game."""
    assert len(strength.positions()) == 4520 and strength.solved() == 0
    assert strength.solved((1, 2, 0, 0, 0, 0, 0, 0, 0)) == 1  # an edge beside the corner loses


@pytest.mark.slow
def test_tic_tac_toe_is_never_lost():
    """The default training, against all lines of play of both sides.

    The network alone may miss a rare line.
    """
    out = jax.jit(alphazero.make_train(alphazero.Config()))(jax.random.key(0))
    agent = out["runner_state"].agent
    for simulations, most in ((32, 0), (0, 30)):
        _, act = policy_of(alphazero, alphazero.Config(eval_simulations=simulations))
        found = strength.examine(
            lambda states, act=act: jax.vmap(lambda obs: act(agent, (), obs)[0])(states)
        )
        assert sum(found.losses) <= most and found.optimal > 0.95
    assert np.asarray(out["metrics"]["random_losses"])[-50:].sum() <= 5


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two agents of a few updates."""
    config = small_config(alphazero)
    run_dir = tmp_path_factory.mktemp("alphazero") / "run"
    alphazero.main(config, num_seeds=2, run_dir=run_dir)
    return run_dir


@pytest.mark.slow
def test_pictures_of_a_run(finished):
    assert "<svg" in (finished / "game.svg").read_text()
    assert matplotlib.image.imread(finished / "game_value.png").std() > 0.01
    paths = render.main(finished, formats=("svg", "gif"))
    assert {path.suffix for path in paths} == {".svg", ".gif"} and len(paths) == 4
    for path in paths:
        if path.suffix == ".svg":
            frames = path.read_text().count('class="frame"')
        else:
            assert Image.open(path).n_frames == frames >= 6
    with pytest.raises(ValueError, match="formats: this environment can be drawn as svg"):
        render.main(finished, formats=("html",))


@pytest.mark.slow
def test_a_person_plays_in_the_terminal(finished, monkeypatch, capsys):
    """Every cell is tried in turn. The last line says who has won."""
    for flags in ({}, {"second": True, "simulations": 4, "agent": 1}):
        words = itertools.cycle(
            ["z9", *(f"{column}{row}" for row in (1, 2, 3) for column in "abc")]
        )
        monkeypatch.setattr("builtins.input", lambda prompt, words=words: next(words))
        reward = play.main(finished, **flags)
        said = capsys.readouterr().out
        assert "z9: is not a legal move" in said
        assert (
            said.splitlines()[-1] == {1.0: "you win", -1.0: "the agent wins", 0.0: "a draw"}[reward]
        )
        assert flags.get("agent") is None or "\nagent 1 plays X and begins\n" in said

    def ends(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    assert play.main(finished) == 0.0 and "not finished" in capsys.readouterr().out
    for flags, words in (
        ({"agent": 2}, "agent = 2: must be from 0 to 1"),
        ({"simulations": -1}, "simulations = -1"),
    ):
        with pytest.raises(ValueError, match=words):
            play.main(finished, **flags)


def test_play_says_where_it_does_not_apply():
    with pytest.raises(
        ValueError, match="CartPole-v1 is no board game; play is for runs of alphazero"
    ):
        play.main(ROOT / "agents" / "ppo_cartpole")


def test_render_says_where_it_does_not_apply():
    """Pgx draws its own games alone, and GIFs draw stones."""
    for formats in ((), ("svg",), ("gif",)):
        with pytest.raises(ValueError, match="formats: this environment can be drawn in no format"):
            check_formats(formats, drawing_of(alphazero.Match(Nim(), 0)))
    hex_board = drawing_of(alphazero.Match(alphazero.make_game("hex"), 0))
    with pytest.raises(ValueError, match="formats: this environment can be drawn as svg"):
        check_formats(("gif",), hex_board)
    assert check_formats((), hex_board) == ("svg",)
