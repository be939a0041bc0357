"""The model card of an exported run, which hubs show as the page of the folder."""

import keyword
import math
import shlex
from typing import NamedTuple

import numpy as np
import yaml

from onejit.base import statistics
from onejit.run.record import Record
from onejit.script import local_modules

AGAIN = """To train them again from the files in this folder:

```bash
{set_path}python {file} --config config.yaml --num-seeds {num_seeds} --seed {seed}
```

"""

CARD = """---
{front}---

# {script} on {env_name}

{num_seeds} agents, trained with the script `{script}.py` of onejit, {origin}.

{table}

{episodes}

{pictures}
{play}
## How to reproduce it

{again}Commit {commit}. Versions: {versions}. Hardware: {device}. Licence: {license}.

## How to use it without onejit

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
agent = jax.tree.map(lambda leaf: leaf[{agent}], agents)
env, env_params = script.make_env(config)
obs, state = env.reset(jax.random.key(0), env_params)
{act}
```
"""

ACT = """act = script.make_policy(config)
print(act(agent, obs))"""
ACT_WITH_MEMORY = """start, act = script.make_policy(config)
action, memory = act(agent, start(), obs)
print(action)"""

PLAY = """
## How to play it

Read `{script}.py` first: the code below downloads this folder, executes this script and plays
{count} episodes. `onejit render hf:{repo} --trust` draws one.

```python
import onejit

script, config, agents = onejit.load_run(onejit.download("{repo}"))
returns = onejit.evaluate(script, config, agents, agent={agent}, episodes={count})
print(f"{{returns.mean():.2f}} +/- {{returns.std():.2f}}")
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


class Shown(NamedTuple):
    """What a card says of the agent that it plays."""

    agent: int
    reason: str  # why it is this agent
    returns: np.ndarray  # of new greedy episodes, perhaps of none
    has_memory: bool  # whether its policy has a memory
    pictures: str
    repo: str | None  # USER/NAME on the hub
    license: str


def import_of(name: str) -> str:
    """Python code that imports the script `name` as `script`."""
    if name.isidentifier() and not keyword.iskeyword(name):
        return f"import {name} as script"
    return IMPORT_BY_PATH.format(file=f"{name}.py")


def make_table(record: Record) -> str:
    """The returns of run.json as Markdown."""
    rows = [
        "| return | mean over seeds (95 % interval) | worst agent | seeds |",
        "|---|---|---|---|",
    ]
    returns = {"final return": record.final_return, "greedy return": record.greedy_return}
    for name, numbers in returns.items():
        if numbers is None:
            continue
        mean = []
        for key in ("mean", "mean_low", "mean_high"):
            mean.append(math.nan if numbers[key] is None else numbers[key])
        worst = "-" if numbers["worst"] is None else f"{numbers['worst']:.4g}"
        count = f"{numbers['seeds'] - numbers['not_finite']} of {numbers['seeds']}"
        rows.append(f"| {name} | {statistics.show(*mean)} | {worst} | {count} |")
    return "\n".join(rows)


def mean_reward(returns: np.ndarray) -> str:
    """Mean and standard deviation over episodes, as readers of hubs expect."""
    return f"{returns.mean():.2f} +/- {returns.std():.2f}"


def front_matter(record: Record, shown: Shown) -> str:
    """Metadata that a model hub reads: tags, licence and the mean return of the agent."""
    settings = record.settings
    env_name = settings["env_name"].rpartition(":")[2]  # without the module that it is in
    front = {
        "library_name": "onejit",
        "license": shown.license,
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", "jax", settings["script"], env_name],
    }
    if len(shown.returns):
        metric = {
            "type": "mean_reward",
            "name": "mean_reward",
            "value": mean_reward(shown.returns),
            "verified": False,
        }
        result = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": env_name, "type": env_name},
            "metrics": [metric],
        }
        front["model-index"] = [{"name": settings["script"], "results": [result]}]
    return yaml.safe_dump(front, sort_keys=False)


def sentences_on_episodes(record: Record, shown: Shown) -> str:
    """What the two kinds of +/- mean, and of how many seeds and episodes."""
    seeds = record.settings["num_seeds"]
    text = "One agent was trained, so there is no interval over seeds."
    if is_chosen(record):
        text = "A sweep has chosen the agents by returns: another training may return less."
    elif seeds > 1:
        text = (
            f"The mean over {seeds} seeds is what to expect from another training. "
            "Its interval is Student's t over seeds."
        )
    text += f" This card plays agent {shown.agent}, {shown.reason}."
    if len(shown.returns):
        text += (
            f" `mean_reward` is its return in {len(shown.returns)} new greedy episodes, "
            f"{mean_reward(shown.returns)}: the mean and the standard deviation over episodes."
        )
    return text


def note_of_module(record: Record) -> str:
    """A note for the model card if the environment is in a module that the folder lacks."""
    module = local_modules.module_of(record.settings["env_name"])
    if not module or module in local_modules.names_of_copies(record):
        return ""
    return f" The environment needs the module `{module}`."


def section_on_playing(record: Record, shown: Shown) -> str:
    """How to download and play the agent, if the folder goes to a hub."""
    if shown.repo is None:
        return ""
    count = len(shown.returns) or 16
    script = record.settings["script"]
    return PLAY.format(script=script, repo=shown.repo, agent=shown.agent, count=count)


def is_replay(record: Record) -> bool:
    return record.others.get("population", "").startswith("a replay")


def is_chosen(record: Record) -> bool:
    """Whether a sweep has chosen the agents by their returns."""
    return record.kind == "trial" and not is_replay(record)


def origin_of(record: Record) -> str:
    if is_replay(record):
        return "with a schedule that a sweep has found"
    return "chosen by a sweep" if is_chosen(record) else "each from its own random seed"


def command_to_train_again(record: Record) -> str:
    """It is left out for agents that the config alone does not make."""
    was_stopped = record.num_updates != record.total_updates
    if "population" in record.others or was_stopped:
        return ""
    settings = record.settings
    return AGAIN.format(
        set_path="PYTHONPATH=modules " if record.modules else "",
        file=shlex.quote(f"{settings['script']}.py"),
        num_seeds=settings["num_seeds"],
        seed=settings["seed"],
    )


def model_card(record: Record, shown: Shown) -> str:
    settings = record.settings
    has_modules = bool(record.modules)
    versions = [f"{name} {version}" for name, version in record.versions.items()]
    return CARD.format(
        front=front_matter(record, shown),
        script=settings["script"],
        origin=origin_of(record),
        again=command_to_train_again(record),
        import_script=(IMPORT_MODULES if has_modules else "") + import_of(settings["script"]),
        env_name=settings["env_name"],
        num_seeds=settings["num_seeds"],
        table=make_table(record),
        episodes=sentences_on_episodes(record, shown),
        pictures=shown.pictures,
        play=section_on_playing(record, shown),
        commit=record.commit or "unknown",
        device=record.device or "unknown",
        versions=", ".join(versions),
        license=shown.license,
        note=note_of_module(record),
        agent=shown.agent,
        act=ACT_WITH_MEMORY if shown.has_memory else ACT,
    )
