"""Configs that cannot train: each is one error, which begins with the field."""

import dataclasses
import importlib
import re

import jax
import pytest
from support import twin  # noqa: F401  registers WalkMasked
from support.files import SCRIPTS
from support.small import field_names


def make(name: str, **settings):
    """The learner of a script's defaults with these settings."""
    script = importlib.import_module(name)
    return script.make_learner(dataclasses.replace(script.Config(), **settings))


def refusal(name: str, **settings) -> str:
    with pytest.raises(ValueError) as error:
        make(name, **settings)
    return str(error.value)


# of all scripts that have the field
AT_LEAST_1 = ("update_epochs", "num_minibatches", "gradient_steps", "policy_delay", "batch_size")
AT_LEAST_1 += ("n_step", "target_update_interval")


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_would_be_trained(name):
    fields = field_names(importlib.import_module(name))
    for field in AT_LEAST_1:
        if field in fields:
            assert refusal(name, **{field: 0}).startswith(f"{field} = 0: must be at least ")
    if "num_minibatches" in fields:
        message = refusal(name, num_minibatches=3)
        assert message.startswith("num_minibatches = 3: must divide the ")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_update_needs_its_steps_and_a_place_in_the_replay(name):
    """The least number is named. One less is refused."""
    for field in {"total_timesteps", "buffer_size"} & {*field_names(importlib.import_module(name))}:
        least = int(
            re.search(rf"^{field} = 0: .*one update\D*(\d+)", refusal(name, **{field: 0}))[1]
        )
        assert refusal(name, **{field: least - 1}).startswith(f"{field} = {least - 1}: ")
        make(name, **{field: least})


@pytest.mark.parametrize("name", ["apex_dqn", "rainbow", "pqn", "pqn_rnn"])
def test_scripts_without_action_masks_say_so(name):
    init, _ = make(name, env_name="WalkMasked")
    with pytest.raises(ValueError, match=r"^obs: MaskedObservation is no array; only ppo.py and"):
        jax.eval_shape(init, jax.random.key(0))


STATES = {"env_name": "FrozenLake-misc", "normalize_obs": True}  # numbers, which are not in a space
BOOLS = {"buffer_dtype": "bool", "normalize_obs": True}  # all of which would be True


@pytest.mark.parametrize("name, settings, message", [
    ("alphazero", {"env_name": "nowhere"}, "env_name = nowhere: must be one of tic_tac_toe"),
    ("alphazero", {"env_name": "backgammon"}, "env_name = backgammon: must be one of"),
    ("alphazero", {"env_name": "board_games:No"}, "env_name = board_games:No: board_games has no"),
    ("alphazero", {"simulations": 1}, "simulations = 1: must be at least 2"),
    ("alphazero", {"max_considered_actions": 1}, "max_considered_actions = 1: must be at least 2"),
    ("alphazero", {"opponent_simulations": -1}, "opponent_simulations = -1: must not be negative"),
    ("alphazero", {"eval_simulations": -1}, "eval_simulations = -1: must not be negative"),
    ("apex_dqn", {"actor_sync_interval": 0}, "actor_sync_interval = 0: must be at least 1"),
    ("crossq", {"policy_delay": 4}, "policy_delay = 4: must divide gradient_steps = 6"),
    ("evolve_objective", {"fitness_episodes": 0}, "fitness_episodes = 0: must be at least 1"),
    ("evolve_objective", {"env_name": "Pendulum-v1"}, "env_name = Pendulum-v1: must have discrete"),
    ("evolve_objective", STATES, "normalize_obs = True"),
    ("flashsac", {"policy_delay": 3}, "policy_delay = 3: must divide gradient_steps = 4"),
    ("flashsac", {"batch_size": 1}, "batch_size = 1: must be at least 2"),
    ("flashsac", {"num_atoms": 1}, "num_atoms = 1: must be at least 2"),
    ("mappo", {"cell": "gru", "num_minibatches": 32}, "num_minibatches = 32: must divide the 16 "),
    ("ppo", STATES, "normalize_obs = True"),
    ("ppo", BOOLS, "buffer_dtype = bool: is for floats"),
    ("ppo_rnn", {"cell": "lru", "cell_size": 30}, "cell_size = 30: must be a multiple of 4"),
    ("ppo_rnn", {"observe": (0, 4)}, r"observe.*\(0, 4\).*4 entries"),
    ("ppo_rnn", {"observe": (-1,)}, "observe.*-1"),
    # divides the 8 x 128 steps of an update, not its 8 sequences
    ("ppo_rnn", {"num_minibatches": 16}, "num_minibatches = 16: .*8 sequences"),
    ("pqn_rnn", {"observe": (0, 4)}, r"observe.*\(0, 4\).*4 entries"),
    ("pqn_rnn", {"observe": (-1,)}, "observe.*-1"),
    ("pqn_rnn", {"env_name": "FrozenLake-misc", "observe": (16,)}, "observe.*16 entries"),
    # divides the 32 x 64 steps of an update, not its 32 sequences
    ("pqn_rnn", {"num_minibatches": 64}, "num_minibatches = 64: .*32 sequences"),
    ("rainbow", {"num_atoms": 1}, "num_atoms = 1: must be at least 2"),
    ("td3", {"policy_delay": 3}, "policy_delay = 3: must divide gradient_steps = 4"),
])  # fmt: skip
def test_settings_that_do_not_go_together(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, **settings)
