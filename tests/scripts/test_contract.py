"""What every script promises (CONTRIBUTING.md, "Write a new script"): each test runs for each
script.
"""

import ast
import contextlib
import dataclasses
import functools
import itertools
import sys
import typing
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax.traverse_util import flatten_dict
from support.compilation import jit_quickly
from support.small import field_names, origin, shifted_config, small_config
from support.training import seed_keys, traced, trained
from support.trees import arrays, assert_close, assert_same

from onejit.engine import evaluation
from onejit.engine.loop import episode_fields

CONTRACT = ["Config", "make_learner", "make_train", "make_policy", "make_env", "main"]


@functools.cache
def start(script):
    """The state of each seed, at the start of its training."""
    init, _ = script.make_learner(shifted_config(script))
    return list(map(jit_quickly(init), seed_keys()))


@functools.cache
def chunk(script, length):
    _, update = script.make_learner(shifted_config(script))
    return jit_quickly(lambda state: jax.lax.scan(update, state, None, length))


def train_in_chunks(script, lengths):
    """Each seed alone, without `vmap`, and with static floats."""
    runs = []
    for state in start(script):
        pieces = []
        for length in lengths:
            state, metrics = chunk(script, length)(state)
            pieces.append(metrics)
        metrics = jax.tree.map(lambda *xs: np.concatenate(xs), *pieces)
        runs.append({"runner_state": state, "metrics": metrics})
    return stack(runs)


def stack(trees):
    """Arrays of NumPy: JAX would compile a program for each shape."""
    leaves = [np.stack(leaves) for leaves in zip(*map(arrays, trees), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), leaves)


def lowered(script, program) -> str:
    """A program of `traced`, as CPUs are given it."""
    trace = program.trace(shifted_config(script), seed_keys())
    return trace.lower(lowering_platforms=("cpu",)).as_text()


@functools.cache
def toy_config(script):
    """The environment that ends after 5 steps of 12, with actions of the kind that the script
    takes.
    """
    if origin(script) == "script":
        pytest.skip("knows only its own environment")
    for name in toys.TEAMS if origin(script) == "jaxmarl" else toys.NAMES:
        config = small_config(script, env_name=name, env_params={"noise": 0.01})
        with contextlib.suppress(ValueError):
            script.make_env(config)
            return config
    raise AssertionError("make_env takes neither of the toy environments")


# --- the names ---


def test_names_of_the_contract_in_order(script):
    tree = ast.parse(Path(script.__file__).read_text())
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert [name for name in defined if name in CONTRACT] == CONTRACT
    assert tree.body[-1].test.left.id == "__name__"  # main runs under `if __name__ == "__main__"`


# --- the config ---


def test_config_is_frozen(script):
    config = script.Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.total_timesteps = 1


def test_leaves_of_the_config_are_its_float_fields(script):
    values = {name: float(i) for i, name in enumerate(field_names(script, float))}
    assert values, "no float field"
    leaves, treedef = jax.tree.flatten(dataclasses.replace(script.Config(), **values))
    assert sorted(leaves) == sorted(values.values())
    assert hash(treedef) == hash(jax.tree.structure(script.Config()))
    assert treedef == jax.tree.structure(script.Config())


def test_every_field_is_of_a_type_that_the_command_line_knows(script):
    for field in dataclasses.fields(script.Config):
        kind = typing.get_origin(field.type) or field.type
        assert kind in (int, float, bool, str, tuple, typing.Literal, Mapping), field.name
        default = getattr(script.Config(), field.name)
        is_choice = kind is typing.Literal
        assert default in typing.get_args(field.type) if is_choice else isinstance(default, kind), (
            field.name
        )


def test_static_fields_tell_configs_apart(script):
    def structure(**values):
        return jax.tree.structure(dataclasses.replace(script.Config(), **values))

    for name in field_names(script, int):
        assert structure(**{name: 5}) == structure(**{name: 5}) != structure(**{name: 6})


def test_env_params_are_a_static_mapping(script):
    if origin(script) == "script":
        pytest.skip("its environment's parameters are fields")

    def structure(env_params):
        return jax.tree.structure(dataclasses.replace(script.Config(), env_params=env_params))

    same = structure({"a": 1, "b": "x"}), structure({"b": "x", "a": 1})
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert same[0] != structure({"a": 2, "b": "x"})


def test_num_updates_is_rounded_down(script):
    config, name = small_config(script), "num_updates"
    assert config.num_updates == 6
    steps = config.num_envs * config.num_steps
    # what is rounded down is the training within an update
    if "num_generations" in field_names(script):
        name, steps = "inner_updates", config.inner_envs * config.inner_steps
        config = dataclasses.replace(config, total_timesteps=6 * steps + 5)
    # 5 above six updates to begin with
    for extra, num_updates in ((-6, 5), (-5, 6), (steps - 6, 6), (steps - 5, 7)):
        longer = dataclasses.replace(config, total_timesteps=config.total_timesteps + extra)
        assert getattr(longer, name) == num_updates


# --- training ---


def test_metrics(script):
    out = trained(script)
    assert set(out) == {"runner_state", "metrics"}
    assert {"episodic_return", "episodic_length", "episodes"} < set(out["metrics"])
    for name, metric in out["metrics"].items():
        assert metric.shape == (4, 6), name
        assert metric.dtype in (jnp.float32, jnp.int32), name


def test_fields_that_begin_anew_with_an_episode(script):
    """The package knows them by their names. What is learned is none of them."""
    init, _ = script.make_learner(small_config(script))
    state = jax.eval_shape(init, jax.random.key(0))
    names = episode_fields(state)
    if "num_generations" not in field_names(script):  # whose episodes begin anew in each update
        assert {"env_state", "game_state"} & set(names)
    kept = {"params", "opt_state", "target_params", "obs_statistics", "return_statistics", "key"}
    assert not kept & set(names)


def test_losses_are_finite_and_parameters_change(script):
    out, before = trained(script), stack(start(script))
    for name in set(out["metrics"]) - {"episodic_return", "episodic_length"}:
        assert np.isfinite(out["metrics"][name]).all(), name
    assert all(np.isfinite(leaf).all() for leaf in arrays(out["runner_state"].agent))
    after, before = (
        arrays(getattr(state, "params", state.agent)) for state in (out["runner_state"], before)
    )
    assert all((a != b).any() for a, b in zip(after, before, strict=True))


def test_training_calls_no_lapack(script):
    """On CPUs its batched calls block threads of XLA's pool while they wait for others of it:
    programs can hang.
    """
    program = lowered(script, traced(script)[0])
    assert "stablehlo" in program and "lapack" not in program


def test_statistics_of_episodes(script):
    """NaN where no episode ended, and only there; no episode is longer than its limit."""
    metrics = trained(script)["metrics"]
    ended = np.asarray(metrics["episodes"]) > 0
    assert ended.any(axis=1).all()  # every seed has seen some
    for name in ("episodic_return", "episodic_length"):
        np.testing.assert_array_equal(ended, np.isfinite(metrics[name]))
    assert np.nanmin(metrics["episodic_length"]) >= 1
    assert np.nanmax(metrics["episodic_length"]) <= 13  # the limit of `small_config`


def test_seeds_differ(script):
    out = trained(script)
    for tree in (out["runner_state"].agent, out["metrics"], stack(start(script))):
        for i, j in itertools.combinations(range(4), 2):
            assert any(
                not np.array_equal(leaf[i], leaf[j], equal_nan=True) for leaf in arrays(tree)
            )


def test_same_seed_repeats_bit_for_bit(script):
    run, _ = traced(script)
    assert_same(run(shifted_config(script), seed_keys()), trained(script))


@pytest.mark.common
def test_same_config_makes_the_same_program(script):
    """Nothing in it comes from a clock, from Python's or NumPy's random numbers, or from an
    object's address.
    """
    program, again = traced(script)[0], traced.__wrapped__(script)[0]
    assert lowered(script, program) == lowered(script, again)


def test_whole_together_with_traced_floats_as_in_chunks_alone_with_static_ones(script):
    assert_close(trained(script), train_in_chunks(script, (3, 3)))


@pytest.mark.common("ppo_continuous")
def test_chunks_of_any_length_agree_bit_for_bit(script):
    assert_same(train_in_chunks(script, [1] * 6), train_in_chunks(script, (3, 3)))


def test_old_keys_are_taken(script):
    train = script.make_train(shifted_config(script))
    found = jax.eval_shape(train, jax.random.PRNGKey(7))["metrics"]
    expected = trained(script)["metrics"]  # of four seeds, whose keys are new ones
    assert found.keys() == expected.keys()
    for name, metric in found.items():
        assert (4, *metric.shape) == expected[name].shape and metric.dtype == expected[
            name
        ].dtype, name


def test_the_annealed_rate_stays_at_0(script):
    """Whoever goes on with `update` after the last one learns nothing.

    The rate does not become negative.
    """
    if "anneal_lr" not in field_names(script) or "num_generations" in field_names(script):
        pytest.skip("no rate is annealed over its updates")
    first = jit_quickly(partial(jax.tree.map, lambda leaf: leaf[0]))
    state = first(trained(script)["runner_state"])
    for _ in range(2):
        before, (state, _) = state, chunk(script, 3)(state)
    assert_same(before.params, state.params)


def check_64_bits(script, **overrides):
    with jax.enable_x64(True):
        train = script.make_train(small_config(script, **overrides))
        out = jax.eval_shape(train, jax.random.key(0))
    agent = out["runner_state"].agent
    assert {leaf.dtype for leaf in jax.tree.leaves(agent.get("params", agent))} == {
        jnp.dtype("float32")
    }


def test_trains_with_64_bits(script):
    if script.__name__ == "alphazero":  # Pgx's tic_tac_toe fails with 64 bits
        check_64_bits(script, env_name="othello")
        return
    check_64_bits(script)
    if script.__name__ == "ppo_rnn":  # by default its actions are discrete
        for cell in ("gru", "mingru", "lru", "none"):
            check_64_bits(script, env_name="Pendulum-v1", cell=cell)
            check_64_bits(script, env_name="Pendulum-v1", cell=cell, observe_previous=True)
    if script.__name__ == "mappo":
        check_64_bits(script, cell="gru")


# --- floats that are traced ---


def test_a_new_float_does_not_retrace(script):
    run, traces = traced(script)
    for config in (shifted_config(script), small_config(script)):
        run(config, seed_keys())
    assert len(traces) == 1


def test_no_float_is_ignored(script):
    run, config = traced(script)[0], shifted_config(script)
    usual = arrays(trained(script))
    # only some environments shape rewards: tests/scripts/test_mappo.py
    elsewhere = ["shaping_fraction"]
    for name in (name for name in field_names(script, float) if name not in elsewhere):
        other = arrays(
            run(dataclasses.replace(config, **{name: getattr(config, name) / 1e6}), seed_keys())
        )
        assert any(a.tobytes() != b.tobytes() for a, b in zip(usual, other, strict=True)), name


def test_every_float_can_be_swept(script):
    config = shifted_config(script)
    values = {name: jnp.full(3, getattr(config, name)) for name in field_names(script, float)}
    grid = dataclasses.replace(config, **values)
    run = jax.jit(lambda config, rng: script.make_train(config)(rng))
    axes = jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, grid)
    sweep = jax.vmap(jax.vmap(run, (None, 0)), (axes, None))
    out = jax.eval_shape(sweep, grid, jax.random.split(jax.random.key(0), 2))
    assert {metric.shape for metric in out["metrics"].values()} == {(3, 2, 6)}
    assert all(leaf.shape[:2] == (3, 2) for leaf in jax.tree.leaves(out["runner_state"].agent))


# --- randomness ---


def test_a_learner_makes_no_random_key_and_keeps_all_types(script, monkeypatch):
    """All keys come from the key of the agent.

    Else a draw would be the same in all updates and for all seeds. An update that changes a type,
    such as a weak one, is compiled again when it takes what it has returned. The types of an
    environment's state are its own.
    """
    init, update = script.make_learner(shifted_config(script))
    make_key = jax.random.key

    def refuse(*args, **kwargs):
        caller = sys._getframe(1).f_code
        assert not (
            caller.co_filename == script.__file__ and caller.co_qualname.startswith("make_learner")
        ), caller
        return make_key(*args, **kwargs)

    monkeypatch.setattr(jax.random, "key", refuse)
    state = jax.eval_shape(init, make_key(0))
    after, _ = jax.eval_shape(update, state)
    for name in set(state._fields) - set(episode_fields(state)):
        before, new = (jax.tree.map(jax.typeof, getattr(x, name)) for x in (state, after))
        assert new == before, name


# --- policies: played by the tools, through the contract ---


def play(script, config):
    """`agents [4, ...], keys [N] -> steps [4, N, 12, ...]`"""
    record = evaluation.make_recorder(script, config, num_steps=12)
    return jax.vmap(jax.vmap(record, (None, 0)), (0, None))


@functools.cache
def toy_episodes(script):
    """Two episodes of each of four agents at the start of their training: [4, 2, 12]."""
    config = toy_config(script)
    init, _ = script.make_learner(config)

    @jit_quickly
    def start_and_play(keys):
        return play(script, config)(jax.vmap(init)(keys).agent, keys[:2])

    return start_and_play(seed_keys())


def test_agent_is_a_nested_dict_of_arrays(script):
    """That a file can hold by names joined with dots, with no replay and no optimizer in it."""
    state = trained(script)["runner_state"]
    agent = flatten_dict(state.agent, sep=".")
    assert agent and all(isinstance(leaf, jax.Array) and len(leaf) == 4 for leaf in agent.values())
    assert not any("replay" in name or "opt_state" in name for name in agent)


def test_policy_stops_counting_at_the_end_of_the_episode(script):
    episode = toy_episodes(script)
    assert episode.valid.shape == episode.reward.shape == (4, 2, 12)
    assert (episode.valid == (np.arange(12) < 5)).all()
    # states are those before the step
    assert (episode.env_state.time[..., :5] == np.arange(5)).all()
    pay = 1.5 if origin(script) == "jaxmarl" else 1.0  # the mean of a team
    # the environment goes on after the end of the episode
    np.testing.assert_allclose(episode.reward, pay, atol=0.1)
    assert np.ptp(episode.reward) > 0  # env_params has reached it


def test_policy_is_greedy(script):
    """No state of this environment is random: other keys, the same actions, which the states
    show.
    """
    state = toy_episodes(script).env_state
    actions = np.asarray(getattr(state, "inner", state).action)
    np.testing.assert_array_equal(actions[:, 0], actions[:, 1])
    assert len(np.unique(actions)) > 1


@pytest.mark.common
def test_policy_on_the_script_s_environment(script):
    key, other = seed_keys()[:2]
    episode = jit_quickly(play(script, shifted_config(script)))(
        trained(script)["runner_state"].agent, jnp.stack([key, other, key])
    )
    assert episode.valid.shape == episode.reward.shape and episode.valid.shape[:2] == (4, 3)
    assert {leaf.shape[:3] for leaf in jax.tree.leaves(episode.env_state)} == {episode.valid.shape}
    assert episode.valid[..., 0].all() and (np.diff(episode.valid.astype(int)) <= 0).all()
    first, _, again = (jax.tree.map(lambda leaf, i=i: leaf[:, i], episode) for i in range(3))
    assert_same(first, again)
