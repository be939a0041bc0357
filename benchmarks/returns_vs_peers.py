"""Compare the returns of the scripts with their peers' own code, at the peers' hyperparameters.

    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/mttga/purejaxql
    git clone https://github.com/FLAIROx/JaxMARL
    pip install --target deps --no-deps flashbax rejax
    PYTHONPATH=deps python benchmarks/returns_vs_peers.py --purejaxrl purejaxrl \\
        --purejaxql purejaxql --jaxmarl JaxMARL
    PYTHONPATH=deps python benchmarks/returns_vs_peers.py sac td3 --seeds 16
    python benchmarks/returns_vs_peers.py smax_3m --jaxmarl JaxMARL --seeds 5 --peer-only
    python benchmarks/returns_vs_peers.py crossq_walker2d --sbx-python PYTHON --seeds 4

| rows | peer's code | return |
|---|---|---|
| ppo (CartPole-v1), ppo_minatar (Breakout), dqn (CartPole-v1) | PureJaxRL | greedy |
| pqn (CartPole-v1) | PureJaxQL | greedy |
| sac, td3 (Pendulum-v1) | rejax | greedy |
| hopper (brax's, spring; networks of 64 x 64) | PureJaxRL, ppo_continuous_action.py | final |
| simple_spread | JaxMARL, baselines/IPPO/ippo_ff_mpe.py | final |
| cramped_room | JaxMARL, baselines/IPPO/ippo_ff_overcooked.py | final |
| smax_3m (1e6 steps), smax_2s3z (5e5) | JaxMARL, baselines/MAPPO/mappo_rnn_smax.py | final |
| crossq_walker2d (Walker2d-v4, 1e5 steps) | sbx, CrossQ | final |

Seeds train one after the other on one device. A greedy return is the mean over 64 greedy episodes
after training, which are the same for all agents. A final return is the mean return of the
exploring policy in the last tenth of training; for SMAX the fraction of battles won is added.
benchmarks/peers.py loads the peers' files and says what is put back in them for newer packages.

In the rows of JaxMARL, mappo.py takes its settings from configs/mappo/ROW.yaml, and JaxMARL's own
config has the same values. The number of steps, the layout, and the fraction of the training with
shaped rewards (one half) are passed to both. JaxMARL logs the returns of MPE multiplied by the
number of agents, and this script divides them by it. Two differences remain in addition to those in
docs/mappo.md. JaxMARL's policies do not see the number of their agent, and its critic sees it only
in SMAX. JaxMARL has one more dense layer after the GRU.

In crossq_walker2d both take their settings from configs/crossq/mujoco_walker2d.yaml. crossq.py
steps its environment with EnvPool, sbx with Gymnasium.

Results are written into --out after every seed, and a second call continues from there.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers
from origin import origin

from onejit.base import files, statistics
from onejit.engine import evaluation
from onejit.run.directory import read_config

EPISODES = 64

# --- greedy returns ---


class Greedy(NamedTuple):
    environment: str
    steps: int
    peer: str


GREEDY = {
    "ppo": Greedy("CartPole-v1", 500_000, "PureJaxRL"),
    "ppo_minatar": Greedy("Breakout-MinAtar", 1_000_000, "PureJaxRL"),
    "dqn": Greedy("CartPole-v1", 500_000, "PureJaxRL"),
    "pqn": Greedy("CartPole-v1", 500_000, "PureJaxQL"),
    "sac": Greedy("Pendulum-v1", 20_000, "rejax"),
    "td3": Greedy("Pendulum-v1", 20_000, "rejax"),
}


def greedy_row(name: str, options):
    """`{contestant: run}`, where `run(seed)` returns what it reaches; None without the peer."""
    row = GREEDY[name]
    ours, theirs = getattr(peers, name)(options, row.steps)
    if theirs is None:
        return None
    script_env = ours.script.make_env(ours.config)  # its actions are in [-1, 1]
    peer_env = gymnax.make(row.environment)
    return {
        "onejit": greedy_run(ours, partial(script_policy, ours), script_env),
        row.peer: greedy_run(theirs, partial(peer_policy, name, options, theirs), peer_env),
    }


def greedy_run(train, policy_of, env):
    @jax.jit
    def train_and_play(key):
        return greedy_return(policy_of(train(key)), *env)

    return lambda seed: {"return": train_and_play(jax.random.PRNGKey(seed))}


def script_policy(training, out):
    start, act = evaluation.policy_of(training.script, training.config)

    def policy(obs):
        action, _ = act(out["runner_state"].agent, start(), obs)
        return action

    return policy


def peer_policy(name: str, options, theirs, out):
    """The peer's greedy action, by its own network and the parameters that it returns."""
    if name == "sac":
        actor = theirs.actor

        def policy(obs):
            distribution = actor.apply(out[0], obs[None], method="_action_dist")
            return actor.action_scale * jnp.tanh(distribution.mode()[0])

        return policy
    if name == "td3":
        return lambda obs: theirs.actor.apply(out[0], obs[None])[0]

    state = out["runner_state"][0]
    num_actions = gymnax.make(GREEDY[name].environment)[0].num_actions
    if name == "dqn":
        module = peers.load(options.purejaxrl / "purejaxrl" / "dqn.py", "peer_dqn")
        network = module.QNetwork(num_actions)
        return lambda obs: network.apply(state.params, obs).argmax()
    if name == "pqn":
        module = peers.load(options.purejaxql / "purejaxql" / "pqn_gymnax.py", "peer_pqn")
        network = module.QNetwork(num_actions, hidden_size=256)
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        return lambda obs: network.apply(variables, obs[None], train=False)[0].argmax()
    module = peers.load(options.purejaxrl / "purejaxrl" / "ppo.py", "peer_ppo")
    activation = "relu" if name == "ppo_minatar" else "tanh"
    network = module.ActorCritic(num_actions, activation=activation)
    return lambda obs: network.apply(state.params, obs.ravel())[0].mode()


def greedy_return(policy, env, env_params):
    """The mean return of greedy episodes, which begin from the same keys for all agents."""

    def episode(key):
        reset_key, key = jax.random.split(key)
        obs, state = env.reset(reset_key, env_params)

        def step(carry, key):
            obs, state, total, ended = carry
            obs, state, reward, terminated, truncated, _ = env.step(
                key, state, policy(obs), env_params
            )
            total += jnp.where(ended, 0.0, reward)
            return (obs, state, total, ended | terminated | truncated), None

        keys = jax.random.split(key, env_params.max_steps_in_episode)
        carry, _ = jax.lax.scan(step, (obs, state, 0.0, jnp.array(False)), keys)
        _, _, total, _ = carry
        return total

    return jax.vmap(episode)(jax.random.split(jax.random.PRNGKey(1), EPISODES)).mean()


# --- final returns ---


def script_run(train, names=("return",)):
    """The final return of a script, and for teams the fraction of games won."""
    train_metrics = jax.jit(lambda key: train(key)["metrics"])
    metric = {"return": "episodic_return", "win_rate": "win_rate"}

    def run(seed):
        metrics = {
            name: np.asarray(x)[None] for name, x in train_metrics(jax.random.key(seed)).items()
        }
        return {
            name: statistics.final_return(metrics | {"episodic_return": metrics[metric[name]]})[0]
            for name in names
        }

    return run


HOPPER_STEPS = 2_000_000


class SmallActorCritic(nn.Module):
    """PureJaxRL's actor and critic with layers of 64: a `MultivariateNormalDiag` and a value."""

    action_dim: int
    activation: str

    @nn.compact
    def __call__(self, obs):
        from ppo_continuous import Actor, Critic

        layers = {"obs_space": None, "hidden_sizes": (64, 64), "activation": self.activation}
        policy = Actor(action_dim=self.action_dim, **layers, log_std_init=0.0)(obs)
        return policy, Critic(**layers)(obs)


def hopper_row(options):
    if not options.purejaxrl:
        return None
    ours = peers.Training(
        "ppo_continuous",
        HOPPER_STEPS,
        env_name="hopper",
        env_params={"backend": "spring"},
        hidden_sizes=(64, 64),
        **peers.BRAX,
    )
    module = peers.load_ppo_continuous(options)
    module.BraxGymnaxWrapper = partial(module.BraxGymnaxWrapper, backend="spring")
    module.ActorCritic = SmallActorCritic
    peer = module.make_train(peers.ppo_continuous_config(HOPPER_STEPS, "hopper"))

    @jax.jit
    def train_peer(key):
        info = peer(key)["metrics"]  # [updates, steps, environments]
        ended = info["returned_episode"]
        returns = jnp.where(ended, info["returned_episode_returns"], 0.0)
        return ended.sum((1, 2)), returns.sum((1, 2)) / ended.sum((1, 2))

    def run(seed):
        episodes, returns = train_peer(jax.random.PRNGKey(seed))
        metrics = {"episodes": episodes[None], "episodic_return": returns[None]}
        return {"return": statistics.final_return(jax.tree.map(np.asarray, metrics))[0]}

    return {"onejit": script_run(ours), "PureJaxRL": run}


class Team(NamedTuple):
    file: str  # of JaxMARL, in baselines/
    config: str
    steps: int | None = None  # those of configs/mappo where not given
    agents: int = 1  # by which the logged return is multiplied


SMAX = ("MAPPO/mappo_rnn_smax.py", "mappo_homogenous_rnn_smax")
TEAMS = {
    "simple_spread": Team("IPPO/ippo_ff_mpe.py", "ippo_ff_mpe", agents=3),
    "cramped_room": Team("IPPO/ippo_ff_overcooked.py", "ippo_ff_overcooked"),
    "smax_3m": Team(*SMAX, steps=1_000_000),
    "smax_2s3z": Team(*SMAX, steps=500_000),
}


def team_config(name: str):
    import mappo

    config = read_config(mappo, ROOT / "configs" / "mappo" / f"{name}.yaml")
    steps = TEAMS[name].steps or config.total_timesteps
    return dataclasses.replace(config, total_timesteps=steps)


def team_row(name: str, options):
    if not options.jaxmarl:
        return None
    import mappo

    config = team_config(name)
    names = ("return", "win_rate") if name.startswith("smax") else ("return",)
    return {
        "onejit": script_run(mappo.make_train(config), names),
        "JaxMARL": jaxmarl_run(name, options.jaxmarl / "baselines", config.total_timesteps),
    }


def jaxmarl_run(name: str, baselines: Path, steps: int):
    team = TEAMS[name]
    module = peers.load(baselines / team.file, "jaxmarl_team")
    file = (baselines / team.file).parent / "config" / f"{team.config}.yaml"
    settings = yaml.safe_load(file.read_text()) | {"TOTAL_TIMESTEPS": steps}
    if name == "cramped_room":
        settings["ENV_KWARGS"] = {"layout": module.overcooked_layouts["cramped_room"]}
        settings["REW_SHAPING_HORIZON"] = steps / 2
    if name.startswith("smax"):
        settings["MAP_NAME"] = name.removeprefix("smax_")
    logged = []  # through W&B, whose module is a stub
    sys.modules["wandb"].log = logged.append
    train = jax.jit(module.make_train(settings))

    def run(seed):
        logged.clear()
        out = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        jax.effects_barrier()
        if not name.startswith("smax"):
            returns = np.array(out["metrics"]["returned_episode_returns"]) / team.agents
            return {"return": last_tenth(returns)}
        updates = sorted(logged, key=lambda entry: int(entry["env_step"]))
        return {
            "return": last_tenth([float(entry["returns"]) for entry in updates]),
            "win_rate": last_tenth([float(entry["win_rate"]) for entry in updates]),
        }

    return run


def last_tenth(values) -> float:
    """The mean over the updates in the last tenth of training."""
    return np.nanmean(values[len(values) * 9 // 10 :])


# --- sbx, as a process ---

CROSSQ_STEPS = 100_000

# Takes settings as JSON, and prints the returns and the lengths of all episodes of the training.
SBX = """
import json, sys
import gymnasium, sbx
from stable_baselines3.common.monitor import Monitor

settings = json.loads(sys.argv[1])
env = Monitor(gymnasium.make(settings.pop("env_name")))
steps = settings.pop("steps")
sbx.CrossQ("MlpPolicy", env, **settings).learn(steps)
print(json.dumps([env.get_episode_rewards(), env.get_episode_lengths()]))
"""


def crossq_row(options):
    """Walker2d-v4. sbx trains its policy in every third step, too, unless it is told otherwise."""
    if not options.sbx_python or not peers.is_installed("envpool"):
        return None
    import crossq

    config = read_config(crossq, ROOT / "configs" / "crossq" / "mujoco_walker2d.yaml")
    config = dataclasses.replace(config, total_timesteps=CROSSQ_STEPS)
    settings = {
        "env_name": config.env_name.partition(":")[2],
        "steps": CROSSQ_STEPS,
        "learning_rate": config.policy_lr,
        "qf_learning_rate": config.q_lr,
        "batch_size": config.batch_size,
        "buffer_size": config.buffer_size,
        "learning_starts": config.learning_starts,
        "gamma": config.gamma,
        "policy_delay": config.policy_delay,
        "policy_kwargs": {
            "net_arch": {"pi": config.hidden_sizes, "qf": config.critic_hidden_sizes}
        },
    }

    def run(seed):
        command = [options.sbx_python, "-c", SBX, json.dumps(settings | {"seed": seed})]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        returns, lengths = json.loads(done.stdout.splitlines()[-1])
        at_end = np.cumsum(lengths) > CROSSQ_STEPS * 0.9
        return {"return": np.array(returns)[at_end].mean()}

    return {"onejit": script_run(crossq.make_train(config)), "sbx": run}


# --- the command ---

ROWS = [*GREEDY, "hopper", *TEAMS, "crossq_walker2d"]


def make_row(name: str, options):
    if name in GREEDY:
        return greedy_row(name, options)
    if name == "hopper":
        return hopper_row(options)
    if name == "crossq_walker2d":
        return crossq_row(options)
    return team_row(name, options)


def task_of(name: str) -> dict:
    """The environment and the steps of a row."""
    if name in GREEDY:
        return {"environment": GREEDY[name].environment, "steps": GREEDY[name].steps}
    if name == "hopper":
        return {"environment": "hopper, spring", "steps": HOPPER_STEPS}
    if name == "crossq_walker2d":
        return {"environment": "Walker2d-v4", "steps": CROSSQ_STEPS}
    return {"environment": name, "steps": team_config(name).total_timesteps}


def measure(name: str, contestants: dict, num_seeds: int, results: dict, file: Path) -> None:
    """Train the seeds that are not in `results`, and keep them in the file.

    Raises ValueError if the file has seeds of another machine, commit or version of JAX.
    """
    row = results.setdefault(name, task_of(name) | {"origin": origin()})
    for seed in range(num_seeds):
        for contestant, run in contestants.items():
            if seed < len(row.get("returns", {}).get(contestant, [])):
                continue
            if row.get("origin") != origin():
                raise ValueError(f"{file}: {name} was begun with {row.get('origin')}; use --out")
            reached = {kind: round(float(value), 4) for kind, value in run(seed).items()}
            for kind, value in reached.items():
                of_kind = row.setdefault("returns" if kind == "return" else kind, {})
                of_kind.setdefault(contestant, []).append(value)
            files.write(file, json.dumps(results, indent=1) + "\n")
            print(f"{name}, {contestant}, seed {seed}: {reached}", flush=True)


def show(name: str, row: dict) -> None:
    for kind in ("returns", "win_rate"):
        for contestant, values in row.get(kind, {}).items():
            mean = statistics.show(*statistics.student_interval(values))
            print(f"{name}, {contestant}, {kind}: {mean}, worst {min(values):.4g}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; by default all"
    )
    peers.add_flags(parser)
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds of each contestant")
    parser.add_argument("--peer-only", action="store_true", help="do not train the script")
    parser.add_argument(
        "--out", type=Path, default=Path("returns_vs_peers.json"), help="JSON file for the results"
    )
    options = parser.parse_args()
    peers.check_flags(parser, options)
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; known are {', '.join(ROWS)}")
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.rows or ROWS:
        contestants = make_row(name, options)
        if contestants is None:
            print(f"{name}: left out, its peer is not here: see --help", flush=True)
            continue
        if options.peer_only:
            del contestants["onejit"]
        measure(name, contestants, options.seeds, results, options.out)
        show(name, results[name])


if __name__ == "__main__":
    main()
