"""Write a folder for a model hub: agents, settings, metrics, a replay and a model card. Nothing is uploaded.

    onejit export runs/ppo/cartpole
    onejit export runs/ppo/cartpole --out exported/ppo-cartpole --no-video

The folder can be used without onejit: it contains the script, and the model card has the code that loads an agent.
"""

import contextlib
import io
import math
import shutil
from pathlib import Path

import tyro
import yaml

from onejit import runs, statistics

COPIED = (
    "agent.safetensors",
    "best_agent.safetensors",
    "config.yaml",
    "metrics.npz",
    "evaluation.npy",
)
COPIED += ("evaluations.npz", "learning_curve.png")
CARD = """---
{front}---

# {script} on {env_name}

{num_seeds} agents, trained with the script `{script}.py` of onejit, each from its own random seed.

{table}

{pictures}

## How to reproduce it

The agents were trained with

```bash
{command}
```

To train them again from the files in this folder:

```bash
python {script}.py --config config.yaml --num-seeds {num_seeds} --seed {seed}
```

Commit {commit}. Versions: {versions}. Hardware: {device}.

## How to use it

`agent.safetensors` contains all agents: the first axis of each array is the seed. `{script}.py` defines the policy and
the environment, and its header lists the packages that it needs.{note} In this folder, run:

```python
import jax
import tyro
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

import {script}

flags = {script}.read_flags(["--config", "config.yaml"])
config = tyro.cli(tyro.conf.FlagConversionOff[{script}.Config], args=flags)
agents = unflatten_dict(load_file("agent.safetensors"), sep=".")
agent = jax.tree.map(lambda leaf: leaf[{best}], agents)  # the best agent
env, env_params = {script}.make_env(config)
start, act = {script}.make_policy(config)
obs, state = env.reset(jax.random.key(0), env_params)
action, memory = act(agent, start(), obs)
print(action)
```
"""


def make_table(record: dict) -> str:
    """The returns of run.json as Markdown."""
    rows = [
        "| return | mean over seeds (95 % interval) | worst agent | seeds |",
        "|---|---|---|---|",
    ]
    for name in ("final return", "greedy return"):
        if found := record.get(name):
            numbers = [
                math.nan if found[key] is None else found[key]
                for key in ("mean", "mean_low", "mean_high")
            ]
            worst = "-" if found["worst"] is None else f"{found['worst']:.4g}"
            count = f"{found['seeds'] - found['not_finite']} of {found['seeds']}"
            rows.append(f"| {name} | {statistics.show(*numbers)} | {worst} | {count} |")
    return "\n".join(rows)


def front_matter(record: dict) -> str:
    """Metadata for a model hub: tags, and the mean greedy return or, without an evaluation, the mean final return."""
    settings, found = record["settings"], record.get("greedy return") or record["final return"]
    value = "diverged" if found["mean"] is None else f"{found['mean']:.4g}"
    if None not in (found["mean"], found["mean_high"]):
        value += f" +/- {found['mean_high'] - found['mean']:.2g}"
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": settings["env_name"], "type": settings["env_name"]},
        "metrics": [
            {"type": "mean_reward", "name": "mean_reward", "value": value, "verified": False}
        ],
    }
    index = [{"name": settings["script"], "results": [result]}]
    tags = ["reinforcement-learning", "jax", settings["script"], settings["env_name"]]
    return yaml.safe_dump(
        {"library_name": "onejit", "tags": tags, "model-index": index}, sort_keys=False
    )


def copy_files(run_dir: Path, record: dict, folder: Path) -> str:
    """Copy the files of a run, and the module of the user's own environment. Returns a note for the model card."""
    for name in COPIED:
        if (run_dir / name).is_file():
            shutil.copy(run_dir / name, folder / name)
    public = {
        name: value for name, value in record.items() if name not in ("path", "folders")
    }  # paths on this machine
    runs.write_record(folder, public)
    module = record["settings"]["env_name"].rpartition(":")[0]
    places = [Path(place, f"{module}.py") for place in record.get("folders", []) if module]
    if own := next(filter(Path.is_file, places), None):
        shutil.copy(own, folder)
    return f" The environment needs the module `{module}`." if module and own is None else ""


def main(
    run_dir: tyro.conf.Positional[Path],
    out: Path | None = None,
    video: bool = True,
    force: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> Path:
    """Write the folder, completely or not at all. Returns its path. Raises ValueError.

    Args:
        run_dir: a finished run of `onejit train`
        out: new folder; RUN_DIR-export by default
        video: play an episode of the best agent, and add it as replay.gif
        force: use the run's copy of the script although it was edited
    """
    record = runs.read_record(run_dir)
    if "final return" not in record or "finished" not in record:
        raise ValueError(f"run_dir = {run_dir}: is not a finished run of onejit train")
    script = runs.copy_of_script(run_dir, record, force)
    if script is None:
        raise ValueError(f"run_dir = {run_dir}: has no copy of its script")
    settings, metrics = record["settings"], runs.load_metrics(run_dir)
    out = out or run_dir.with_name(f"{run_dir.name}-export")
    if out.exists():
        raise ValueError(f"out = {out}: already exists")
    agents, _ = runs.read_agents(run_dir / "agent.safetensors")
    best = int(statistics.rank_agents(metrics, statistics.diverged(agents))[0][-1])
    folder = out.with_name(f"{out.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        note = copy_files(run_dir, record, folder)
        shutil.copy(script, folder)
        pictures = "![learning curve](learning_curve.png)"
        if video:
            replay(run_dir, best, folder, force)
            pictures = f"![an episode of agent {best}](replay.gif)\n\n{pictures}"
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        filled = {name: record.get(name) or "unknown" for name in ("command", "commit", "device")}
        filled |= {name: settings[name] for name in ("script", "env_name", "num_seeds", "seed")}
        filled |= dict(
            table=make_table(record), pictures=pictures, versions=versions, best=best, note=note
        )
        runs.write(folder / "README.md", CARD.format(**filled, front=front_matter(record)))
        folder.replace(out)
    print(f"exported to {out}")
    return out


def replay(run_dir: Path, agent: int, folder: Path, force: bool) -> None:
    """Write replay.gif. Raises ValueError."""
    from onejit import render

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it names a file that is renamed
            (path,) = render.main(
                run_dir, agents=(str(agent),), formats=("gif",), out=folder, force=force
            )
    except ValueError as error:
        raise ValueError(f"video: {error}; --no-video exports without it") from error
    path.replace(folder / "replay.gif")
