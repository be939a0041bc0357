"""Trainings of the scripts and of their peers with the peers' hyperparameters: what
benchmarks/speed.py times and benchmarks/returns_vs_peers.py compares by their returns.

A function for a row takes the command line's options and a number of steps and returns `(ours,
theirs)`: two functions of a random key. `ours` is a Training, `theirs` is None if the peer is not
there. A contestant that runs as a process or in a loop in Python is a Timed: a function of the
seeds' keys that returns the seconds it took.

Peers run from their own files. What newer packages took from them is put back: gymnax's five-value
step, `jax.tree_map`, and W&B and hydra. RL-X compiles and trains in one call: here it returns what
it would compile. JaxMARL's log for W&B is left out. On CPUs Flax's orthogonal initialization, which
can hang under `vmap` there (dev/hangs.md), is replaced by the scripts' own. PureJaxRL's dqn.py
gives each seed the same key by mistake: here each has its own.
"""

import dataclasses
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import flax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax import wrappers
from gymnax.wrappers import LegacyStepAPIWrapper

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ppo import orthogonal

PPO = {
    "anneal_lr": True,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_eps": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}
CLASSIC = PPO | {
    "lr": 2.5e-4,
    "num_envs": 4,
    "num_steps": 128,
    "update_epochs": 4,
    "num_minibatches": 4,
}
MINATAR = PPO | {
    "lr": 5e-3,
    "num_envs": 64,
    "num_steps": 128,
    "update_epochs": 4,
    "num_minibatches": 8,
}
BRAX = PPO | {
    "lr": 3e-4,
    "anneal_lr": False,
    "num_envs": 2048,
    "num_steps": 10,
    "update_epochs": 4,
    "num_minibatches": 32,
    "ent_coef": 0.0,
}
DQN = {
    "lr": 2.5e-4,
    "gamma": 0.99,
    "num_envs": 10,
    "buffer_size": 10_000,
    "learning_starts": 10_000,
    "tau": 1.0,
    "epsilon_start": 1.0,
    "epsilon_finish": 0.05,
    "target_update_interval": 500,
}
PQN = {
    "lr": 1e-4,
    "gamma": 0.99,
    "num_envs": 32,
    "num_steps": 64,
    "num_minibatches": 16,
    "max_grad_norm": 10.0,
}
PQN_MINATAR = {
    "lr": 5e-4,
    "gamma": 0.99,
    "num_envs": 128,
    "num_steps": 32,
    "num_minibatches": 32,
    "max_grad_norm": 10.0,
}
PPO_MUJOCO = {
    "num_envs": 1,
    "num_steps": 2048,
    "update_epochs": 10,
    "num_minibatches": 32,
    "lr": 3e-4,
    "clip_eps": 0.2,
    "ent_coef": 0.0,
}
SAC_MUJOCO = {
    "num_envs": 1,
    "num_steps": 1,
    "gradient_steps": 1,
    "batch_size": 256,
    "buffer_size": 1_000_000,
    "learning_starts": 256,
    "policy_lr": 3e-4,
    "q_lr": 1e-3,
    "hidden_sizes": (256, 256),
}
CROSSQ_MUJOCO = SAC_MUJOCO | {
    "num_steps": 3,
    "gradient_steps": 3,
    "policy_delay": 3,
    "policy_lr": 1e-3,
    "critic_hidden_sizes": (256, 256),
}
FLASHSAC = {  # the critics have about as many parameters as in CROSSQ_MUJOCO
    "num_envs": 1,
    "num_steps": 2,
    "gradient_steps": 2,
    "policy_delay": 2,
    "batch_size": 256,
    "learning_starts": 256,
    "hidden_size": 32,
    "critic_hidden_size": 64,
    "num_blocks": 2,
}
REJAX = {"batch_size": 256, "buffer_size": 20_000}
HALF_CHEETAH = "onejit.envs.envpool:HalfCheetah-v4"

# --- contestants ---


class Training:
    """`train(key)` of a script."""

    def __init__(self, script: str, steps: int, **settings):
        self.script = importlib.import_module(script)
        self.config = self.script.Config(total_timesteps=steps, **settings)
        self.train = self.script.make_train(self.config)

    def __call__(self, key):
        return self.train(key)


@dataclasses.dataclass
class Timed:
    """`run(keys)` returns the seconds of a training, without what is done before it."""

    run: Callable

    def __call__(self, keys) -> float:
        return self.run(keys)


def add_flags(parser) -> None:
    """The flags that say where the peers are."""
    clones = ("purejaxrl", "purejaxql", "cleanrl", "jaxmarl", "pgx", "rlx")
    for name in clones:
        parser.add_argument(f"--{name}", type=Path, help="a clone of the repository")
    parser.add_argument("--cleanrl-python", type=Path, help="a Python that has what CleanRL needs")
    parser.add_argument(
        "--sbx-python", type=Path, help="a Python that has sbx-rl and gymnasium[mujoco]"
    )


def check_flags(parser, options) -> None:
    """Make the paths absolute, and end with an error if one is not there."""
    for name, value in vars(options).items():
        if isinstance(value, Path) and name != "out":
            if not value.exists():
                parser.error(f"--{name.replace('_', '-')} {value}: is not there")
            setattr(options, name, value.absolute())


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def upper(settings: dict, **more) -> dict:
    return {name.upper(): value for name, value in settings.items()} | more


# --- a peer's file as a module ---


def load(path: Path, name: str, flags=(), corrections=()):
    """A peer's file as a module, with what it needs of other packages as it was.

    `corrections` are pairs of a text in the file and what replaces it.
    """
    source = path.read_text()
    for text, correction in corrections:
        if source.count(text) != 1:
            raise ValueError(f"{path}: does not have {text!r} once")
        source = source.replace(text, correction)
    stub_absent_packages(flags)
    jax.tree_map = jax.tree.map
    wrappers.purerl.LogWrapper = five_value_log_wrapper
    of_flax = nn.initializers.orthogonal
    if jax.default_backend() == "cpu":
        nn.initializers.orthogonal = our_orthogonal
    sys.path.insert(0, str(path.parent))  # for its neighbours
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        exec(compile(source, path, "exec"), module.__dict__)
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop("wrappers", None)
        wrappers.purerl.LogWrapper = wrappers.LogWrapper
        nn.initializers.orthogonal = of_flax
    return module


def stub_absent_packages(flags) -> None:
    """Modules that peers import for their command lines and logs, or do not use."""
    for absent in ("navix", "wandb", "hydra", "omegaconf"):
        module = sys.modules.setdefault(absent, types.ModuleType(absent))
        module.OmegaConf = types.SimpleNamespace(from_cli=lambda: dict(flags))
        module.main = lambda **_: lambda function: function
        module.log = lambda _: None


def five_value_log_wrapper(env):
    return LegacyStepAPIWrapper(wrappers.LogWrapper(env))


def our_orthogonal(scale=1.0, *_, **__):
    return orthogonal(scale)


def five_values(name: str):
    env, params = gymnax.make(name)
    return LegacyStepAPIWrapper(env), params


# --- PureJaxRL ---


def ppo(options, steps, env_name="CartPole-v1", settings=CLASSIC, activation="tanh"):
    ours = Training(
        "ppo", steps, env_name=env_name, convolutions=(), activation=activation, **settings
    )
    if not options.purejaxrl:
        return ours, None
    module = load(options.purejaxrl / "purejaxrl" / "ppo.py", "purejaxrl_ppo")
    module.gymnax = types.SimpleNamespace(make=five_values)
    config = upper(
        settings,
        ENV_NAME=env_name,
        TOTAL_TIMESTEPS=steps,
        ACTIVATION=activation,
        DEBUG=False,
    )
    return ours, module.make_train(config)


def ppo_minatar(options, steps):
    return ppo(options, steps, "Breakout-MinAtar", MINATAR, "relu")


def ppo_continuous(options, steps, env_name="hopper"):
    ours = Training(
        "ppo_continuous",
        steps,
        env_name=env_name,
        env_params={"backend": "positional"},
        hidden_sizes=(256, 256),
        **BRAX,
    )
    if not options.purejaxrl:
        return ours, None
    module = load_ppo_continuous(options)
    return ours, module.make_train(ppo_continuous_config(steps, env_name))


def load_ppo_continuous(options):
    file = options.purejaxrl / "purejaxrl" / "ppo_continuous_action.py"
    return load(file, "purejaxrl_ppo_continuous")


def ppo_continuous_config(steps: int, env_name: str) -> dict:
    return upper(
        BRAX,
        ENV_NAME=env_name,
        TOTAL_TIMESTEPS=steps,
        ACTIVATION="tanh",
        NORMALIZE_ENV=True,
        DEBUG=False,
    )


def ppo_ant(options, steps):
    return ppo_continuous(options, steps, "ant")


class OlderCell(nn.GRUCell):
    """Flax's GRU with the arguments that it took when PureJaxRL was written."""

    features: int = 128
    recurrent_kernel_init: Callable = orthogonal(1.0)

    @staticmethod
    def initialize_carry(key, batch, size):
        return jnp.zeros((*batch, size))


def ppo_rnn(options, steps):
    """The peer has a layer of 128 between the memory and its outputs, and the script none."""
    ours = Training(
        "ppo_rnn", steps, cell_size=128, hidden_sizes=(128,), activation="relu", **CLASSIC
    )
    if not options.purejaxrl:
        return ours, None
    module = load(options.purejaxrl / "purejaxrl" / "ppo_rnn.py", "purejaxrl_ppo_rnn")
    module.gymnax = types.SimpleNamespace(make=five_values)
    module.nn = types.SimpleNamespace(**vars(nn) | {"GRUCell": OlderCell})
    config = upper(CLASSIC, ENV_NAME="CartPole-v1", TOTAL_TIMESTEPS=steps, DEBUG=False)
    return ours, module.make_train(config)


def dqn(options, steps):
    ours = Training(
        "dqn",
        steps,
        num_steps=1,
        gradient_steps=1,
        batch_size=128,
        double=False,
        exploration_fraction=0.5,
        hidden_sizes=(120, 84),
        **DQN,
    )
    if not options.purejaxrl or not is_installed("flashbax"):
        return ours, None
    # The file goes on with the key of its dummy: all seeds would have the same networks and draws.
    corrections = [
        ("        rng = jax.random.PRNGKey(0)  #", "        dummy_rng = jax.random.PRNGKey(0)  #"),
        ("env.reset(rng, env_params)", "env.reset(dummy_rng, env_params)"),
        ("basic_env.action_space().sample(rng)", "basic_env.action_space().sample(dummy_rng)"),
        ("env.step(rng, _env_state", "env.step(dummy_rng, _env_state"),
    ]
    file = options.purejaxrl / "purejaxrl" / "dqn.py"
    module = load(file, "purejaxrl_dqn", corrections=corrections)
    config = upper(
        DQN,
        ENV_NAME="CartPole-v1",
        TOTAL_TIMESTEPS=steps,
        EPSILON_ANNEAL_TIME=steps / 2,
        TRAINING_INTERVAL=10,
        BUFFER_BATCH_SIZE=128,
        LR_LINEAR_DECAY=False,
    )
    return ours, module.make_train(config)


# --- PureJaxQL, rejax ---


def pqn(options, steps):
    ours = Training(
        "pqn",
        steps,
        anneal_lr=True,
        update_epochs=4,
        q_lambda=0.95,
        epsilon_finish=0.2,
        exploration_fraction=0.2,
        hidden_sizes=(256, 256),
        **PQN,
    )
    if not options.purejaxql:
        return ours, None
    module = load(options.purejaxql / "purejaxql" / "pqn_gymnax.py", "purejaxql_pqn")
    config = upper(
        PQN,
        ENV_NAME="CartPole-v1",
        NUM_EPOCHS=4,
        LAMBDA=0.95,
        EPS_FINISH=0.2,
        EPS_DECAY=0.2,
        HIDDEN_SIZE=256,
        **purejaxql_config(steps),
    )
    return ours, module.make_train(config)


def pqn_minatar(options, steps):
    """Breakout-MinAtar, a convolution. The peer plays no test episodes."""
    ours = Training(
        "pqn",
        steps,
        env_name="Breakout-MinAtar",
        anneal_lr=True,
        update_epochs=2,
        q_lambda=0.65,
        epsilon_finish=0.05,
        exploration_fraction=0.1,
        hidden_sizes=(128,),
        **PQN_MINATAR,
    )
    if not options.purejaxql:
        return ours, None
    module = load(options.purejaxql / "purejaxql" / "pqn_minatar.py", "purejaxql_pqn_minatar")
    config = upper(
        PQN_MINATAR,
        ENV_NAME="Breakout-MinAtar",
        NUM_EPOCHS=2,
        LAMBDA=0.65,
        EPS_FINISH=0.05,
        EPS_DECAY=0.1,
        **purejaxql_config(steps),
    )
    return ours, module.make_train(config)


def purejaxql_config(steps: int) -> dict:
    return {
        "TOTAL_TIMESTEPS": steps,
        "TOTAL_TIMESTEPS_DECAY": steps,
        "EPS_START": 1.0,
        "NORM_TYPE": "layer_norm",
        "REW_SCALE": 1,
        "LR_LINEAR_DECAY": True,
        "WANDB_MODE": "disabled",
    }


def off_policy(options, steps, script, steps_per_update, **networks):
    """Pendulum-v1, one environment per agent, one gradient step per environment step."""
    ours = Training(
        script,
        steps,
        env_name="Pendulum-v1",
        num_envs=1,
        num_steps=steps_per_update,
        gradient_steps=steps_per_update,
        learning_starts=256,
        hidden_sizes=(64, 64),
        policy_lr=1e-3,
        q_lr=1e-3,
        **REJAX,
    )
    if not is_installed("rejax"):
        return ours, None
    import rejax

    LegacyStepAPIWrapper.__deepcopy__ = lambda self, memo: self  # it would not end
    env, env_params = five_values("Pendulum-v1")
    algorithm = getattr(rejax, script.upper()).create(
        env=env,
        env_params=env_params,
        total_timesteps=steps,
        num_envs=1,
        num_epochs=1,
        fill_buffer=256,
        learning_rate=1e-3,
        polyak=0.995,
        eval_freq=steps,
        skip_initial_evaluation=True,
        **networks,
        **REJAX,
    )
    algorithm = algorithm.replace(eval_callback=lambda *_: ())

    def run(key):
        state, _ = algorithm.train(key)
        return state.actor_ts.params, state.critic_ts.params

    run.actor = algorithm.actor
    return ours, run


def sac(options, steps):
    return off_policy(
        options,
        steps,
        "sac",
        steps_per_update=1,
        hidden_layer_sizes=(64, 64),
        agent_kwargs={"activation": "relu"},
    )


def td3(options, steps):
    """td3.py makes two gradient steps per update."""
    return off_policy(
        options,
        steps,
        "td3",
        steps_per_update=2,
        actor_kwargs={"activation": "relu"},
        critic_kwargs={"activation": "relu"},
        policy_delay=2,
        exploration_noise=0.2,  # of actions in [-2, 2]
        target_noise=0.4,
        target_noise_clip=1.0,
    )


# --- RL-X, and two scripts ---


@flax.struct.dataclass
class StateOfRLX:
    """What RL-X's algorithms read of an environment's state."""

    env_state: Any
    next_observation: jax.Array
    actual_next_observation: jax.Array  # before auto-reset
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    info: dict
    key: jax.Array


class PendulumOfRLX:
    """gymnax's Pendulum-v1 with RL-X's interface."""

    single_observation_space = types.SimpleNamespace(shape=(3,))
    single_action_space = types.SimpleNamespace(shape=(1,), low=(-2.0,), high=(2.0,))
    horizon = 200

    def __init__(self):
        kinds = importlib.import_module("rl_x.environments.action_space_type").ActionSpaceType
        of_obs = importlib.import_module("rl_x.environments.observation_space_type")
        self.general_properties = types.SimpleNamespace(
            action_space_type=kinds.CONTINUOUS,
            observation_space_type=of_obs.ObservationSpaceType.FLAT_VALUES,
        )
        env, self.params = gymnax.make("Pendulum-v1")
        self.env = wrappers.LogWrapper(env)

    def reset(self, keys, evaluates):
        def reset(key):
            obs, env_state = self.env.reset(key, self.params)
            info = {"rollout/episode_return": 0.0}
            return StateOfRLX(env_state, obs, obs, jnp.float32(0.0), False, False, info, key)

        return jax.vmap(reset)(keys)

    def step(self, state, action):
        def step(state, action):
            key, env_key = jax.random.split(state.key)
            obs, env_state, reward, terminated, truncated, info = self.env.step(
                env_key, state.env_state, action, self.params
            )
            final_obs = info["final_observation"]
            info = {"rollout/episode_return": info["returned_episode_returns"]}
            return StateOfRLX(env_state, obs, final_obs, reward, terminated, truncated, info, key)

        return jax.vmap(step)(state, action)


def flashsac(options, steps):
    """Pendulum-v1, one gradient step per environment step. RL-X refuses parallel seeds."""
    ours = Training("flashsac", steps, env_name="Pendulum-v1", buffer_size=20_000, **FLASHSAC)
    if not options.rlx:
        return ours, None
    from ml_collections import ConfigDict

    sys.path.insert(0, str(options.rlx))
    folder = options.rlx / "rl_x" / "algorithms" / "flashsac" / "flax_full_jit"
    module = load(  # its `train` compiles and runs; here it returns what it would compile
        folder / "flashsac.py",
        "rlx_flashsac",
        corrections=[
            ("train_function = jax.jit(jax.vmap(jitable_train_function))", ""),
            ("self.start_time = deepcopy(self.last_time)", "return jitable_train_function"),
        ],
    )
    algorithm = importlib.import_module("rl_x.algorithms.flashsac.flax_full_jit")
    settings = algorithm.get_config("flashsac")
    settings.update(
        total_timesteps=steps,
        learning_starts=FLASHSAC["learning_starts"],
        buffer_size=20_000,
        batch_size=FLASHSAC["batch_size"],
        updates_per_step=1,
        policy_delay=FLASHSAC["policy_delay"],
        policy_hidden_dim=FLASHSAC["hidden_size"],
        critic_hidden_dim=FLASHSAC["critic_hidden_size"],
        logging_frequency=steps,
        evaluation_and_save_frequency=-1,
    )
    runner = {"save_model": False, "track_console": False, "track_tb": False, "track_wandb": False}
    environment = {"seed": 0, "nr_envs": 1, "render": False}
    config = ConfigDict({"algorithm": settings, "runner": runner, "environment": environment})
    env = PendulumOfRLX()
    train = module.FlashSAC(config, env, env, run_path="", writer=None).train()
    return ours, lambda key: train(key, 0)


def flashsac_crossq(options, steps):
    """Critics of about as many parameters, one gradient step per environment step."""
    settings = CROSSQ_MUJOCO | {"buffer_size": 20_000}
    return (
        Training("flashsac", steps, env_name="Pendulum-v1", buffer_size=20_000, **FLASHSAC),
        Training("crossq", steps, env_name="Pendulum-v1", **settings),
    )


# --- JaxMARL, Pgx ---


def mappo(options, steps):
    """IPPO on MPE_simple_spread_v3: two networks of 64 x 64, no agent ids.

    The peer bootstraps no time limits.
    """
    settings = CLASSIC | {"num_envs": 16}
    ours = Training("mappo", steps, centralized_critic=False, agent_ids=False, **settings)
    if not options.jaxmarl:
        return ours, None
    module = load(options.jaxmarl / "baselines" / "IPPO" / "ippo_ff_mpe.py", "jaxmarl_ippo")
    config = upper(
        settings,
        ENV_NAME="MPE_simple_spread_v3",
        ENV_KWARGS={},
        TOTAL_TIMESTEPS=steps,
        ACTIVATION="tanh",
    )
    return ours, without_logging(module.make_train(config))


def without_logging(train):
    """JaxMARL's training without its call to the host for W&B in every update."""

    def run(key):
        with mock.patch.object(jax.experimental, "io_callback", lambda *args, **kwargs: None):
            return train(key)

    return run


GAMES = 64
MOVES = 16
MINIBATCH = 128
CHANNELS = 32
BLOCKS = 2


def alphazero(options, steps):
    """Self-play of connect_four with 32 simulations per move and a small residual network.

    The peer's functions run in its own loop in Python, without its games against a downloaded
    network; here one game against random moves stays. Unequal remain the heads of the network, its
    normalization (of layers here, of batches there), its convolutions (products of matrices here,
    for several seeds in one vmap), and one more search at the end of a rollout here.
    """
    ours = Training(
        "alphazero",
        steps,
        env_name="connect_four",
        num_envs=GAMES,
        num_steps=MOVES,
        update_epochs=1,
        num_minibatches=GAMES * MOVES // MINIBATCH,
        network="residual",
        hidden_sizes=(CHANNELS,),
        channels=CHANNELS,
        num_blocks=BLOCKS,
        simulations=32,
        lr=1e-3,
        opponent_simulations=0,
        eval_games=1,
        eval_steps=1,
    )
    if not options.pgx or not is_installed("haiku"):
        return ours, None
    module = load_pgx_example(options.pgx / "examples" / "alphazero" / "train.py")
    iterations = steps // (GAMES * MOVES)
    return ours, Timed(lambda keys: run_pgx_example(module, keys, iterations))


def load_pgx_example(file: Path):
    import pgx

    flags = {
        "env_id": "connect_four",
        "num_channels": CHANNELS,
        "num_layers": BLOCKS,
        "num_simulations": 32,
        "selfplay_batch_size": GAMES,
        "max_num_steps": MOVES,
        "training_batch_size": MINIBATCH,
    }
    all_devices = jax.local_devices
    make_baseline_model = pgx.make_baseline_model
    jax.local_devices = lambda: all_devices()[:1]
    pgx.make_baseline_model = lambda _: None  # downloads
    try:
        return load(file, "pgx_alphazero", flags.items())
    finally:
        jax.local_devices = all_devices
        pgx.make_baseline_model = make_baseline_model


def run_pgx_example(module, keys, iterations: int) -> float:
    """The seconds of the peer's `__main__`, without its evaluation, checkpoints and log."""
    key = keys[0]
    model = module.forward.init(key, jax.vmap(module.env.init)(keys).observation)
    model, opt_state = jax.tree.map(lambda x: x[None], (model, module.optimizer.init(model[0])))
    begun = time.perf_counter()
    for _ in range(iterations):
        key, play_key, shuffle_key = jax.random.split(key, 3)
        samples = module.compute_loss_input(module.selfplay(model, play_key[None]))
        samples = jax.tree.map(lambda x: x.reshape((-1, *x.shape[3:])), jax.device_get(samples))
        order = jax.random.permutation(shuffle_key, len(samples.obs)).reshape(-1, 1, MINIBATCH)
        for indices in order:
            minibatch = jax.tree.map(lambda x, indices=indices: x[indices], samples)
            model, opt_state, *losses = module.train(model, opt_state, minibatch)
            for loss in losses:
                loss.mean().item()
    jax.block_until_ready(model)
    return time.perf_counter() - begun


# --- PyTorch and sbx, as processes; EnvPool ---


def run_cleanrl(options, file: str, steps: int, *flags) -> str:
    """What a file of CleanRL prints."""
    script = options.cleanrl / "cleanrl" / file
    command = [options.cleanrl_python, script, "--no-cuda", *flags, "--total-timesteps", str(steps)]
    env = os.environ | {"PYTHONPATH": str(options.cleanrl)}  # its files import cleanrl_utils
    with tempfile.TemporaryDirectory() as folder:  # for what it writes
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=folder, env=env
        )
    return done.stdout


def cleanrl_seconds(printed: str, steps: int) -> float:
    """The seconds of a training, from the speed that CleanRL prints."""
    return steps / float(re.findall(r"SPS: (\d+)", printed)[-1])


def cleanrl_process(options, file: str, steps: int, *flags) -> Timed:
    """A file of CleanRL: the seconds of its training."""
    return Timed(lambda keys: cleanrl_seconds(run_cleanrl(options, file, steps, *flags), steps))


def ppo_torch(options, steps):
    ours = Training("ppo", steps, **CLASSIC)
    if not options.cleanrl or not options.cleanrl_python:
        return ours, None
    return ours, cleanrl_process(options, "ppo.py", steps)


def ppo_mujoco(options, steps):
    """HalfCheetah-v4, stepped by EnvPool here and by Gymnasium there, CleanRL's hyperparameters."""
    if not is_installed("envpool") or not options.cleanrl_python or not options.cleanrl:
        return None, None
    ours = Training("ppo_continuous", steps, env_name=HALF_CHEETAH, **PPO_MUJOCO)
    return ours, cleanrl_process(options, "ppo_continuous_action.py", steps)


def sac_mujoco(options, steps):
    """The same for SAC: one gradient step per environment step after the first 256."""
    if not is_installed("envpool") or not options.cleanrl_python or not options.cleanrl:
        return None, None
    ours = Training("sac", steps, env_name=HALF_CHEETAH, **SAC_MUJOCO)
    flags = ["--env-id", "HalfCheetah-v4", "--learning-starts", "256"]
    return ours, cleanrl_process(options, "sac_continuous_action.py", steps, *flags)


SBX = """
import sys, time, gymnasium, sbx
algorithm = getattr(sbx, sys.argv[1])
agent = algorithm("MlpPolicy", gymnasium.make("HalfCheetah-v4"), learning_rate=float(sys.argv[2]),
    qf_learning_rate=1e-3, batch_size=256, buffer_size=1_000_000, learning_starts=256,
    policy_kwargs={"net_arch": [256, 256]})
agent.learn(512)
begun = time.perf_counter()
agent.learn(int(sys.argv[3]), reset_num_timesteps=False)
print(time.perf_counter() - begun)
"""


def sac_sbx(options, steps, script="sac", algorithm="SAC", settings=SAC_MUJOCO):
    """As sac_mujoco. sbx has compiled and filled its replay when its clock starts.

    Several agents of sbx train one after the other.
    """
    if not is_installed("envpool") or not options.sbx_python:
        return None, None
    steps_of_sbx = steps - settings["learning_starts"]
    command = [options.sbx_python, "-c", SBX]
    command += [algorithm, str(settings["policy_lr"]), str(steps_of_sbx)]

    def run(keys):
        seconds = 0.0
        for _ in keys:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds += float(done.stdout.split()[-1])
        return seconds

    return Training(script, steps, env_name=HALF_CHEETAH, **settings), Timed(run)


def crossq_sbx(options, steps):
    """CrossQ with the same networks; sbx's policy is trained in every third step by default."""
    return sac_sbx(options, steps, "crossq", "CrossQ", CROSSQ_MUJOCO)


def envpool_steps(options, steps, num_envs=64):
    """Random actions in 64 environments: inside jit, and in a plain loop over the same library."""
    if not is_installed("envpool"):
        return None, None
    import envpool

    importlib.import_module("onejit.envs.envpool")
    env, params = gymnax.make(HALF_CHEETAH)
    actions = np.random.default_rng(0).uniform(-1, 1, (num_envs, 6))
    pool = envpool.make_gymnasium(
        "HalfCheetah-v4", num_envs=num_envs, seed=0, num_threads=os.cpu_count()
    )

    def ours(key):
        def step(state, _):
            _, state, reward, *_ = jax.vmap(env.step, (None, 0, 0, None))(
                key, state, jnp.asarray(actions, jnp.float32), params
            )
            return state, reward.mean()

        keys = jax.random.split(key, num_envs)
        _, state = jax.vmap(env.reset, (0, None))(keys, params)
        _, rewards = jax.lax.scan(step, state, None, steps // num_envs)
        return rewards

    def theirs(keys):
        pool.reset()
        begun = time.perf_counter()
        for _ in range(steps // num_envs):
            _, _, terminated, truncated, _ = pool.step(actions)
            done = terminated | truncated
            if done.any():
                pool.reset(np.flatnonzero(done).astype(np.int32))
        return time.perf_counter() - begun

    return ours, Timed(theirs)


def envpool_steps_8(options, steps):
    return envpool_steps(options, steps, num_envs=8)


# --- a plain port of the GridWorld ---


def gridworld(options, steps):
    """The port does what one writes first: the environment's step in a scan, keys split there."""
    import q_learning_gridworld

    lr = 0.1
    gamma = 0.9
    epsilon = 0.1
    config = q_learning_gridworld.Config(lr=lr, gamma=gamma, epsilon=epsilon)
    env, env_params = q_learning_gridworld.make_env(config)

    def choose(key, q, obs):
        explore_key, random_key, tie_key = jax.random.split(key, 3)
        best = q[obs] == q[obs].max()
        greedy = jax.random.choice(tie_key, 4, p=best / best.sum())
        random = jax.random.randint(random_key, (), 0, 4)
        return jnp.where(jax.random.uniform(explore_key) < epsilon, random, greedy)

    def step(carry, _):
        key, q, obs, state = carry
        key, action_key, env_key = jax.random.split(key, 3)
        action = choose(action_key, q, obs)
        new_obs, state, reward, terminated, _, info = env.step(env_key, state, action, env_params)
        next_value = q[info["final_observation"]].max()
        target = reward + gamma * jnp.where(terminated, 0.0, next_value)
        q = q.at[obs, action].add(lr * (target - q[obs, action]))
        return (key, q, new_obs, state), reward

    def port(key):
        key, reset_key = jax.random.split(key)
        obs, state = env.reset(reset_key, env_params)
        q = jnp.zeros(env.next_cell.shape)
        (_, q, *_), rewards = jax.lax.scan(step, (key, q, obs, state), None, steps)
        return q, rewards

    ours = Training("q_learning_gridworld", steps, lr=lr, gamma=gamma, epsilon=epsilon)
    return ours, port
