"""Compare the return on brax's hopper with PureJaxRL's ppo_continuous_action.py, same settings, in one process.

    git clone https://github.com/luchris429/purejaxrl
    python benchmarks/hopper_vs_purejaxrl.py purejaxrl --seeds 32

Trains the same number of seeds with each and compares the mean return of the episodes that ended in
the last tenth of training; they are written to a file after every slice of seeds, and a second call
goes on from there. PureJaxRL runs from its own files; where --hidden is not its 256, a network of
the same layers and the other size is put in its place. Its layers start from this repository's
`orthogonal`, because flax's can hang under `vmap` on CPUs. Speed is compared by
benchmarks/speed.py.
"""

import argparse
import math
import os
import sys
import time
import types
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo_continuous
from onejit import statistics

SETTINGS = dict(  # PureJaxRL's own
    num_envs=2048, num_steps=10, update_epochs=4, num_minibatches=32, lr=3e-4, anneal_lr=False, gamma=0.99,
    gae_lambda=0.95, clip_eps=0.2, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5,
)  # fmt: skip


def make_onejit(args, steps):
    config = ppo_continuous.Config(
        env_name="hopper",
        env_params={"backend": args.backend},
        total_timesteps=steps,
        hidden_sizes=(args.hidden, args.hidden),
        **SETTINGS,
    )
    train = ppo_continuous.make_train(config)

    def run(key):
        metrics = train(key)["metrics"]
        return metrics["episodic_return"], metrics["episodes"]

    return run


class Network(nn.Module):
    """PureJaxRL's actor and critic at another size; a `MultivariateNormalDiag` and a value."""

    action_dim: int
    activation: str
    size: int

    @nn.compact
    def __call__(self, obs):
        policy = ppo_continuous.Actor(self.action_dim, (self.size, self.size), self.activation)(obs)
        return policy, ppo_continuous.Critic((self.size, self.size), self.activation)(obs)


def make_purejaxrl(args, steps):
    sys.path.insert(0, str(Path(args.purejaxrl, "purejaxrl")))
    sys.modules.setdefault(
        "navix", types.ModuleType("navix")
    )  # imported by its wrappers, not used on brax
    import ppo_continuous_action
    import wrappers

    ppo_continuous_action.orthogonal = ppo_continuous.orthogonal
    ppo_continuous_action.BraxGymnaxWrapper = lambda name: wrappers.BraxGymnaxWrapper(
        name, backend=args.backend
    )
    if args.hidden != 256:
        ppo_continuous_action.ActorCritic = partial(Network, size=args.hidden)
    settings = {name.upper(): value for name, value in SETTINGS.items()}
    more = dict(TOTAL_TIMESTEPS=steps, ENV_NAME="hopper", ACTIVATION="tanh", NORMALIZE_ENV=True)
    train = ppo_continuous_action.make_train(settings | more)

    def run(key):
        info = train(key)["metrics"]  # [updates, steps, environments]
        ended, returns = info["returned_episode"], info["returned_episode_returns"]
        episodes = ended.sum((1, 2))
        return jnp.where(ended, returns, 0.0).sum((1, 2)) / episodes, episodes

    return run


def describe(args):
    sizes = f"networks {args.hidden} x {args.hidden}"
    return f"hopper, {args.backend}, {sizes}, {os.cpu_count()} cores of {jax.devices()[0].platform}"


def compile_both(args, steps, seeds):
    compiled = {}
    for name, make in {"onejit": make_onejit, "PureJaxRL": make_purejaxrl}.items():
        run = make(args, steps)
        begun = time.perf_counter()
        compiled[name] = (
            jax.jit(jax.vmap(run) if seeds > 1 else run).lower(make_keys(0, seeds)).compile()
        )
        print(f"{name}: compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    return compiled


def make_keys(first, seeds):
    """One key, or several, spread over as many cores as divide them."""
    keys = jnp.stack([jax.random.PRNGKey(seed) for seed in range(first, first + seeds)])
    if seeds == 1:
        return keys[0]
    num_devices = math.gcd(seeds, jax.device_count())
    devices, auto = jax.devices()[:num_devices], (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((num_devices,), ("seed",), auto, devices=devices)
    return jax.device_put(
        keys, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("seed"))
    )


def returns(args):
    steps = args.steps
    done = dict(np.load(args.out)) if Path(args.out).exists() else {}
    compiled = compile_both(args, steps, args.slice)
    while len(done.get("PureJaxRL", ())) < args.seeds:
        first = len(done.get("PureJaxRL", ()))
        keys = make_keys(first, args.slice)
        for name, run in compiled.items():
            begun = time.perf_counter()
            result, episodes = (np.atleast_2d(np.asarray(array)) for array in run(keys))
            last = result.shape[1] * 9 // 10
            weight = episodes[:, last:]
            final = np.where(weight > 0, weight * result[:, last:], 0).sum(1) / weight.sum(1)
            done[name] = np.concatenate([done.get(name, np.zeros(0))[:first], final])
            rate = args.slice * steps / (time.perf_counter() - begun)
            seeds = f"seeds {first} to {first + args.slice - 1}"
            print(f"{name}: {seeds}, {rate:,.0f} steps/s, returns {final.round(1)}", flush=True)
        np.savez(args.out, **done)
    for name, values in done.items():
        middle, low, high = statistics.interval(values)
        result = f"interquartile mean {middle:.1f}, 95 % interval {low:.1f} to {high:.1f}, {len(values)} seeds"
        print(f"{describe(args)}, after {steps} steps, {name}: {result}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("purejaxrl", help="a clone of the repository")
    parser.add_argument(
        "--backend", default="positional", help="of brax; PureJaxRL's default is positional"
    )
    parser.add_argument("--hidden", type=int, default=256, help="size of the two hidden layers")
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--slice", type=int, default=1, help="seeds at once, spread over the cores")
    parser.add_argument("--out", default="", help="by default a name that holds the settings")
    args = parser.parse_args()
    args.out = args.out or f"hopper_{args.backend}_{args.hidden}_{args.steps}.npz"
    returns(args)


if __name__ == "__main__":
    main()
