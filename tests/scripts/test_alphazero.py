"""AlphaZero against brute force: a toy game, tic_tac_toe solved exactly, and the pieces against
NumPy.
"""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from board_games import Nim, NimAgain, nim_value, nim_values
from PIL import Image
from support.compilation import jit_quickly
from support.files import ROOT
from support.small import small_config

import alphazero
from onejit.watch import play, render
from onejit.watch.adapters import adapter_of
from onejit.watch.boards import after_each_move, check_stones, move_names, text, to_move
from onejit.watch.formats import check_formats

sys.path.insert(0, str(ROOT / "benchmarks"))

import alphazero_strength as strength

from onejit.engine.evaluation import policy_of

GAMES = pytest.mark.parametrize("again", [False, True])


def nim(again=False):
    return NimAgain() if again else Nim()


def tiny(**overrides):
    """A training on the toy, without the opponent's search, which takes long to compile."""
    settings = dict(
        env_name="board_games:Nim", num_envs=8, num_steps=4, simulations=4, num_minibatches=2
    )
    settings |= dict(
        update_epochs=1, hidden_sizes=(8,), opponent_simulations=0, eval_games=4, eval_steps=4
    )
    return alphazero.Config(**settings | {"total_timesteps": 8 * 4 * 50} | overrides)


@functools.cache
def learner(**overrides):
    config = tiny(**overrides)
    init, update = alphazero.make_learner(config)
    return config, jit_quickly(init)(jax.random.key(0)), update


def states_of(game, piles, player=1):
    """The toy's states in which `player` is to move. To be called in a jit: it is many programs."""
    none = (jnp.zeros(2), jnp.bool_(False), jnp.int32(0))
    return jax.vmap(lambda pile: game.state(pile, jnp.int32(player), *none))(piles)


# --- pieces ---


def test_targets_against_their_definition():
    """The sum over later moves of rewards times the discounts in between, and of the value after
    the last.
    """
    rng = np.random.default_rng(0)
    rewards, last = rng.normal(size=(6, 50)), rng.normal(size=50)
    discounts = rng.choice([-0.9, 0.9, 0.0], size=(6, 50))
    expected = np.zeros((6, 50))
    for t in range(6):
        product = np.ones(50)
        for k in range(t, 6):
            expected[t] += product * rewards[k]
            product = product * discounts[k]
        expected[t] += product * last
    found = jit_quickly(alphazero.value_targets)(rewards, discounts, last)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_games_that_are_cut_off_are_no_draws():
    rewards, discounts = np.zeros((3, 2)), np.full((3, 2), -1.0)
    discounts[2, 1] = 0.0  # the second game ends with a draw
    targets = jit_quickly(alphazero.value_targets)(rewards, discounts, np.full(2, 0.5))
    np.testing.assert_allclose(targets, [[-0.5, 0.0], [0.5, 0.0], [-0.5, 0.0]])


def test_policy_loss_knows_legal_actions_alone():
    rng = np.random.default_rng(0)
    logits, legal = 5 * rng.normal(size=(20, 6)), rng.random((20, 6)) < 0.5
    legal[:, 0] = True
    weights = np.where(legal, rng.random((20, 6)), 0.0)
    weights /= weights.sum(axis=1, keepdims=True)

    @jit_quickly
    def losses(logits):
        loss = lambda x: alphazero.policy_loss(x, legal, weights).sum()  # noqa: E731
        masked = alphazero.mask_logits(logits, legal)
        return *jax.value_and_grad(loss)(logits), jax.nn.softmax(masked)

    loss, gradient, policy = jax.device_get(losses(logits))
    expected = [
        -w[m] @ (x[m] - np.log(np.exp(x[m]).sum()))
        for x, m, w in zip(logits, legal, weights, strict=True)
    ]
    np.testing.assert_allclose(loss, np.sum(expected), rtol=1e-4)
    assert (gradient[~legal] == 0).all() and np.abs(gradient[legal]).max() > 0
    assert (policy[~legal] == 0).all()


def test_moves_are_sampled_in_proportion_to_visits():
    visits = np.tile([0, 6, 3, 1], (20_000, 1))
    actions = np.asarray(jit_quickly(alphazero.sample_by_visits)(jax.random.key(0), visits))
    np.testing.assert_allclose(
        np.bincount(actions, minlength=4) / 20_000, [0.0, 0.6, 0.3, 0.1], atol=0.02
    )


@GAMES
def test_sign_of_a_move(again):
    """The discount is negative if the opponent moves next, positive if the same player does, and 0
    after the end.
    """
    game = nim(again)
    play = jax.vmap(lambda state, action: alphazero.play_move(game, state, action, 0.9))
    after, reward, discount = jit_quickly(lambda piles, *args: play(states_of(game, piles), *args))(
        np.array([5, 5, 5, 1, 2]), np.array([0, 1, 2, 0, 1])
    )
    kept = 0.9 if again else 0.0  # the third action is illegal in the other game, which it ends
    np.testing.assert_allclose(discount, [-0.9, -0.9, kept, 0.0, 0.0])
    # of player 1, who moved
    np.testing.assert_allclose(reward, [0.0, 0.0, 0.0 if again else -1.0, 1.0, 1.0])
    assert after.terminated.tolist() == [False, False, not again, True, True]


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


@functools.cache
def searcher(again):
    """A search `(piles, lie, flagged)` that knows nothing but the rules.

    At the end of a game its value is `lie`. With `flagged` its roots claim to have ended. It gives
    actions, their weights, and the values and the actions' values of the roots.
    """
    game = nim(again)

    def evaluate(lie, key, states):
        return jnp.zeros((len(states.pile), 3)), lie * states.terminated

    search = alphazero.make_gumbel_search(
        game, evaluate, gamma=1.0, simulations=200, max_considered_actions=3
    )

    @jit_quickly
    def found(piles, lie, flagged):
        states = states_of(game, piles)
        states = states.replace(terminated=states.terminated | flagged)
        output = search(lie, jax.random.key(0), states, gumbel_scale=0.0)
        root = output.search_tree.summary()
        return output.action, output.action_weights, root.value, root.qvalues

    return lambda piles, lie=0.0, flagged=False: jax.device_get(found(piles, lie, flagged))


@GAMES
def test_search_finds_the_winning_moves(again):
    """Of both players, in all positions, and its values have the right sign."""
    piles = np.arange(1, 5 if again else 8)
    actions, all_weights, _, _ = searcher(again)(piles)
    for pile, action, weights in zip(piles, actions, all_weights, strict=True):
        assert nim_values(pile, again)[action] == nim_value(pile, again), pile
        values = np.array(nim_values(pile, again))
        assert (weights[np.isinf(values)] == 0).all()
        assert weights[values == values.max()].sum() > 0.9, pile


def test_a_game_that_ended_within_the_search_stays_ended():
    """What the network says of positions after the end changes nothing, nor do moves after the
    end.
    """
    (_, *honest), (_, *lying) = (searcher(False)(np.arange(1, 8), lie) for lie in (0.0, 9.0))
    for ours, theirs in zip(honest[:2], lying[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # one stone: every simulation wins
    np.testing.assert_allclose(honest[1][0], 1.0, atol=0.02)


def test_a_search_from_a_state_that_is_flagged_as_ended_learns_nothing():
    """The fault of Pgx's auto_reset, which keeps `terminated` on the new state: all moves seem
    alike.
    """
    assert (searcher(False)(np.arange(1, 8), flagged=True)[-1] == 0).all()


def test_plain_mcts_finds_the_winning_moves():
    game = nim()
    choose = jax.vmap(alphazero.make_mcts(game, 100))
    piles, keys = np.array([1, 2, 4, 5, 7] * 4), jax.random.split(jax.random.key(0), 20)
    moves = np.asarray(jit_quickly(lambda piles: choose(keys, states_of(game, piles)))(piles))
    assert all(nim_values(pile)[move] == 1 for pile, move in zip(piles, moves, strict=True))


def test_playout_is_the_outcome_for_the_player_to_move():
    @jit_quickly
    def outcomes(pile, player, terminated):
        state = jax.tree.map(lambda x: x[0], states_of(nim(), pile[None], player))
        state = state.replace(terminated=terminated)
        keys = jax.random.split(jax.random.key(0), 4000)
        return jax.vmap(functools.partial(alphazero.playout, nim()), (0, None))(keys, state)

    for player in (0, 1):
        one, two = (np.asarray(outcomes(np.int32(pile), player, False)) for pile in (1, 2))
        assert (one == 1).all()
        # takes two and wins, or one and loses
        np.testing.assert_allclose(two.mean(), 0.0, atol=0.06)
    assert (np.asarray(outcomes(np.int32(1), 1, True)) == 0).all()


# --- self-play ---


@functools.cache
def recorded():
    """A compiled `update`, and a list of what it gave to `value_targets`."""
    config, state, update = learner()
    seen, targets = [], alphazero.value_targets

    def record(*args):
        jax.debug.callback(
            lambda *arrays: seen.append([np.asarray(each) for each in arrays]), *args
        )
        return targets(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alphazero, "value_targets", record)
        update = jit_quickly(update).lower(state).compile()
    return config, state, update, seen


@pytest.mark.slow
def test_rollout_ends_begins_and_is_bootstrapped():
    """New games are not flagged as ended.

    The end of the rollout is bootstrapped with the search's value there.
    """
    config, before, update, seen = recorded()
    state, metrics = update(before)
    jax.effects_barrier()
    rewards, discounts, last_value = seen[-1]
    assert rewards.shape == discounts.shape == (4, 8) and last_value.shape == (8,)
    ended = discounts == 0
    assert ended.sum() == metrics["self_play_games"] > 3 and metrics["self_play_draws"] == 0
    assert (rewards[ended] == 1).all() and (rewards[~ended] == 0).all()  # whoever moves last wins
    assert (discounts[~ended] == -1).all()
    assert not state.game_state.terminated.any() and (state.game_state.rewards == 0).all()
    fresh = ended[-1]
    assert fresh.any() and (state.game_state._step_count[fresh] == 0).all()
    assert (np.asarray(state.game_state.pile)[fresh] >= 4).all()
    since = np.where(ended.any(axis=0), ended[::-1].argmax(axis=0), 4)
    np.testing.assert_array_equal(state.game_state._step_count, since)
    game = nim()
    search = alphazero.make_network_search(config, game, config.simulations)
    _, collect_key, *_ = jax.random.split(before.key, 4)
    key = jax.random.split(collect_key, config.num_steps + 1)[-1]
    values = jit_quickly(search)(before.params, key, state.game_state).search_tree.summary().value
    np.testing.assert_allclose(last_value, values, rtol=1e-3, atol=1e-4)
    assert np.ptp(values) > 0.01


@pytest.mark.slow  # the twin covers it
def test_moves_of_self_play_are_sampled(monkeypatch):
    """By `sample_by_visits` in the first `sampled_moves` moves of a game, and by the search after
    them.
    """
    config, state, _ = learner()

    def games_after(sampled_moves):
        with monkeypatch.context() as patch:  # always the first action, one stone
            patch.setattr(
                alphazero, "sample_by_visits", lambda key, visits: jnp.zeros(len(visits), jnp.int32)
            )
            _, update = alphazero.make_learner(
                dataclasses.replace(config, sampled_moves=sampled_moves)
            )
            return jit_quickly(lambda state: update(state)[0].game_state)(state)

    pile, after = np.asarray(state.game_state.pile), games_after(4)
    assert (
        set(pile[pile > 4])
        and (after._step_count[pile > 4] == 4).all()
        and (after.pile == pile - 4)[pile > 4].all()
    )
    by_search = games_after(0)
    assert (by_search.pile != after.pile).any() and (by_search._step_count != 4).any()


def test_evaluation_counts_each_game_once():
    _, state, update, _ = recorded()
    for _ in range(3):
        state, metrics = update(state)
        outcomes = [int(metrics[f"random_{name}"]) for name in ("wins", "draws", "losses")]
        assert sum(outcomes) == metrics["episodes"] and outcomes[1] == 0
        if metrics["episodes"]:
            expected = (outcomes[0] - outcomes[2]) / metrics["episodes"]
            np.testing.assert_allclose(metrics["episodic_return"], expected, rtol=1e-5)


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


def test_the_agent_is_to_move_where_players_move_again():
    """The first turn of the opponent is a whole turn, also in a game in which it is several
    moves.
    """
    match = alphazero.Match(NimAgain(), 0)
    reset = jax.vmap(lambda key: match.reset(key, None)[0])
    state = jit_quickly(lambda key: reset(jax.random.split(key, 200)))(jax.random.key(0))
    state = jax.device_get(state)
    assert ((state.current_player == 0) | state.terminated).all() and state.terminated.mean() < 0.2


@pytest.mark.parametrize("simulations", [0, 16])
def test_policy_is_legal_and_search_improves_it(simulations):
    """The network alone is at the start of its training.

    A search that sees the end of the game wins.
    """
    config, state, _ = learner()
    _, act = policy_of(alphazero, dataclasses.replace(config, eval_simulations=simulations))
    piles = np.array([1, 2, 4])
    choose = jax.vmap(lambda obs: act(state.agent, (), obs)[0])
    moves = np.asarray(jit_quickly(lambda piles: choose(states_of(nim(), piles)))(piles))
    assert (moves < 2).all() and moves[0] == 0
    if simulations:
        assert all(nim_values(pile)[move] == 1 for pile, move in zip(piles, moves, strict=True))


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
    with pytest.raises(ValueError, match="env_name = hex: play draws boards of tic_tac_toe"):
        check_stones(alphazero.make_game("hex"), "play draws")


def test_moves_of_both_players_in_order():
    """An episode of the toy's states: after each move of either player, without a reply to the last
    move.
    """
    make = jax.vmap(lambda steps: Nim().state(0, 0, jnp.zeros(2), False, steps))
    numbers = np.array([[1, 3, 5], [2, 4, 6], [3, 5, 6]])
    made = jax.device_get(jit_quickly(jax.vmap(make))(numbers))
    states, after, replied = (jax.tree.map(lambda leaf, i=i: leaf[i], made) for i in range(3))
    states, rewards = after_each_move(states, (after, replied), np.array([0.0, 0.0, 1.0]))
    assert states._step_count.tolist() == [1, 2, 3, 4, 5, 6] and rewards.tolist() == [
        0,
        0,
        0,
        0,
        0,
        1,
    ]


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


@pytest.mark.slow
def test_sampling_by_visits_explores_more_than_the_action_of_the_search():
    """With the action that the search returns, self-play sees too few games to learn all
    positions.
    """
    optimal = {}
    for sampled_moves in (30, 0):
        config = alphazero.Config(
            sampled_moves=sampled_moves, total_timesteps=200_000, opponent_simulations=0
        )
        agent = jax.jit(alphazero.make_train(config))(jax.random.key(0))["runner_state"].agent
        _, act = policy_of(alphazero, config)

        def play(states, act=act, agent=agent):
            return jax.vmap(lambda obs: act(agent, (), obs)[0])(states)

        found = strength.examine(play)
        optimal[sampled_moves] = found.optimal
    assert optimal[30] > optimal[0] + 0.05


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
    with pytest.raises(ValueError, match="formats: html is for brax"):
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
    for formats in ((), ("svg",)):
        with pytest.raises(ValueError, match="formats: svg draws the games of Pgx, and no others"):
            check_formats(formats, adapter_of(alphazero.Match(Nim(), 0)))
    with pytest.raises(ValueError, match="env_name = nim: gif and mp4 draw boards of tic_tac_toe"):
        check_formats(("gif",), adapter_of(alphazero.Match(Nim(), 0)))
    assert check_formats((), adapter_of(alphazero.Match(alphazero.make_game("hex"), 0))) == ("svg",)
