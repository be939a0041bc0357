"""Write a folder for a model hub: agents, settings, metrics, a replay and a model card.

    onejit export runs/ppo/cartpole
    onejit export runs/ppo/cartpole --out exported/ppo-cartpole --no-video

Nothing is uploaded. The folder can be used without onejit: it contains the script and your own
modules, and the model card has the code that loads an agent.
"""

import contextlib
import io
import keyword
import math
import shlex
import shutil
from pathlib import Path

import tyro
import yaml

from onejit import local_modules, run_directory, statistics
from onejit.files import write

COPIED = (
    "agent.safetensors",
    "best_agent.safetensors",
    "config.yaml",
    "metrics.npz",
    "evaluation.npy",
    "evaluations.npz",
    "learning_curve.png",
)
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
{set_path}python {file} --config config.yaml --num-seeds {num_seeds} --seed {seed}
```

Commit {commit}. Versions: {versions}. Hardware: {device}.

## How to use it

`agent.safetensors` contains all agents: the first axis of each array is the seed. `{script}.py`
defines the policy and the environment, and its header lists the packages that it needs.{note} In
this folder, run:

```python
from pathlib import Path

import jax
import yaml
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

{import_script}


def as_tuples(value):  # YAML has lists where the config has tuples
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


settings = yaml.safe_load(Path("config.yaml").read_text())
settings = {{name: as_tuples(value) for name, value in settings.items()}}
config = script.Config(**settings)
agents = unflatten_dict(load_file("agent.safetensors"), sep=".")
agent = jax.tree.map(lambda leaf: leaf[{best}], agents)  # the best agent
env, env_params = script.make_env(config)
start, act = script.make_policy(config)
obs, state = env.reset(jax.random.key(0), env_params)
action, memory = act(agent, start(), obs)
print(action)
```
"""

# For modules of the user's own environment.
IMPORT_MODULES = """import sys

sys.path.insert(0, "modules")  # of the environment

"""

# For a file whose name cannot be imported, such as my-ppo.py.
IMPORT_BY_PATH = """import importlib.util
import sys

spec = importlib.util.spec_from_file_location("script", {file!r})
script = importlib.util.module_from_spec(spec)
sys.modules["script"] = script  # where dataclasses look for it
spec.loader.exec_module(script)"""


def import_of(name: str) -> str:
    """Python code that imports the script `name` as `script`."""
    if name.isidentifier() and not keyword.iskeyword(name):
        return f"import {name} as script"
    return IMPORT_BY_PATH.format(file=f"{name}.py")


def make_table(record: dict) -> str:
    """The returns of run.json as Markdown."""
    rows = [
        "| return | mean over seeds (95 % interval) | worst agent | seeds |",
        "|---|---|---|---|",
    ]
    for name in ("final return", "greedy return"):
        if name not in record:
            continue
        numbers = record[name]
        mean = []
        for key in ("mean", "mean_low", "mean_high"):
            mean.append(math.nan if numbers[key] is None else numbers[key])
        worst = "-" if numbers["worst"] is None else f"{numbers['worst']:.4g}"
        count = f"{numbers['seeds'] - numbers['not_finite']} of {numbers['seeds']}"
        rows.append(f"| {name} | {statistics.show(*mean)} | {worst} | {count} |")
    return "\n".join(rows)


def front_matter(record: dict) -> str:
    """Metadata for a model hub: tags, and the mean greedy return.

    Without an evaluation it is the mean final return.
    """
    settings = record["settings"]
    numbers = record.get("greedy return") or record["final return"]
    value = "diverged"
    if numbers["mean"] is not None:
        value = f"{numbers['mean']:.4g}"
        if numbers["mean_high"] is not None:
            value += f" +/- {numbers['mean_high'] - numbers['mean']:.2g}"
    metric = {"type": "mean_reward", "name": "mean_reward", "value": value, "verified": False}
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": settings["env_name"], "type": settings["env_name"]},
        "metrics": [metric],
    }
    front = {
        "library_name": "onejit",
        "tags": ["reinforcement-learning", "jax", settings["script"], settings["env_name"]],
        "model-index": [{"name": settings["script"], "results": [result]}],
    }
    return yaml.safe_dump(front, sort_keys=False)


def copy_files(run_dir: Path, record: dict, folder: Path) -> None:
    """Copy the files of a run, and the user's own modules."""
    for name in COPIED:
        if (run_dir / name).is_file():
            shutil.copy(run_dir / name, folder / name)
    private = ("path", "folders")  # paths on this machine
    public = {name: value for name, value in record.items() if name not in private}
    run_directory.write_record(folder, public)
    modules = local_modules.read_copies(run_dir, record, force=True)  # checked by `load_run`
    local_modules.write_copies(folder, modules)


def note_of_module(record: dict) -> str:
    """A note for the model card if the environment is in a module that the folder lacks."""
    module = local_modules.module_of(record["settings"]["env_name"])
    if not module or module in local_modules.names_of_copies(record):
        return ""
    return f" The environment needs the module `{module}`."


def model_card(record: dict, pictures: str, best: int) -> str:
    settings = record["settings"]
    has_modules = bool(record.get("modules"))
    versions = [f"{name} {version}" for name, version in record["versions"].items()]
    return CARD.format(
        front=front_matter(record),
        script=settings["script"],
        file=shlex.quote(f"{settings['script']}.py"),
        set_path="PYTHONPATH=modules " if has_modules else "",
        import_script=(IMPORT_MODULES if has_modules else "") + import_of(settings["script"]),
        env_name=settings["env_name"],
        num_seeds=settings["num_seeds"],
        seed=settings["seed"],
        table=make_table(record),
        pictures=pictures,
        command=record.get("command") or "unknown",
        commit=record.get("commit") or "unknown",
        device=record.get("device") or "unknown",
        versions=", ".join(versions),
        note=note_of_module(record),
        best=best,
    )


def replay(run_dir: Path, agent: int, folder: Path, force: bool, trust: bool) -> None:
    """Write replay.gif. Raises ValueError."""
    from onejit import render

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it names a file that is renamed
            (path,) = render.main(
                run_dir,
                agents=(str(agent),),
                formats=("gif",),
                out=folder,
                force=force,
                trust=trust,
            )
    except ValueError as error:
        raise ValueError(f"video: {error}; --no-video exports without it") from error
    path.replace(folder / "replay.gif")


def main(
    run_dir: tyro.conf.Positional[Path],
    out: Path | None = None,
    video: bool = True,
    force: tyro.conf.FlagCreatePairsOff[bool] = False,
    trust: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> Path:
    """Write the folder, completely or not at all. Returns its path. Raises ValueError.

    Args:
        run_dir: a finished run of `onejit train`
        out: new folder; RUN_DIR-export by default
        video: play an episode of the best agent, and add it as replay.gif
        force: use the run's copies of the script and of your modules although they were edited
        trust: execute code outside of the run directory that the run names
    """
    from onejit.render import check_agents

    record = run_directory.read_record(run_dir)
    if "final return" not in record or "finished" not in record:
        raise ValueError(f"run_dir = {run_dir}: is not a finished run of onejit train")
    if run_directory.copy_of_script(run_dir, record, force) is None:
        raise ValueError(f"run_dir = {run_dir}: has no copy of its script")
    metrics = run_directory.load_metrics(run_dir)
    out = out or run_dir.with_name(f"{run_dir.name}-export")
    if out.exists():
        raise ValueError(f"out = {out}: already exists")
    script, config, agents = run_directory.load_run(run_dir, force, trust=trust)
    check_agents(script, config, agents, run_dir / "agent.safetensors")
    order, _ = statistics.rank_agents(metrics, statistics.diverged(agents))
    best = int(order[-1])
    folder = out.with_name(f"{out.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copy_files(run_dir, record, folder)
        shutil.copy(script.__file__, folder)
        pictures = "![learning curve](learning_curve.png)"
        if video:
            replay(run_dir, best, folder, force, trust)
            pictures = f"![an episode of agent {best}](replay.gif)\n\n{pictures}"
        write(folder / "README.md", model_card(record, pictures, best))
        folder.replace(out)
    print(f"exported to {out}")
    return out
