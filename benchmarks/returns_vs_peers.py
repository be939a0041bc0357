"""Compare the returns of the scripts with their peers' own code, at the peers' hyperparameters and seed by seed.

    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/mttga/purejaxql
    pip install --target deps --no-deps flashbax rejax
    PYTHONPATH=deps python benchmarks/returns_vs_peers.py --purejaxrl purejaxrl --purejaxql purejaxql
    PYTHONPATH=deps python benchmarks/returns_vs_peers.py sac td3 --seeds 8

Rows: ppo (CartPole-v1), ppo_minatar (Breakout) and dqn against PureJaxRL; pqn against PureJaxQL; sac and td3
(Pendulum-v1) against rejax. Both contestants have the settings of benchmarks/speed.py, which also loads the peers'
files and says what is put back in them for newer packages. After training, each agent plays 64 greedy episodes in the
gymnax environment, the same episodes for all agents. Results go into --out after every row, and rows that are in it
are not measured again.
"""

import argparse
import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import gymnax
import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import speed  # noqa: E402

from onejit import statistics  # noqa: E402

STEPS = {
    "ppo": 500_000,
    "ppo_minatar": 1_000_000,
    "dqn": 500_000,
    "pqn": 500_000,
    "sac": 20_000,
    "td3": 20_000,
}
ENVIRONMENTS = {"ppo_minatar": "Breakout-MinAtar", "sac": "Pendulum-v1", "td3": "Pendulum-v1"}
PEERS = {"ppo": "PureJaxRL", "ppo_minatar": "PureJaxRL", "dqn": "PureJaxRL", "pqn": "PureJaxQL"}
EPISODES = 64

made = []  # the scripts and configs that speed.py's rows have made


def script_training(script: str, steps: int, **settings):
    module = importlib.import_module(script)
    made.append((module, module.Config(total_timesteps=steps, **settings)))
    return module.make_train(made[-1][1])


speed.script_training, speed.metrics_of = (
    script_training,
    lambda train: train,
)  # with the networks, not the metrics alone


def our_policy(out):
    module, config = made[-1]
    start, act = module.make_policy(config)
    return lambda obs: act(out["runner_state"].agent, start(), obs)[0]


def peer_policy(name: str, options, theirs, out):
    """The peer's greedy action, by its own network and the parameters that it returns."""
    if name in ("sac", "td3"):
        actor = theirs.actor
        if name == "td3":
            return lambda obs: actor.apply(out[0], obs[None])[0]
        return lambda obs: (
            actor.action_scale
            * jnp.tanh(actor.apply(out[0], obs[None], method="_action_dist").mode()[0])
        )
    state = out["runner_state"][0]
    num_actions = gymnax.make(ENVIRONMENTS.get(name, "CartPole-v1"))[0].num_actions
    if name == "dqn":
        network = speed.load(options.purejaxrl / "purejaxrl/dqn.py", "peer_dqn").QNetwork(
            num_actions
        )
        return lambda obs: network.apply(state.params, obs).argmax()
    if name == "pqn":
        module = speed.load(options.purejaxql / "purejaxql/pqn_gymnax.py", "peer_pqn")
        network = module.QNetwork(num_actions, hidden_size=256)
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        return lambda obs: network.apply(variables, obs[None], train=False)[0].argmax()
    network = speed.load(options.purejaxrl / "purejaxrl/ppo.py", "peer_ppo").ActorCritic(
        num_actions, activation="relu" if name == "ppo_minatar" else "tanh"
    )
    return lambda obs: network.apply(state.params, obs.ravel())[0].mode()


def greedy_return(policy, env, params):
    """The mean return of greedy episodes, which begin from the same keys for all agents."""

    def episode(key):
        reset_key, key = jax.random.split(key)
        obs, state = env.reset(reset_key, params)

        def step(carry, key):
            obs, state, total, ended = carry
            obs, state, reward, terminated, truncated, _ = env.step(key, state, policy(obs), params)
            return (
                obs,
                state,
                total + jnp.where(ended, 0.0, reward),
                ended | terminated | truncated,
            ), None

        keys = jax.random.split(key, params.max_steps_in_episode)
        return jax.lax.scan(step, (obs, state, 0.0, jnp.array(False)), keys)[0][2]

    return jax.vmap(episode)(jax.random.split(jax.random.PRNGKey(1), EPISODES)).mean()


def measure(name: str, options):
    """`{contestant: greedy return of each seed}`, or None where the peer is not there."""
    made.clear()
    ours, theirs = speed.ROWS[name][0](options, STEPS[name])
    if theirs is None:
        return None
    module, config = made[-1]
    own = module.make_env(config)  # actions of a script are in [-1, 1]
    raw = gymnax.make(ENVIRONMENTS.get(name, "CartPole-v1"))
    peer_actions = partial(peer_policy, name, options, theirs)
    contestants = {
        "onejit": (ours, our_policy, own),
        PEERS.get(name, "rejax"): (theirs, peer_actions, raw),
    }
    found = {}
    for each, (train, policy, env) in contestants.items():
        run = jax.jit(
            lambda key, train=train, policy=policy, env=env: greedy_return(policy(train(key)), *env)
        )
        found[each] = [
            round(float(run(jax.random.PRNGKey(seed))), 4) for seed in range(options.seeds)
        ]
        print(
            f"{name}, {each}: {statistics.show(*statistics.mean_interval(found[each]))}", flush=True
        )
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(STEPS)}; all where none is given"
    )
    parser.add_argument("--purejaxrl", type=Path, help="a clone of the repository")
    parser.add_argument("--purejaxql", type=Path, help="a clone of the repository")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("returns_vs_peers.json"))
    options = parser.parse_args()
    if unknown := set(options.rows) - set(STEPS):
        parser.error(f"no such row: {', '.join(unknown)}; known are {', '.join(STEPS)}")
    for path in (options.purejaxrl, options.purejaxql):
        if path and not path.exists():
            parser.error(f"{path}: is not there")
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.rows or STEPS:
        if name in done and len(done[name]["returns"]["onejit"]) >= options.seeds:
            print(f"{name}: is in {options.out} already", flush=True)
            continue
        returns = measure(name, options)
        if returns is None:
            print(f"{name}: left out, its peer is not here: --help names what it needs", flush=True)
            continue
        done[name] = {
            "environment": ENVIRONMENTS.get(name, "CartPole-v1"),
            "steps": STEPS[name],
            "returns": returns,
        }
        options.out.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
