"""Sweeps: what is compiled, sweeps without training or pictures, and their directories."""

import csv
import dataclasses
import json
import weakref
from pathlib import Path

import numpy as np
import pytest

from onejit import sweep
from onejit.base import statistics
from onejit.engine import compilation, loop
from onejit.engine.memory import GIB
from onejit.engine.progress import progress_bar
from onejit.run.record import Record
from onejit.script import command_line, load
from onejit.sweep import execution, pictures, results
from onejit.sweep.trials import Search, Sweep, Trials, make_groups


def config_of(script, words):
    return command_line.parse_with(script, command_line.split_flags(words), sweep.Options, "")[0]


# --- what is compiled ---


def memory_of(words: list[str], size: int) -> float:
    """The option `--memory` with which slices of a sweep over `lr` have this size."""
    script = load.load_script(words[0])
    program = compilation.compile_slice(script, config_of(script, words[1:]), ["lr"], size)
    return program.bytes * 1.01 / GIB


def fix_size_of_slices(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr(compilation, "largest_slice", lambda compile_size, *_: compile_size(size))


def before_compilations(patch: pytest.MonkeyPatch, call) -> None:
    """`call(size, config)` before each compilation."""
    compile_slice = compilation.compile_slice

    def compile_it(script, config, names, size):
        call(size, config)
        return compile_slice(script, config, names, size)

    patch.setattr(compilation, "compile_slice", compile_it)


def note_programs(patch: pytest.MonkeyPatch, programs: list) -> None:
    """Add a weak reference to each program that trains a slice."""
    run = loop.run

    def run_and_note(program, *args):
        programs.append(weakref.ref(program.advance))
        return run(program, *args)

    patch.setattr(loop, "run", run_and_note)


# --- results ---


def before_results(patch: pytest.MonkeyPatch, call) -> None:
    """`call()` between the training and the results."""
    write_results = results.write_results

    def call_and_write(a_sweep):
        call()
        return write_results(a_sweep)

    patch.setattr(results, "write_results", call_and_write)


def write_results_of(
    patch, run_dir, script, swept, returns, weights=None, running=(0.0, 0), track=None, **more
) -> Path:
    """Write the results of trials without training: `returns` [trials, seeds] of every update."""
    patch.setattr(results, "keep_agents", lambda *_: None)
    config = dataclasses.replace(script.Config(), total_timesteps=20_000)
    columns = zip(*swept.values(), strict=True)
    trials = [dict(zip(swept, values, strict=True)) for values in columns]
    options = sweep.Options(num_seeds=len(returns[0]), track=track)
    search = Search(script, config, options, swept)
    a_sweep = Sweep(search, Trials(trials), run_dir, Record(settings={}))
    for number, group in enumerate(make_groups(search, trials, range(len(trials)))):
        a_sweep.trials.groups.append(group)
        of_runs = np.ravel(np.array(returns)[group.trials])
        rows = np.repeat(of_runs[:, None], group.config.num_updates, axis=1)
        metrics = {"episodes": np.ones(rows.shape, int), "episodic_return": rows, **more}
        final = statistics.final_return(metrics, group.config.num_updates, running)
        agent = {"weights": np.zeros(len(rows)) if weights is None else np.array(weights)}
        trained = loop.Trained(metrics, agent, final)
        name = f"{number}-0000000-{len(rows):07d}"
        (run_dir / "unfinished" / name).mkdir(parents=True)
        execution.finish_slice(a_sweep, group, trained, 0, name, progress_bar(1, disable=True))
    results.write_results(a_sweep)
    return run_dir


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Most of a small sweep's time goes into its pictures."""
    for name in ("draw_curves", "draw_returns", "draw_heat_map"):
        patch.setattr(pictures, name, lambda *args: args[-1].write(b"picture"))


def metrics_of(run_dir: Path) -> dict:
    return dict(np.load(run_dir / "metrics.npz"))


def record_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def rows_of(run_dir: Path, name: str = "results.csv") -> list[dict]:
    with (run_dir / name).open() as file:
        return list(csv.DictReader(file))
