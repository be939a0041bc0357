"""Compare mappo.py with JaxMARL's own mappo_rnn_smax.py on SMAX, same settings, in one process.

    git clone https://github.com/FLAIROx/JaxMARL
    python benchmarks/mappo_vs_jaxmarl.py JaxMARL --scenario 3m --steps 1000000 --seeds 5

Both take the settings of configs/mappo/smax_SCENARIO.yaml and train one seed after the other on one device. The results
are the return and the fraction of battles won by the exploring policy, as means over the updates of the last tenth of
training, and the steps per second of processor time. They are written to a file after every seed, and a second call
goes on from there. `--arms jaxmarl` trains only JaxMARL's agents.

JaxMARL's file runs unchanged. Three modules that it imports are replaced: hydra and omegaconf, which it needs only for
its command line, and wandb, through which it reports its metrics. Unequal remain: JaxMARL's networks have one more
dense layer after the GRU, its policy does not see the number of the agent, and the differences in docs/mappo.md.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path

os.environ["JAX_NUM_CPU_DEVICES"] = "1"

import jax
import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mappo  # noqa: E402
from onejit import runs, statistics  # noqa: E402


def make_onejit(args):
    config = runs.read_config(mappo, ROOT / f"configs/mappo/smax_{args.scenario}.yaml")
    config = dataclasses.replace(config, total_timesteps=args.steps)
    train = jax.jit(mappo.make_train(config)).lower(jax.random.key(0)).compile()

    def run(seed):
        metrics = jax.device_get(train(jax.random.key(seed))["metrics"])
        return metrics["episodic_return"], metrics["win_rate"]

    return run


def make_jaxmarl(args):
    logged = []
    stub("hydra", main=lambda **_: lambda function: function)
    stub("omegaconf", OmegaConf=None)
    stub("wandb", log=logged.append)
    file = Path(args.jaxmarl, "baselines/MAPPO/mappo_rnn_smax.py")
    spec = importlib.util.spec_from_file_location("mappo_rnn_smax", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = yaml.safe_load((file.parent / "config/mappo_homogenous_rnn_smax.yaml").read_text())
    settings |= {"MAP_NAME": args.scenario, "TOTAL_TIMESTEPS": args.steps}
    train = jax.jit(module.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()

    def run(seed):
        logged.clear()
        jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        jax.effects_barrier()
        updates = sorted(logged, key=lambda entry: int(entry["env_step"]))
        return tuple(np.array([float(entry[name]) for entry in updates]) for name in ("returns", "win_rate"))

    return run


def stub(name, **attributes):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)


ARMS = {"onejit": make_onejit, "jaxmarl": make_jaxmarl}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jaxmarl", help="a clone of the repository")
    parser.add_argument("--scenario", default="3m", help="3m or 2s3z")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out", default="", help="by default a name that holds the settings")
    args = parser.parse_args()
    file = Path(args.out or f"mappo_vs_jaxmarl_{args.scenario}_{args.steps}_{'_'.join(args.arms)}.json")
    done = json.loads(file.read_text()) if file.exists() else {}
    trains = {name: ARMS[name](args) for name in args.arms}
    for seed in range(args.seeds):
        for name, train in trains.items():
            found = done.setdefault(name, {"return": [], "win_rate": [], "steps_per_second": []})
            if seed < len(found["return"]):
                continue
            begun = time.process_time()
            returns, wins = train(seed)
            rate = args.steps / (time.process_time() - begun)
            last = slice(len(returns) * 9 // 10, None)
            row = np.nanmean(returns[last]), np.nanmean(wins[last]), rate
            for values, value in zip(found.values(), row, strict=True):
                values.append(round(float(value), 4))
            file.write_text(json.dumps(done))
            print(f"{name}, seed {seed}: return {row[0]:.3f}, won {row[1]:.1%}, {rate:,.0f} steps/s", flush=True)
    for name, found in done.items():
        for kind, values in found.items():
            print(f"{name}, {kind}: {statistics.show(*statistics.mean_interval(values))}, worst {min(values):.4g}")


if __name__ == "__main__":
    main()
