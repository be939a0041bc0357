"""Writing a run: what it needs to be resumed, and its results."""

import sys
import traceback
from functools import partial
from pathlib import Path

import numpy as np

from onejit.base import statistics
from onejit.base.files import delete_folder, write, write_picture
from onejit.engine.loop import Trained
from onejit.run.agents import save_agents
from onejit.run.learning_curve import draw_learning_curve
from onejit.run.record import Record, now, write_record
from onejit.script import local_modules
from onejit.script.configs import write_config
from onejit.script.contract import Script
from onejit.script.load import source_of
from onejit.script.steps import timesteps_until


def save_results(script: Script, config, seed: int, agents, metrics: dict, folder: Path) -> None:
    """Write config.yaml, metrics.npz, agent.safetensors and learning_curve.png. Raises OSError.

    `metrics` {name: [num_seeds, num_updates]} and `agents` [num_seeds, ...] are NumPy arrays.
    """
    write_config(folder / "config.yaml", config)
    np.savez_compressed(folder / "metrics.npz", **metrics)
    save_agents(agents, script, seed, folder / "agent.safetensors")
    title = f"{Path(script.__file__).stem} on {config.env_name}"
    draw = partial(draw_learning_curve, config, metrics, title)
    write_picture(folder / "learning_curve.png", draw)


def write_inputs(run_dir: Path, config, script: Script, modules: dict[str, bytes]) -> None:
    """Write config.yaml, the script and the user's modules. Raises OSError.

    `modules` comes from `local_modules.read_sources`.
    """
    write_config(run_dir / "config.yaml", config)
    write(run_dir / Path(script.__file__).name, source_of(script))
    local_modules.write_copies(run_dir, modules)


def begin_run(run_dir: Path, config, record: Record, script: Script, env_names) -> None:
    """Write all that a run needs to be resumed; run.json is the last file. Raises OSError."""
    modules = local_modules.read_sources(script, env_names)
    record.modules = {path: local_modules.hash_of(source) for path, source in modules.items()}
    write_inputs(run_dir, config, script, modules)
    write_record(run_dir, record)


# --- results ---


def finish_run(
    run_dir: Path, record: Record, script: Script, config, trained: Trained, runner_state=None
) -> list[str]:
    """Write the results, all of them or none, and the record. Returns lines about the returns.

    Raises OSError.
    """
    metrics = trained.metrics
    agents = trained.agent
    seed = record.settings["seed"]

    folder = run_dir / "results.partial"
    delete_folder(folder)  # of an earlier attempt
    folder.mkdir(exist_ok=True)
    save_results(script, config, seed, agents, metrics, folder)
    np.save(folder / "final_return.npy", trained.final_return)
    if trained.evaluations is not None:
        save_evaluations(
            config, record.options["eval_interval"], trained.evaluations.returns, folder
        )
        best = trained.evaluations.best_agent
        save_agents(best, script, seed, folder / "best_agent.safetensors")
    if trained.evaluation is not None:
        np.save(folder / "evaluation.npy", trained.evaluation)
    if runner_state is not None:
        report(script, config, runner_state, folder)
    for path in folder.iterdir():
        if (run_dir / path.name).is_dir():
            delete_folder(run_dir / path.name)
        path.replace(run_dir / path.name)
    delete_folder(folder)

    lost = statistics.diverged(agents, record.not_finite_at_start)
    observed = statistics.observed_range(metrics, trained.final_return)
    summary = statistics.summarize(trained.final_return, lost, observed)
    record.final_return = summary.to_store()
    lines = summary.lines("training return")
    if trained.evaluation is not None:
        observed = statistics.observed_range(metrics, trained.evaluation)
        summary = statistics.summarize(trained.evaluation.mean(axis=1), lost, observed)
        record.greedy_return = summary.to_store()
        lines += summary.lines("evaluation return")
    for line in statistics.warning_of_few(statistics.few_episodes(metrics, config)):
        lines.append(f"training return: {line}")
    broken = statistics.broken_metrics(metrics)
    for name, where in broken.items():
        seeds = f"{where.any(axis=1).sum()} of {len(where)} seeds"
        lines.append(f"{name}: NaN in {seeds}, first in update {where.any(axis=0).argmax() + 1}")
    record.broken_metrics = sorted(broken)
    record.finished = now()
    write_record(run_dir, record)
    return lines


def save_evaluations(config, interval: int, returns: np.ndarray, folder: Path) -> None:
    """Write evaluations.npz with `timesteps` [n] and `returns` [num_seeds, n]."""
    number = returns.shape[1]
    timesteps = [timesteps_until(config, interval * (1 + i)) for i in range(number)]
    np.savez_compressed(folder / "evaluations.npz", timesteps=timesteps, returns=returns)


def report(script: Script, config, runner_state, folder: Path) -> None:
    """The script's own figures, if any. A mistake in them costs no results. Raises OSError."""
    script_report = getattr(script, "report", None)
    if script_report is None:
        return
    try:
        script_report(config, runner_state, folder)
    except OSError:
        raise
    except Exception:
        traceback.print_exc()
        print(f"onejit train: warning: report of {script.__file__} has failed", file=sys.stderr)
