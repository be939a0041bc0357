"""Compare the speed of the scripts with their peers, in turn on one machine.

    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/mttga/purejaxql
    git clone https://github.com/vwxyzjn/cleanrl
    git clone https://github.com/FLAIROx/JaxMARL
    git clone https://github.com/sotetsuk/pgx
    git clone https://github.com/nico-bohlinger/RL-X
    pip install --target deps --no-deps flashbax rejax dm-haiku jmp tabulate pydantic \\
        ml_collections
    python -m venv torch && torch/bin/pip install torch gymnasium tensorboard tyro
    python -m venv sbx && sbx/bin/pip install sbx-rl "gymnasium[mujoco]"
    PYTHONPATH=deps python benchmarks/speed.py --purejaxrl purejaxrl --purejaxql purejaxql \\
        --cleanrl cleanrl --cleanrl-python torch/bin/python --sbx-python sbx/bin/python \\
        --jaxmarl JaxMARL --pgx pgx --rlx RL-X
    PYTHONPATH=deps python benchmarks/speed.py sac td3 --seeds 1 8 --repeats 7

Rows: ppo, ppo_minatar, ppo_continuous (hopper), ppo_ant, ppo_rnn and dqn against PureJaxRL; pqn
and pqn_minatar against PureJaxQL; sac and td3 against rejax; flashsac against RL-X; flashsac_crossq
against crossq.py with critics of about as many parameters; mappo against JaxMARL; alphazero against
Pgx's example; ppo_torch, ppo_mujoco and sac_mujoco against CleanRL's PyTorch files; sac_sbx and
crossq_sbx against sbx; envpool_steps and envpool_steps_8 against a plain loop over EnvPool;
gridworld against a plain port. If a peer is missing, its rows are skipped with a message.
benchmarks/peers.py has the hyperparameters and says what is put back in the peers' files for newer
packages.

The contestants are `jit(vmap(train))` of both on one device, as a peer's own README runs its seeds
(a single seed without `vmap`). With several seeds and several devices (each CPU core is one), the
seeds of both are also spread over all devices, as `main` and onejit train do it. Compilation is not
counted, but its time is shown. A ratio compares equal devices: it is the median over neighbouring
trainings, with the least and the largest. XLA splits large operations of one device over all cores;
`JAX_NUM_CPU_DEVICES=1 taskset -c 0` before the command compares on one core. A contestant that
calls LAPACK and could hang (dev/hangs.md) is refused. CleanRL runs in a Python of its own and
reports its speed itself. Writes speed.json, speed.md and speed.png into the directory --out; rows
that were measured before stay in them.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(len(os.sched_getaffinity(0))))

import jax
import numpy as np
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers
from origin import machine, origin

from onejit.base import files


class Row(NamedTuple):
    make: Callable  # of benchmarks/peers.py
    seeds: tuple[int, ...]  # on a CPU
    gpu_seeds: tuple[int, ...]
    steps: int  # of all seeds in one training
    divisor: int  # of an agent's steps
    peer: str = ""  # its name in the figure, which leaves out a row without one


ROWS = {
    "ppo": Row(peers.ppo, (1, 8, 32), (2048,), 400_000, 512, "PureJaxRL, CartPole"),
    "ppo_torch": Row(peers.ppo_torch, (1,), (1,), 100_000, 512, "CleanRL, CartPole"),
    "ppo_mujoco": Row(peers.ppo_mujoco, (1,), (1,), 20_480, 2048, "CleanRL, HalfCheetah"),
    "sac_mujoco": Row(peers.sac_mujoco, (1,), (1,), 8192, 2, "CleanRL, HalfCheetah"),
    "sac_sbx": Row(peers.sac_sbx, (1, 8), (1,), 16_384, 2, "sbx, HalfCheetah"),
    "crossq_sbx": Row(peers.crossq_sbx, (1, 8), (1,), 16_384, 6, "sbx, HalfCheetah"),
    "envpool_steps_8": Row(peers.envpool_steps_8, (1,), (1,), 40_960, 64),
    "envpool_steps": Row(peers.envpool_steps, (1,), (1,), 81_920, 64),
    "ppo_minatar": Row(peers.ppo_minatar, (1, 8), (256,), 131_072, 8192, "PureJaxRL, Breakout"),
    "ppo_continuous": Row(peers.ppo_continuous, (1, 4), (64,), 81_920, 20_480, "PureJaxRL, hopper"),
    "ppo_ant": Row(peers.ppo_ant, (), (64,), 81_920, 20_480),
    "ppo_rnn": Row(peers.ppo_rnn, (1, 8), (256,), 65_536, 512, "PureJaxRL, CartPole"),
    "dqn": Row(peers.dqn, (1, 8), (256,), 400_000, 10, "PureJaxRL, CartPole"),
    "pqn": Row(peers.pqn, (1, 8), (256,), 262_144, 2048, "PureJaxQL, CartPole"),
    "pqn_minatar": Row(peers.pqn_minatar, (1,), (64,), 131_072, 4096, "PureJaxQL, Breakout"),
    "sac": Row(peers.sac, (1, 8), (64,), 65_536, 2, "rejax, Pendulum"),
    "td3": Row(peers.td3, (1, 8), (64,), 65_536, 2, "rejax, Pendulum"),
    "flashsac": Row(peers.flashsac, (1,), (1,), 16_384, 2, "RL-X, Pendulum"),
    "flashsac_crossq": Row(peers.flashsac_crossq, (1, 8), (64,), 16_384, 2),
    "mappo": Row(peers.mappo, (1, 8), (256,), 409_600, 2048, "JaxMARL, simple_spread"),
    "alphazero": Row(peers.alphazero, (1,), (1,), 4096, 1024, "Pgx, connect_four"),
    "gridworld": Row(peers.gridworld, (1, 8, 30), (4096,), 200_000, 1000, "a plain port"),
}

SCRIPT_OF = {  # a row whose name is not its script's
    "ppo_torch": "ppo",
    "ppo_mujoco": "ppo_continuous",
    "ppo_minatar": "ppo",
    "pqn_minatar": "pqn",
    "sac_mujoco": "sac",
    "sac_sbx": "sac",
    "crossq_sbx": "crossq",
    "gridworld": "q_learning_gridworld",
}

# --- measuring ---


def without_runner_state(train):
    """Enough for a whole training to be run, and small: the metrics, whatever their name."""

    def run(key):
        out = train(key)
        return out | {"runner_state": None} if isinstance(out, dict) else out

    return run


def compile_for(train, keys, num_devices=1):
    """`run(keys)`, and the seconds of its compilation. A single seed trains without `vmap`."""
    if isinstance(train, peers.Timed):
        return train, 0.0
    train = without_runner_state(train)
    if len(keys) == 1:

        def train_all(keys):
            return train(keys[0])

    elif num_devices == 1:
        train_all = jax.vmap(train)
    else:
        one_per_device = len(keys) == num_devices  # then without `vmap`, as `main` does it
        mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("seed",))
        train_all = jax.shard_map(
            partial(jax.lax.map, train) if one_per_device else jax.vmap(train),
            mesh=mesh,
            in_specs=PartitionSpec("seed"),
            out_specs=PartitionSpec("seed"),
            check_vma=False,
        )
    begun = time.perf_counter()
    lowered = jax.jit(train_all).lower(keys)
    compiled = lowered.compile()
    seconds = time.perf_counter() - begun
    if "lapack" in lowered.as_text():  # on GPUs it has other names, and does not hang
        raise RuntimeError("a contestant calls LAPACK and could hang: dev/hangs.md")
    return compiled, seconds


def measure(name: str, seeds: int, options) -> dict | None:
    """A row of the table; None if the peer is not there."""
    row = ROWS[name]
    steps = max(2, math.ceil(options.scale * row.steps / seeds / row.divisor)) * row.divisor
    if name == "dqn":
        steps += peers.DQN["learning_starts"]
    ours, theirs = row.make(options, steps)
    if theirs is None:
        return None
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    num_devices = max(n for n in range(1, jax.device_count() + 1) if seeds % n == 0)
    contestants = {"peer": compile_for(theirs, keys), "bare": compile_for(ours, keys)}
    if num_devices > 1:
        contestants["peer spread"] = compile_for(theirs, keys, num_devices)
        contestants["spread"] = compile_for(ours, keys, num_devices)

    seconds = {contestant: [] for contestant in contestants}
    for _ in range(options.repeats + 1):
        for contestant, (run, _) in contestants.items():
            begun = time.perf_counter()
            out = jax.block_until_ready(run(keys))
            taken = time.perf_counter() - begun
            seconds[contestant].append(out if isinstance(out, float) else taken)

    result = {
        "row": name,
        "seeds": seeds,
        "steps": steps,
        "devices": num_devices,
        "repeats": options.repeats,
    }
    peer_of = {"bare": "peer", "spread": "peer spread"}  # on equal devices
    for contestant, (_, compilation) in contestants.items():
        of_it = seconds[contestant][1:]  # the first warms up
        result[f"{contestant} steps/s"] = seeds * steps / float(np.median(of_it))
        result[f"{contestant} compilation"] = compilation
        if contestant in peer_of:
            of_peer = seconds[peer_of[contestant]][1:]
            ratios = sorted(a / b for a, b in zip(of_peer, of_it, strict=True))
            result[f"{contestant} ratio"] = [float(np.median(ratios)), ratios[0], ratios[-1]]
    return result


# --- table and figure ---

HEAD = [
    "row",
    "seeds",
    "peer, one device",
    "script, one device",
    "ratio",
    "peer, all devices",
    "script, all devices",
    "ratio",
    "compilation, s",
]


def markdown(rows: list[dict]) -> str:
    """The table; a ratio above 1 says that the script is the faster one."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows:
        cells = [row["row"], str(row["seeds"])]
        for peer, contestant in (("peer", "bare"), ("peer spread", "spread")):
            if f"{contestant} ratio" in row:
                middle, least, largest = row[f"{contestant} ratio"]
                cells.append(f"{row[f'{peer} steps/s']:,.0f}")
                cells.append(f"{row[f'{contestant} steps/s']:,.0f}")
                cells.append(f"{middle:.2f} ({least:.2f} to {largest:.2f})")
            else:
                cells += ["", "", ""]
        cells.append(f"{row['peer compilation']:.1f} / {row['bare compilation']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], path: Path) -> None:
    """Bars of the ratio to the peer, from 1, grouped by peer."""
    rows = [row for row in rows if ROWS[row["row"]].peer]
    peers_of_rows = [ROWS[row["row"]].peer.partition(", ")[0] for row in rows]
    order = sorted(range(len(rows)), key=lambda i: peers_of_rows.index(peers_of_rows[i]))
    rows = [rows[i] for i in order]
    figure = Figure(figsize=(9, 0.6 + 0.27 * len(rows)), layout="constrained")
    axes = figure.subplots()
    labels, places = [], []
    place, before = 0.0, ""
    for row in rows:
        peer, _, environment = ROWS[row["row"]].peer.partition(", ")
        place -= 1.0 if peer == before else 1.6
        before = peer
        draw_bar(axes, row, place)
        script = SCRIPT_OF.get(row["row"], row["row"])
        count = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
        on = f" on {environment}" if environment else ""
        labels.append(f"{script} / {peer}{on}, {count}")
        places.append(place)
    axes.axvline(1, color="0.4", linewidth=1)
    axes.set_yticks(places, labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set(xscale="log", xlim=(0.6, 400), ylim=(place - 0.8, -0.8))
    axes.set_xlabel("steps per second over those of the baseline")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.spines[["top", "right", "left"]].set_visible(False)
    colors = {"tab:blue": "one seed, one device", "tab:green": "several seeds, all devices"}
    for color, label in colors.items():
        axes.barh([0], [0], color=color, label=label)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=110)


def draw_bar(axes, row: dict, place: float) -> None:
    """The median ratio, with the least and the largest; over all devices, if it was measured."""
    middle, least, largest = row.get("spread ratio") or row["bare ratio"]
    color = "tab:blue" if row["seeds"] == 1 else "tab:green"
    axes.barh(place, middle - 1, left=1, height=0.7, color=color, alpha=0.8)
    axes.plot([least, largest], [place, place], color="0.2", linewidth=1)
    shown = f"{middle:.2f}" if middle < 10 else f"{middle:.0f}"
    where = (max(largest, 1), place)
    axes.annotate(shown, where, (5, 0), textcoords="offset points", va="center", fontsize=9)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; by default all"
    )
    peers.add_flags(parser)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help="train with each of these numbers of seeds; the default depends on row and device",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="timed trainings of each contestant, after one that is not counted",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiply the number of steps of each training by this factor",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("."), help="folder for speed.json, speed.md and speed.png"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing; draw speed.json in --out again"
    )
    options = parser.parse_args()
    if options.render:
        return draw(json.loads((options.out / "speed.json").read_text()), options.out / "speed.png")
    peers.check_flags(parser, options)
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; known are {', '.join(ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "speed.json"
    on_cpu = jax.devices()[0].platform == "cpu"
    print(f"{machine()}, jax {jax.__version__}, medians of {options.repeats}", flush=True)
    rows = json.loads(file.read_text()) if file.exists() else []
    for name in options.rows or ROWS:
        of_device = ROWS[name].seeds if on_cpu else ROWS[name].gpu_seeds
        for seeds in options.seeds or of_device:
            row = measure(name, seeds, options)
            if row is None:
                print(f"{name}: left out, its peer is not here: see --help", flush=True)
                break
            print(markdown([row]).splitlines()[-1], flush=True)
            rows = [other for other in rows if (other["row"], other["seeds"]) != (name, seeds)]
            rows.append(row | {"scale": options.scale, "cores": os.cpu_count()} | origin())
            rows.sort(key=lambda row: (list(ROWS).index(row["row"]), row["seeds"]))
            files.write(file, json.dumps(rows, indent=1) + "\n")
            files.write(options.out / "speed.md", markdown(rows))
            draw(rows, options.out / "speed.png")


if __name__ == "__main__":
    main()
