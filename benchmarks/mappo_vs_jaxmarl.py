"""Compare mappo.py with JaxMARL's own scripts at the same settings, in one process.

    git clone https://github.com/FLAIROx/JaxMARL
    python benchmarks/mappo_vs_jaxmarl.py JaxMARL --scenario simple_spread --seeds 10
    python benchmarks/mappo_vs_jaxmarl.py JaxMARL --scenario cramped_room --seeds 10
    python benchmarks/mappo_vs_jaxmarl.py JaxMARL --scenario smax_3m --steps 1000000 --seeds 5

| scenario | JaxMARL's script |
|---|---|
| simple_spread | baselines/IPPO/ippo_ff_mpe.py |
| cramped_room | baselines/IPPO/ippo_ff_overcooked.py |
| smax_3m, smax_2s3z | baselines/MAPPO/mappo_rnn_smax.py |

mappo.py takes its settings from configs/mappo/SCENARIO.yaml, and JaxMARL's own config has the same
values. The number of steps, the layout, and the fraction of the training with shaped rewards (one
half) are passed to both. Seeds train one after the other on one device. The exploring policy's
return and, in SMAX, the fraction of battles that it wins are means over the updates in the last
tenth of the training. Speed is in steps per second of processor time. Results are written to a file
after every seed, and a second call continues from it. `--arms jaxmarl` trains JaxMARL's agents
alone.

JaxMARL's files run unchanged. Three modules that they import are replaced: hydra and omegaconf,
which they need only for their command lines, and wandb, through which they report metrics. JaxMARL
logs the returns of MPE multiplied by the number of agents, and this script divides them by it. Two
differences remain beside those in docs/mappo.md. JaxMARL's policies do not see the number of their
agent, and its critic sees it only in SMAX. JaxMARL has one more dense layer after the GRU.
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

import mappo
from onejit import run_directory, statistics

SMAX = "MAPPO/mappo_rnn_smax", "mappo_homogenous_rnn_smax"
PEERS = {  # JaxMARL's script, its config, and what its logged return is divided by
    "simple_spread": ("IPPO/ippo_ff_mpe", "ippo_ff_mpe", 3),
    "cramped_room": ("IPPO/ippo_ff_overcooked", "ippo_ff_overcooked", 1),
    "smax_3m": (*SMAX, 1),
    "smax_2s3z": (*SMAX, 1),
}


def make_onejit(args):
    train = jax.jit(mappo.make_train(args.config)).lower(jax.random.key(0)).compile()

    def run(seed):
        metrics = jax.device_get(train(jax.random.key(seed))["metrics"])
        return {"return": metrics["episodic_return"]} | (
            {"win_rate": metrics["win_rate"]} if args.smax else {}
        )

    return run


def make_jaxmarl(args):
    logged, (script, config, divisor) = [], PEERS[args.scenario]
    stub("hydra", main=lambda **_: lambda function: function)
    stub("omegaconf", OmegaConf=None)
    stub("wandb", log=logged.append)
    file = Path(args.jaxmarl, f"baselines/{script}.py")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = yaml.safe_load((file.parent / f"config/{config}.yaml").read_text())
    settings |= {"TOTAL_TIMESTEPS": args.steps, "MAP_NAME": args.scenario.removeprefix("smax_")}
    if args.scenario == "cramped_room":
        settings |= {"ENV_KWARGS": {"layout": module.overcooked_layouts["cramped_room"]}}
        settings |= {"REW_SHAPING_HORIZON": args.steps / 2}
    train = jax.jit(module.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()

    def run(seed):
        logged.clear()
        out = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        jax.effects_barrier()
        if not args.smax:
            return {"return": np.array(out["metrics"]["returned_episode_returns"]) / divisor}
        updates = sorted(logged, key=lambda entry: int(entry["env_step"]))
        names = {"return": "returns", "win_rate": "win_rate"}
        return {
            kind: np.array([float(entry[name]) for entry in updates])
            for kind, name in names.items()
        }

    return run


def stub(name, **attributes):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)


ARMS = {"onejit": make_onejit, "jaxmarl": make_jaxmarl}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jaxmarl", help="a clone of the repository")
    parser.add_argument("--scenario", default="smax_3m", choices=list(PEERS))
    parser.add_argument(
        "--steps",
        type=int,
        help="environment steps of each agent; the config's total_timesteps by default",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument(
        "--out", default="", help="file for the results; named after the settings by default"
    )
    args = parser.parse_args()
    config = run_directory.read_config(mappo, ROOT / f"configs/mappo/{args.scenario}.yaml")
    args.steps, args.smax = args.steps or config.total_timesteps, args.scenario.startswith("smax")
    args.config = dataclasses.replace(config, total_timesteps=args.steps)
    file = Path(
        args.out or f"mappo_vs_jaxmarl_{args.scenario}_{args.steps}_{'_'.join(args.arms)}.json"
    )
    done = json.loads(file.read_text()) if file.exists() else {}
    trains = {name: ARMS[name](args) for name in args.arms}
    for seed in range(args.seeds):
        for name, train in trains.items():
            found = done.setdefault(name, {})
            if seed < len(found.get("return", [])):
                continue
            begun = time.process_time()
            metrics = train(seed)
            row = {
                kind: np.nanmean(values[len(values) * 9 // 10 :])
                for kind, values in metrics.items()
            }
            row["steps_per_second"] = args.steps / (time.process_time() - begun)
            for kind, value in row.items():
                found.setdefault(kind, []).append(round(float(value), 4))
            file.write_text(json.dumps(done))
            print(
                f"{name}, seed {seed}: "
                + ", ".join(f"{kind} {value:.4g}" for kind, value in row.items()),
                flush=True,
            )
    for name, found in done.items():
        for kind, values in found.items():
            print(
                f"{name}, {kind}: {statistics.show(*statistics.mean_interval(values))}, worst {min(values):.4g}"
            )


if __name__ == "__main__":
    main()
