"""Healthy and sick trainings of ppo.py: pictures and numbers of docs/learning_curves.md.

    python tools/pages/sick_runs.py
    python tools/pages/sick_runs.py --seeds 8 --out runs/sick_runs

Every run uses the defaults of ppo.py except for 1e5 steps and the values in RUNS. All runs train in
one compiled program, with the same keys. The script writes one picture per run with four metrics
and a thin line per seed. It prints the medians over seeds at the start, in the middle and at the
end of training.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from small_png import save

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ppo

RUNS = {
    "healthy": {"lr": 4e-3},
    "slow": {"lr": 1e-5},
    "collapsed": {"lr": 0.1},
    "failed_seeds": {"lr": 0.05},
    "random": {"lr": 4e-3, "ent_coef": 1.0},
    "diverged": {"lr": 1e30},
}
PANELS = {  # the metrics that are drawn, and the scale of their axes
    "episodic_return": (0.0, 520.0),
    "entropy": (-0.03, 0.75),
    "approx_kl": (1e-7, 30.0),  # on a logarithmic axis
    "clip_fraction": (-0.02, 0.6),
}


def train(seeds: int) -> tuple[dict, np.ndarray]:
    """Metrics [runs, seeds, updates], and whether the parameters are finite, [runs, seeds]."""
    base = ppo.Config(env_name="CartPole-v1", total_timesteps=100_000)
    values = [
        {field: getattr(base, field) for field in ("lr", "ent_coef")} | run for run in RUNS.values()
    ]
    arrays = {field: jnp.array([run[field] for run in values]) for field in ("lr", "ent_coef")}
    keys = jax.random.split(jax.random.key(0), seeds)

    def one(changed, key):
        out = ppo.make_train(dataclasses.replace(base, **changed))(key)
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(out["runner_state"].agent)]
        return out["metrics"], jnp.stack(finite).all()

    trained = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))(arrays, keys)
    return jax.tree.map(np.asarray, trained)


def bins(values: np.ndarray, width: int = 5) -> np.ndarray:
    """Means of `width` neighbouring updates, without NaN, where no episode ended."""
    values = values[:, : values.shape[1] // width * width].reshape(len(values), -1, width)
    known = np.isfinite(values)
    count = known.sum(axis=-1)
    return np.where(count, np.where(known, values, 0.0).sum(axis=-1) / np.maximum(count, 1), np.nan)


def draw(name: str, metrics: dict, file: Path) -> None:
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    for axis, (metric, limits) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        curves = bins(metrics[metric])
        steps = (np.arange(curves.shape[1]) + 1) * 1e5 / curves.shape[1]
        axis.plot(steps, curves.T, color="tab:blue", linewidth=0.8, alpha=0.6)
        axis.set(
            title=metric,
            ylim=limits,
            xlim=(0, 1e5),
            xticks=(0, 5e4, 1e5),
            xticklabels=("0", "5e4", "1e5"),
        )
        axis.title.set_fontsize(10)
        if metric == "approx_kl":
            axis.set_yscale("log")
        if not np.isfinite(curves).any():
            axis.text(
                0.5, 0.5, "NaN", ha="center", va="center", color="tab:red", transform=axis.transAxes
            )
    settings = ", ".join(f"{field} {value:g}" for field, value in RUNS[name].items())
    figure.suptitle(f"{settings}, {len(curves)} seeds", fontsize=11)
    save(figure, file, colors=32, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=16, help="agents per run")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "figures", help="folder for the pictures"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    metrics, finite = train(args.seeds)
    for index, name in enumerate(RUNS):
        run = {metric: values[index] for metric, values in metrics.items()}
        draw(name, run, args.out / f"curves_{name}.png")
        final = bins(run["episodic_return"], run["episodic_return"].shape[1] // 10)[:, -1]
        healthy = f"{finite[index].sum()} of {args.seeds} seeds with finite parameters"
        print(f"{name}: {RUNS[name]}, {healthy}")
        by_seed = " ".join(f"{value:.0f}" for value in np.sort(final))
        print(f"  return, last tenth: mean {final.mean():.4g}, by seed {by_seed}")
        for metric in (*PANELS, "explained_variance", "value_loss"):
            curves = bins(run[metric])
            medians = [
                np.median(curves[:, round(at * (curves.shape[1] - 1))])
                for at in (0.0, 0.1, 0.5, 1.0)
            ]
            shown = " ".join(f"{median:.4g}" for median in medians)
            print(f"  {metric}, median at 0, 10, 50 and 100 %: {shown}")


if __name__ == "__main__":
    main()
