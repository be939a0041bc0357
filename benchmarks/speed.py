"""Compare the speed of the scripts with their peers at the peers' hyperparameters, in turn on one machine.

    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/mttga/purejaxql
    git clone https://github.com/vwxyzjn/cleanrl
    git clone https://github.com/FLAIROx/JaxMARL
    git clone https://github.com/sotetsuk/pgx
    pip install --target deps --no-deps flashbax rejax dm-haiku jmp tabulate pydantic
    python -m venv torch && torch/bin/pip install torch gymnasium tensorboard tyro
    python -m venv sbx && sbx/bin/pip install sbx-rl "gymnasium[mujoco]"
    PYTHONPATH=deps python benchmarks/speed.py --purejaxrl purejaxrl --purejaxql purejaxql \\
        --cleanrl cleanrl --cleanrl-python torch/bin/python --sbx-python sbx/bin/python --jaxmarl JaxMARL --pgx pgx
    PYTHONPATH=deps python benchmarks/speed.py sac td3 --seeds 1 8 --repeats 7

Rows: ppo, ppo_minatar, ppo_continuous (hopper), ppo_ant, ppo_rnn and dqn against PureJaxRL; pqn against PureJaxQL;
sac and td3 against rejax; mappo against JaxMARL; alphazero against Pgx's example; ppo_torch, ppo_mujoco and
sac_mujoco against CleanRL's PyTorch files; sac_sbx against sbx; envpool_steps against a plain loop over EnvPool;
gridworld against a plain port. If a peer is missing, its rows are skipped with a message.

The contestants are `jit(vmap(train))` of both on one device, a single seed without `vmap`, and, with several seeds and
several devices (each CPU core is one), the script's seeds spread over them, as `main` and onejit train do it. A
peer's seeds are run as its own README does. Compilation is not counted, but its time is shown. A ratio is the median
over neighbouring trainings, with the least and the largest. Peers run from their own files; what newer packages took
from them is put back: gymnax's five-value step, `jax.tree_map`, and W&B and hydra, which they only import.
Flax's orthogonal initialization, which can hang under `vmap` on CPUs (docs/hangs.md), is replaced by the scripts' own,
a few milliseconds of a whole training; a contestant that calls LAPACK all the same is refused. CleanRL runs in a Python
of its own and reports its speed itself. Writes speed.json, speed.md and speed.png into the directory --out; rows that
were measured before stay in them.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax import wrappers
from gymnax.wrappers import LegacyStepAPIWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ppo import orthogonal

PPO = dict(
    anneal_lr=True,
    gamma=0.99,
    gae_lambda=0.95,
    clip_eps=0.2,
    ent_coef=0.01,
    vf_coef=0.5,
    max_grad_norm=0.5,
)
CLASSIC = PPO | dict(lr=2.5e-4, num_envs=4, num_steps=128, update_epochs=4, num_minibatches=4)
MINATAR = PPO | dict(lr=5e-3, num_envs=64, num_steps=128, update_epochs=4, num_minibatches=8)
BRAX = PPO | dict(
    lr=3e-4, num_envs=2048, num_steps=10, update_epochs=4, num_minibatches=32, ent_coef=0.0
)
DQN = dict(
    lr=2.5e-4, gamma=0.99, num_envs=10, buffer_size=10_000, learning_starts=10_000, tau=1.0, epsilon_start=1.0,
    epsilon_finish=0.05, target_update_interval=500,
)  # fmt: skip
PQN = dict(lr=1e-4, gamma=0.99, num_envs=32, num_steps=64, num_minibatches=16, max_grad_norm=10.0)
REJAX = dict(batch_size=256, buffer_size=20_000)


def load(path: Path, name: str, flags=()):
    """A peer's file as a module, its neighbours importable meanwhile, what it needs of other packages as it was."""
    for absent in ("navix", "wandb", "hydra", "omegaconf"):
        module = sys.modules.setdefault(absent, types.ModuleType(absent))
        module.OmegaConf = types.SimpleNamespace(from_cli=lambda: dict(flags))
        module.main = lambda **_: lambda function: function
        module.log = lambda _: None
    jax.tree_map = jax.tree.map
    wrappers.purerl.LogWrapper = lambda env: LegacyStepAPIWrapper(wrappers.LogWrapper(env))
    sys.path.insert(0, str(path.parent))
    of_flax, nn.initializers.orthogonal = (
        nn.initializers.orthogonal,
        lambda scale=1.0, *_, **__: orthogonal(scale),
    )
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop("wrappers", None)
        wrappers.purerl.LogWrapper = wrappers.LogWrapper
        nn.initializers.orthogonal = of_flax
    return module


def upper(settings: dict, **more) -> dict:
    return {name.upper(): value for name, value in settings.items()} | more


def five_values(name: str):
    env, params = gymnax.make(name)
    return LegacyStepAPIWrapper(env), params


def metrics_of(train):
    """Enough for a whole training to be run, and small."""
    return lambda key: {
        **train(key),
        "runner_state": None,
    }  # what is left holds the metrics, whatever their name


def script_training(script: str, steps: int, **settings):
    module = importlib.import_module(script)
    return metrics_of(module.make_train(module.Config(total_timesteps=steps, **settings)))


# --- rows: `(ours, theirs)` for a number of steps; theirs None where the peer is not there ---


def ppo(options, steps, env_name="CartPole-v1", settings=CLASSIC, activation="tanh"):
    ours = script_training(
        "ppo", steps, env_name=env_name, torso="flat", activation=activation, **settings
    )
    if not options.purejaxrl:
        return ours, None
    module = load(options.purejaxrl / "purejaxrl" / "ppo.py", "purejaxrl_ppo")
    module.gymnax = types.SimpleNamespace(make=five_values)
    more = dict(ENV_NAME=env_name, TOTAL_TIMESTEPS=steps, ACTIVATION=activation, DEBUG=False)
    return ours, metrics_of(module.make_train(upper(settings, **more)))


def ppo_torch(options, steps):
    ours = script_training("ppo", steps, **CLASSIC)
    if not options.cleanrl or not options.cleanrl_python:
        return ours, None
    return ours, torch_process(options, "ppo.py", "--total-timesteps", str(steps))


MUJOCO = dict(
    num_envs=1,
    num_steps=2048,
    update_epochs=10,
    num_minibatches=32,
    lr=3e-4,
    clip_eps=0.2,
    ent_coef=0.0,
)


def torch_process(options, file: str, *flags):
    """`run(keys)` of a file of CleanRL: the seconds of its training, without its imports, from the speed it prints."""
    command = [options.cleanrl_python, options.cleanrl / "cleanrl" / file, "--no-cuda", *flags]
    env = os.environ | {"PYTHONPATH": str(options.cleanrl)}  # its files import cleanrl_utils

    def run(keys):
        with tempfile.TemporaryDirectory() as folder:  # for what it writes
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, cwd=folder, env=env
            )
        return int(flags[-1]) / float(re.findall(r"SPS: (\d+)", done.stdout)[-1])

    run.is_process = True
    return run


def ppo_mujoco(options, steps):
    """HalfCheetah-v4, stepped by EnvPool here and by Gymnasium there, CleanRL's hyperparameters."""
    if not importlib.util.find_spec("envpool") or not options.cleanrl_python or not options.cleanrl:
        return None, None
    ours = script_training(
        "ppo_continuous", steps, env_name="onejit.envs.envpool:HalfCheetah-v4", **MUJOCO
    )
    return ours, torch_process(options, "ppo_continuous_action.py", "--total-timesteps", str(steps))


SAC = dict(
    num_envs=1,
    num_steps=1,
    gradient_steps=1,
    batch_size=256,
    buffer_size=1_000_000,
    learning_starts=256,
)
SAC |= dict(policy_lr=3e-4, q_lr=1e-3, hidden_sizes=(256, 256))


def sac_mujoco(options, steps):
    """The same for SAC: 256 x 256, batches of 256, one gradient step per environment step after the first 256."""
    if not importlib.util.find_spec("envpool") or not options.cleanrl_python or not options.cleanrl:
        return None, None
    ours = script_training("sac", steps, env_name="onejit.envs.envpool:HalfCheetah-v4", **SAC)
    flags = [
        "--env-id",
        "HalfCheetah-v4",
        "--learning-starts",
        "256",
        "--total-timesteps",
        str(steps),
    ]
    return ours, torch_process(options, "sac_continuous_action.py", *flags)


SBX = """
import sys, time, gymnasium, sbx
agent = sbx.SAC("MlpPolicy", gymnasium.make("HalfCheetah-v4"), learning_rate=3e-4, qf_learning_rate=1e-3,
    batch_size=256, buffer_size=1_000_000, learning_starts=256, policy_kwargs={"net_arch": [256, 256]})
agent.learn(512)
begun = time.perf_counter()
agent.learn(int(sys.argv[1]), reset_num_timesteps=False)
print(time.perf_counter() - begun)
"""


def sac_sbx(options, steps):
    """The hyperparameters of sac_mujoco against sbx, which has compiled and filled its replay when its clock starts."""
    if not importlib.util.find_spec("envpool") or not options.sbx_python:
        return None, None
    command = [options.sbx_python, "-c", SBX, str(steps - SAC["learning_starts"])]

    def run(keys):
        return float(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        )

    run.is_process = True
    return script_training("sac", steps, env_name="onejit.envs.envpool:HalfCheetah-v4", **SAC), run


def envpool_steps(options, steps):
    """Random actions in 64 environments: inside jit, and in a plain loop over the same library."""
    if not importlib.util.find_spec("envpool"):
        return None, None
    return random_steps(steps, 64)


def envpool_steps_8(options, steps):
    return random_steps(steps, 8) if importlib.util.find_spec("envpool") else (None, None)


def random_steps(steps: int, num_envs: int):
    import envpool

    importlib.import_module("onejit.envs.envpool")
    env, params = gymnax.make("HalfCheetah-v4")
    actions = np.random.default_rng(0).uniform(-1, 1, (num_envs, 6))
    pool = envpool.make_gymnasium(
        "HalfCheetah-v4", num_envs=num_envs, seed=0, num_threads=os.cpu_count()
    )

    def ours(key):
        step = jax.vmap(env.step, (None, 0, 0, None))

        def body(state, _):
            _, state, reward, *_ = step(key, state, jnp.asarray(actions, jnp.float32), params)
            return state, reward.mean()

        _, state = jax.vmap(env.reset, (0, None))(jax.random.split(key, num_envs), params)
        return jax.lax.scan(body, state, None, steps // num_envs)[1]

    def theirs(keys):
        pool.reset()
        begun = time.perf_counter()
        for _ in range(steps // num_envs):
            _, _, terminated, truncated, _ = pool.step(actions)
            if (terminated | truncated).any():
                pool.reset(np.flatnonzero(terminated | truncated).astype(np.int32))
        return time.perf_counter() - begun

    theirs.is_process = True
    return ours, theirs


def ppo_minatar(options, steps):
    return ppo(options, steps, "Breakout-MinAtar", MINATAR, "relu")


def ppo_continuous(options, steps, env_name="hopper"):
    more = dict(env_name=env_name, env_params={"backend": "positional"}, hidden_sizes=(256, 256))
    ours = script_training("ppo_continuous", steps, **more, **BRAX | dict(anneal_lr=False))
    if not options.purejaxrl:
        return ours, None
    module = load(
        options.purejaxrl / "purejaxrl" / "ppo_continuous_action.py", "purejaxrl_ppo_continuous"
    )
    more = dict(
        ENV_NAME=env_name,
        TOTAL_TIMESTEPS=steps,
        ACTIVATION="tanh",
        NORMALIZE_ENV=True,
        ANNEAL_LR=False,
    )
    return ours, metrics_of(module.make_train(upper(BRAX, **more, DEBUG=False)))


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
    """The peer has a layer of 128 between the memory and each output, and the script none."""
    ours = script_training(
        "ppo_rnn", steps, cell_size=128, hidden_sizes=(128,), activation="relu", **CLASSIC
    )
    if not options.purejaxrl:
        return ours, None
    module = load(options.purejaxrl / "purejaxrl" / "ppo_rnn.py", "purejaxrl_ppo_rnn")
    module.gymnax = types.SimpleNamespace(make=five_values)
    module.nn = types.SimpleNamespace(**vars(nn) | {"GRUCell": OlderCell})
    more = dict(ENV_NAME="CartPole-v1", TOTAL_TIMESTEPS=steps, DEBUG=False)
    return ours, metrics_of(module.make_train(upper(CLASSIC, **more)))


def dqn(options, steps):
    more = dict(
        num_steps=1, gradient_steps=1, batch_size=128, anneal_lr=False, double=False, dueling=False
    )
    more |= dict(
        exploration_fraction=0.5, loss="squared", hidden_sizes=(120, 84), activation="relu"
    )
    ours = script_training("dqn", steps, **more, **DQN)
    if not options.purejaxrl or not importlib.util.find_spec("flashbax"):
        return ours, None
    module = load(options.purejaxrl / "purejaxrl" / "dqn.py", "purejaxrl_dqn")
    more = dict(
        ENV_NAME="CartPole-v1",
        TOTAL_TIMESTEPS=steps,
        EPSILON_ANNEAL_TIME=steps / 2,
        TRAINING_INTERVAL=10,
    )
    return ours, metrics_of(
        module.make_train(upper(DQN, **more, BUFFER_BATCH_SIZE=128, LR_LINEAR_DECAY=False))
    )


def pqn(options, steps):
    more = dict(
        update_epochs=4,
        q_lambda=0.95,
        epsilon_finish=0.2,
        exploration_fraction=0.2,
        hidden_sizes=(256, 256),
    )
    ours = script_training("pqn", steps, anneal_lr=True, **more, **PQN)
    if not options.purejaxql:
        return ours, None
    module = load(options.purejaxql / "purejaxql" / "pqn_gymnax.py", "purejaxql_pqn")
    more = dict(
        ENV_NAME="CartPole-v1",
        TOTAL_TIMESTEPS=steps,
        TOTAL_TIMESTEPS_DECAY=steps,
        NUM_EPOCHS=4,
        LAMBDA=0.95,
    )
    more |= dict(
        EPS_START=1.0,
        EPS_FINISH=0.2,
        EPS_DECAY=0.2,
        HIDDEN_SIZE=256,
        NORM_TYPE="layer_norm",
        REW_SCALE=1,
    )
    return ours, metrics_of(
        module.make_train(upper(PQN, **more, LR_LINEAR_DECAY=True, WANDB_MODE="disabled"))
    )


def off_policy(options, steps, name, each, **networks):
    """Pendulum-v1, one environment per agent, a gradient step per environment step; td3.py makes two per update."""
    more = dict(
        num_envs=1, num_steps=each, gradient_steps=each, learning_starts=256, hidden_sizes=(64, 64)
    )
    more |= dict(policy_lr=1e-3, q_lr=1e-3, activation="relu")
    ours = script_training(name, steps, env_name="Pendulum-v1", **more, **REJAX)
    if not importlib.util.find_spec("rejax"):
        return ours, None
    import rejax

    LegacyStepAPIWrapper.__deepcopy__ = lambda self, memo: self  # it would not end
    env, env_params = five_values("Pendulum-v1")
    algorithm = getattr(rejax, name.upper()).create(
        env=env, env_params=env_params, total_timesteps=steps, num_envs=1, num_epochs=1, fill_buffer=256,
        learning_rate=1e-3, polyak=0.995, eval_freq=steps, skip_initial_evaluation=True, **networks, **REJAX,
    )  # fmt: skip
    algorithm = algorithm.replace(eval_callback=lambda *_: ())

    def run(key):
        state, _ = algorithm.train(key)
        return state.actor_ts.params, state.critic_ts.params

    run.actor = algorithm.actor
    return ours, run


def sac(options, steps):
    networks = {"hidden_layer_sizes": (64, 64), "agent_kwargs": {"activation": "relu"}}
    return off_policy(options, steps, "sac", 1, **networks)


def td3(options, steps):
    networks = {
        "actor_kwargs": {"activation": "relu"},
        "critic_kwargs": {"activation": "relu"},
        "policy_delay": 2,
    }
    networks |= dict(
        exploration_noise=0.2, target_noise=0.4, target_noise_clip=1.0
    )  # of actions in [-2, 2]
    return off_policy(options, steps, "td3", 2, **networks)


def mappo(options, steps):
    """IPPO on MPE_simple_spread_v3: two networks of 64 x 64, no agent ids. The peer bootstraps no time limits."""
    settings = CLASSIC | dict(num_envs=16)
    ours = script_training("mappo", steps, centralized_critic=False, agent_ids=False, **settings)
    if not options.jaxmarl:
        return ours, None
    module = load(options.jaxmarl / "baselines" / "IPPO" / "ippo_ff_mpe.py", "jaxmarl_ippo")
    more = dict(
        ENV_NAME="MPE_simple_spread_v3", ENV_KWARGS={}, TOTAL_TIMESTEPS=steps, ACTIVATION="tanh"
    )
    return ours, metrics_of(module.make_train(upper(settings, **more)))


AZ = dict(games=64, moves=16, batch=128, channels=32, blocks=2)


def alphazero(options, steps):
    """Self-play of connect_four with 32 simulations per move and a small residual network, one pass over the moves.

    The peer's functions run in its own loop in Python, without its games against a downloaded network; here one game
    against random moves stays. Unequal remain the heads of the network, its normalization (of layers here, of batches
    there), its convolutions (products of matrices here, for several seeds in one vmap), and one more search at the end
    of a rollout here.
    """
    more = dict(
        env_name="connect_four",
        num_envs=AZ["games"],
        num_steps=AZ["moves"],
        update_epochs=1,
        network="residual",
    )
    more |= dict(
        num_minibatches=AZ["games"] * AZ["moves"] // AZ["batch"], hidden_sizes=(AZ["channels"],)
    )
    more |= dict(channels=AZ["channels"], num_blocks=AZ["blocks"], simulations=32, lr=1e-3)
    ours = script_training(
        "alphazero", steps, opponent_simulations=0, eval_games=1, eval_steps=1, **more
    )
    if not options.pgx or not importlib.util.find_spec("haiku"):
        return ours, None
    return ours, pgx_loop(
        options.pgx / "examples" / "alphazero" / "train.py", steps // (AZ["games"] * AZ["moves"])
    )


def pgx_loop(file: Path, iterations: int):
    """`run(keys)` of Pgx's example: the seconds of its loop for a number of iterations, without compilation."""
    import pgx

    given = dict(
        env_id="connect_four",
        num_channels=AZ["channels"],
        num_layers=AZ["blocks"],
        num_simulations=32,
    )
    given |= dict(
        selfplay_batch_size=AZ["games"], max_num_steps=AZ["moves"], training_batch_size=AZ["batch"]
    )
    all_devices, jax.local_devices = jax.local_devices, lambda: all_devices()[:1]
    downloads, pgx.make_baseline_model = pgx.make_baseline_model, lambda _: None
    try:
        module = load(file, "pgx_alphazero", given.items())
    finally:
        jax.local_devices, pgx.make_baseline_model = all_devices, downloads

    def run(keys):  # the peer's `__main__` without its evaluation, checkpoints and log
        key = keys[0]
        model = module.forward.init(key, jax.vmap(module.env.init)(keys).observation)
        model, opt_state = jax.tree.map(lambda x: x[None], (model, module.optimizer.init(model[0])))
        begun = time.perf_counter()
        for _ in range(iterations):
            key, play_key, shuffle_key = jax.random.split(key, 3)
            samples = module.compute_loss_input(module.selfplay(model, play_key[None]))
            samples = jax.tree.map(lambda x: x.reshape((-1, *x.shape[3:])), jax.device_get(samples))
            order = jax.random.permutation(shuffle_key, len(samples.obs)).reshape(
                -1, 1, AZ["batch"]
            )
            for indices in order:
                minibatch = jax.tree.map(lambda x, indices=indices: x[indices], samples)
                model, opt_state, *losses = module.train(model, opt_state, minibatch)
                [each.mean().item() for each in losses]
        jax.block_until_ready(model)
        return time.perf_counter() - begun

    run.is_process = True
    return run


def gridworld(options, steps):
    """The port does what one writes first: the environment's step in a scan, keys split in each step."""
    import q_learning_gridworld

    settings = dict(lr=0.1, gamma=0.9, epsilon=0.1)
    env, env_params = q_learning_gridworld.make_env(q_learning_gridworld.Config(**settings))

    def choose(key, q, obs):
        explore_key, random_key, tie_key = jax.random.split(key, 3)
        best = q[obs] == q[obs].max()
        greedy = jax.random.choice(tie_key, 4, p=best / best.sum())
        random = jax.random.randint(random_key, (), 0, 4)
        return jnp.where(jax.random.uniform(explore_key) < settings["epsilon"], random, greedy)

    def step(carry, _):
        key, q, obs, state = carry
        key, action_key, env_key = jax.random.split(key, 3)
        action = choose(action_key, q, obs)
        next_obs, state, reward, terminated, _, info = env.step(env_key, state, action, env_params)
        target = reward + settings["gamma"] * jnp.where(
            terminated, 0.0, q[info["final_observation"]].max()
        )
        q = q.at[obs, action].add(settings["lr"] * (target - q[obs, action]))
        return (key, q, next_obs, state), reward

    def port(key):
        key, reset_key = jax.random.split(key)
        obs, state = env.reset(reset_key, env_params)
        q = jnp.zeros(env.next_cell.shape)
        (_, q, *_), rewards = jax.lax.scan(step, (key, q, obs, state), None, steps)
        return q, rewards

    return script_training("q_learning_gridworld", steps, **settings), port


ROWS = {  # (function, seeds on a CPU, seeds on a GPU, steps of all seeds in one training, what divides an agent's)
    "ppo": (ppo, (1, 8, 32), (2048,), 400_000, 512),
    "ppo_torch": (ppo_torch, (1,), (1,), 100_000, 512),
    "ppo_mujoco": (ppo_mujoco, (1,), (1,), 20_480, 2048),
    "sac_mujoco": (sac_mujoco, (1,), (1,), 8192, 2),
    "sac_sbx": (sac_sbx, (1,), (1,), 8192, 2),
    "envpool_steps_8": (envpool_steps_8, (1,), (1,), 40_960, 64),
    "envpool_steps": (envpool_steps, (1,), (1,), 81_920, 64),
    "ppo_minatar": (ppo_minatar, (1, 8), (256,), 131_072, 8192),
    "ppo_continuous": (ppo_continuous, (1, 4), (64,), 81_920, 20_480),
    "ppo_ant": (ppo_ant, (), (64,), 81_920, 20_480),
    "ppo_rnn": (ppo_rnn, (1, 8), (256,), 65_536, 512),
    "dqn": (dqn, (1, 8), (256,), 200_000, 10),
    "pqn": (pqn, (1, 8), (256,), 262_144, 2048),
    "sac": (sac, (1, 8), (64,), 8192, 2),
    "td3": (td3, (1, 8), (64,), 8192, 2),
    "mappo": (mappo, (1, 8), (256,), 409_600, 2048),
    "alphazero": (alphazero, (1,), (1,), 4096, 1024),
    "gridworld": (gridworld, (1, 8, 30), (4096,), 200_000, 1000),
}


# --- measuring ---


def compile_for(train, keys, num_devices=1):
    """`run(keys)`, and the seconds of its compilation. A single seed trains without `vmap`."""
    many = jax.vmap(train)
    if num_devices > 1:
        if len(keys) == num_devices:  # as `main` does it
            many = partial(jax.lax.map, train)
        mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("seed",))
        spread = PartitionSpec("seed")
        many = jax.shard_map(many, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    if hasattr(train, "is_process"):
        return train, 0.0
    begun = time.perf_counter()
    lowered = jax.jit(many if len(keys) > 1 else lambda keys: train(keys[0])).lower(keys)
    compiled = lowered.compile()
    seconds = time.perf_counter() - begun
    if "lapack" in lowered.as_text():  # on GPUs it has other names, and does not hang
        raise RuntimeError("a contestant calls LAPACK and could hang: docs/hangs.md")
    return compiled, seconds


def measure(name: str, seeds: int, options) -> dict | None:
    """A row of the table; None where the peer is not there."""
    make, *_, all_steps, multiple = ROWS[name]
    steps = max(2, math.ceil(options.scale * all_steps / seeds / multiple)) * multiple
    if name == "dqn":
        steps += DQN["learning_starts"]
    ours, theirs = make(options, steps)
    if theirs is None:
        return None
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    num_devices = max(n for n in range(1, jax.device_count() + 1) if seeds % n == 0)
    contestants = {"peer": compile_for(theirs, keys), "bare": compile_for(ours, keys)}
    if num_devices > 1:
        contestants["spread"] = compile_for(ours, keys, num_devices)
    taken = {each: [] for each in contestants}
    for _ in range(options.repeats + 1):  # the first warms up
        for each, (run, _) in contestants.items():
            begun = time.perf_counter()
            done = jax.block_until_ready(run(keys))
            taken[each].append(done if isinstance(done, float) else time.perf_counter() - begun)
    row = {
        "row": name,
        "seeds": seeds,
        "steps": steps,
        "devices": num_devices,
        "repeats": options.repeats,
    }
    for each, seconds in taken.items():
        row[f"{each} steps/s"] = seeds * steps / float(np.median(seconds[1:]))
        row[f"{each} compilation"] = contestants[each][1]
        if each != "peer":
            ratios = sorted(a / b for a, b in zip(taken["peer"][1:], seconds[1:], strict=True))
            row[f"{each} ratio"] = [float(np.median(ratios)), ratios[0], ratios[-1]]
    return row


def markdown(rows: list[dict]) -> str:
    """The table; a ratio above 1 says that the script is the faster one."""
    lines = [
        "| row | seeds | peer, steps/s | script, one device | ratio | over all devices | ratio | compilation, s |"
    ]
    lines.append("|" + "---|" * 8)
    for row in rows:
        cells = [row["row"], str(row["seeds"]), f"{row['peer steps/s']:,.0f}"]
        for each in ("bare", "spread"):
            ratio = row.get(f"{each} ratio")
            shown = ["", ""]
            if ratio:
                shown = [
                    f"{row[f'{each} steps/s']:,.0f}",
                    f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})",
                ]
            cells += shown
        cells.append(f"{row['peer compilation']:.1f} / {row['bare compilation']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


PEERS = {
    "ppo": "PureJaxRL, CartPole", "ppo_torch": "CleanRL, CartPole", "ppo_minatar": "PureJaxRL, Breakout",
    "ppo_continuous": "PureJaxRL, hopper", "ppo_rnn": "PureJaxRL, CartPole", "dqn": "PureJaxRL, CartPole",
    "pqn": "PureJaxQL, CartPole", "sac": "rejax, Pendulum", "td3": "rejax, Pendulum", "gridworld": "a plain port",
    "mappo": "JaxMARL, simple_spread", "alphazero": "Pgx, connect_four",
}  # fmt: skip


def draw(rows: list[dict], path: Path) -> None:
    """Left, the ratio to the named peer for each row and number of seeds. Right, steps per second over the seeds."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    ratios, throughput = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = [row for row in rows if row["row"] in PEERS]
    contestants = {
        "bare": ("one device", "tab:blue", "o"),
        "spread": ("over all devices", "tab:green", "D"),
    }
    for place, row in enumerate(rows):
        for each, (label, color, marker) in contestants.items():
            if found := row.get(f"{each} ratio"):
                middle, low, high = found
                error = [[middle - low], [high - middle]]
                ratios.errorbar(
                    middle, -place, xerr=error, fmt=marker, color=color, label=label, markersize=5
                )
        shown = (
            f"{middle:.2f}" if middle < 10 else f"{middle:.0f}"
        )  # of all devices where there are several seeds
        ratios.annotate(shown, (high, -place), (6, -3), textcoords="offset points", fontsize=9)
    ratios.axvline(1, color="0.6", linewidth=1)
    labels = [
        f"{row['row'].partition('_torch')[0]} / {PEERS[row['row']]}, seeds: {row['seeds']}"
        for row in rows
    ]
    ratios.set_yticks(range(0, -len(rows), -1), labels)
    ratios.set(
        xscale="log",
        xlabel="speed relative to the peer",
        xlim=(0.6, 260),
        ylim=(-len(rows) + 0.4, 0.6),
    )
    ratios.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    ratios.minorticks_off()
    handles = dict(zip(*reversed(ratios.get_legend_handles_labels()), strict=True))
    ratios.legend(handles.values(), handles.keys(), frameon=False, loc="upper right")
    for index, name in enumerate(dict.fromkeys(row["row"] for row in rows)):
        of_row = [row for row in rows if row["row"] == name]
        if len(of_row) > 1:
            for each, style in (("peer", ":"), ("best", "-")):
                speeds = [
                    row.get(f"{each} steps/s") or row.get("spread steps/s", row["bare steps/s"])
                    for row in of_row
                ]
                seeds = [row["seeds"] for row in of_row]
                throughput.plot(seeds, speeds, style, marker="o", markersize=4, color=f"C{index}")
            throughput.annotate(
                name,
                (seeds[-1], speeds[-1]),
                (6, -3),
                textcoords="offset points",
                color=f"C{index}",
                fontsize=9,
            )
    if not throughput.lines:  # a logarithmic axis needs numbers
        throughput.set_ylim(1, 10)
    throughput.plot([], [], "-", color="0.4", label="script, over all devices")
    throughput.plot([], [], ":", color="0.4", label="peer")
    throughput.set(
        xscale="log",
        yscale="log",
        xlabel="seeds",
        ylabel="steps per second, all seeds together",
        xlim=(0.8, 150),
    )
    throughput.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    throughput.minorticks_off()
    throughput.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all where none is given"
    )
    parser.add_argument("--purejaxrl", type=Path, help="a clone of the repository")
    parser.add_argument("--purejaxql", type=Path, help="a clone of the repository")
    parser.add_argument("--cleanrl", type=Path, help="a clone of the repository")
    parser.add_argument("--jaxmarl", type=Path, help="a clone of the repository")
    parser.add_argument("--pgx", type=Path, help="a clone of the repository")
    parser.add_argument(
        "--cleanrl-python", type=Path, help="a Python that has what it needs, torch among it"
    )
    parser.add_argument(
        "--sbx-python", type=Path, help="a Python that has sbx-rl and gymnasium[mujoco]"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="by default some for the device that is here"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="trainings of each, after an uncounted first one"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps in one training")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(unknown)}; known are {', '.join(ROWS)}")
    for name in (
        "purejaxrl",
        "purejaxql",
        "cleanrl",
        "cleanrl_python",
        "sbx_python",
        "jaxmarl",
        "pgx",
    ):
        if (path := getattr(options, name)) and not path.exists():
            parser.error(f"--{name.replace('_', '-')} {path}: is not there")
        setattr(options, name, path and path.absolute())
    options.out.mkdir(parents=True, exist_ok=True)
    file, device = options.out / "speed.json", jax.devices()[0]
    where = f"{os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    print(f"{where}, jax {jax.__version__}, medians of {options.repeats}", flush=True)
    rows = json.loads(file.read_text()) if file.exists() else []
    for name in options.rows or ROWS:
        for seeds in options.seeds or ROWS[name][1 if device.platform == "cpu" else 2]:
            row = measure(name, seeds, options)
            if row is None:
                print(
                    f"{name}: left out, its peer is not here: --help names what it needs",
                    flush=True,
                )
                break
            print(markdown([row]).splitlines()[-1], flush=True)
            rows = [each for each in rows if (each["row"], each["seeds"]) != (name, seeds)]
            rows.append(row | {"device": where, "jax": jax.__version__})
            rows.sort(key=lambda each: (list(ROWS).index(each["row"]), each["seeds"]))
            file.write_text(json.dumps(rows, indent=1))
            (options.out / "speed.md").write_text(markdown(rows))
            draw(rows, options.out / "speed.png")


if __name__ == "__main__":
    main()
