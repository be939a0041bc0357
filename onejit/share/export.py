"""Take an agent elsewhere: as a folder for a model hub, on the hub, or as one file.

    onejit export runs/ppo/cartpole                        a folder, runs/ppo/cartpole-export
    onejit export runs/ppo/cartpole --push USER/NAME       and upload it to the Hugging Face hub
    onejit export runs/ppo/cartpole --format stablehlo     the greedy policy for JAX
    onejit export runs/ppo/cartpole --format onnx          the greedy policy for ONNX Runtime

The folder can be used without onejit: it contains the script and your own modules, and the model
card has the code that loads an agent. The files of a policy need neither onejit nor the script.
Nothing is uploaded without --push.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from onejit.base import statistics
from onejit.engine import evaluation
from onejit.run import hub
from onejit.run.directory import load_run
from onejit.run.record import read_record
from onejit.script.contract import Script
from onejit.share import folder as folders
from onejit.share import policy as policies
from onejit.share.card import Shown


def choose_seeds(wanted: str, run_dir: Path, agents) -> tuple[list[int], str]:
    """The seeds to export, and why these. Raises ValueError."""
    from onejit.watch.render import rank

    lost = statistics.diverged(agents, read_record(run_dir).not_finite_at_start)
    number = len(lost)
    if wanted == "all":
        for seed in np.flatnonzero(lost):
            print(f"agent {seed} has diverged and is left out")
        if lost.all():
            raise ValueError("seed_index = all: every agent has diverged")
        return np.flatnonzero(~lost).tolist(), "each seed that did not diverge"
    if wanted == "best":
        order, criterion = rank(run_dir, agents, best=False)
        seed = int(order[-1])
        reason = f"the best of {number} by {criterion}" if number > 1 else "the only one"
    elif wanted.isdecimal() and int(wanted) < number:
        seed = int(wanted)
        reason = "as --seed-index says"
    else:
        raise ValueError(
            f"seed_index = {wanted}: must be best, all or a number from 0 to {number - 1}"
        )
    if lost[seed]:
        raise ValueError(f"seed_index = {wanted}: agent {seed} has diverged")
    return [seed], reason


def write_policies(script: Script, config, agents, form: str, paths: dict[int, Path]) -> list[Path]:
    """Write the policies of seeds, `paths` {seed: path}. Raises ValueError."""
    for seed, path in paths.items():
        policy = policies.make_policy(script, config, agents, seed)
        signature = policies.save(policy, form, path, Path(script.__file__).name)
        print(f"agent {seed}: {path}")
    print(signature)
    return list(paths.values())


def main(
    run_dir: tyro.conf.Positional[Path],
    out: Path | None = None,
    format: Literal["folder", "stablehlo", "onnx"] = "folder",
    seed_index: str = "best",
    push: str | None = None,
    private: tyro.conf.FlagCreatePairsOff[bool] = False,
    license: str = "apache-2.0",
    eval_episodes: int = 16,
    video: bool = True,
    force: tyro.conf.FlagCreatePairsOff[bool] = False,
    trust: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> Path | list[Path]:
    """Write a folder or policies, completely or not at all. Returns the paths. Raises ValueError.

    Args:
        run_dir: a finished run of `onejit train`; policies are also written of a script's own runs
        out: new folder or file; RUN_DIR-export or RUN_DIR/agentN.FORMAT by default
        format: folder for a model hub, or the greedy policy as StableHLO or ONNX
        seed_index: best, or the number of an agent, from 0; all writes a policy for each agent
        push: USER/NAME on the Hugging Face hub, to upload the folder to
        private: make a new repository on the hub private
        license: licence that the model card names
        eval_episodes: new greedy episodes for the card's mean_reward; 0 leaves it out
        video: play an episode of the agent, and add it as replay.gif
        force: use the run's copies of the script and of your modules although they were edited
        trust: execute code outside of the run directory that the run names
    """
    from onejit.watch.render import check_agents

    if not 0 <= eval_episodes < 2**20:
        raise ValueError(f"eval_episodes = {eval_episodes}: must be from 0 to {2**20 - 1:,}")
    is_folder = format == "folder"
    folder = out or run_dir.with_name(f"{run_dir.name}-export")
    record = read_record(run_dir)
    if is_folder:
        folders.check_finished(run_dir, record, force)
        out = folder
        if seed_index == "all":
            raise ValueError("seed_index = all: the folder has all agents; best or a number plays")
    else:
        policies.check_format(format)
    if out and out.exists():
        raise ValueError(f"out = {out}: already exists")
    if push:
        if not is_folder:
            raise ValueError(f"push = {push}: uploads a folder, not format = {format}")
        hub.check_login(push)
    script, config, agents = load_run(run_dir, force, trust=trust)
    check_agents(script, config, agents, run_dir / "agent.safetensors")
    seeds, reason = choose_seeds(seed_index, run_dir, agents)
    if reason.startswith("the best"):
        print(f"agent {seeds[0]} is {reason}; it was chosen by these returns, so they are biased")
    if not is_folder:
        paths = {seed: (out or run_dir) / f"agent{seed}.{format}" for seed in seeds}
        if out and seed_index != "all":
            paths = {seeds[0]: out}
        return write_policies(script, config, agents, format, paths)

    returns = np.zeros(0)
    if eval_episodes:
        returns = evaluation.evaluate(script, config, agents, seeds[0], eval_episodes)
    shown = Shown(
        agent=seeds[0],
        reason=reason,
        returns=returns,
        has_memory=isinstance(script.make_policy(config), tuple),
        pictures="![learning curve](learning_curve.png)",
        repo=push,
        license=license,
    )
    folders.write_folder(run_dir, record, script, shown, folder, video, force, trust)
    print(f"exported to {folder}")
    if push:
        print(f"uploaded to {hub.upload(folder, push, private)}")
    return folder
