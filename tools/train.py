"""Train a script as its own command line does, with what one file should not carry.

    python tools/train.py ppo --config configs/ppo/cartpole.yaml --num-seeds 1024 --track tensorboard
    python tools/train.py path/to/my_algorithm.py --num-seeds 64 --memory 8

Seeds that do not fit in memory at once run in slices. With the same command on each of many hosts, the seeds spread
over all devices of all hosts. `--track` sends curves to TensorBoard or W&B. All options of the script work here too;
`python ppo.py --help` lists them. The run directory is the same but for what docs/scaling.md says.
"""

import hashlib
import importlib.util
import json
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import numpy as np
import scipy.stats
import slices
from tqdm import tqdm

TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # the package of each


class Request(NamedTuple):
    """What the command line asks for."""

    script: Any
    config: Any
    options: Any  # the script's
    tool: Any  # the tool's


def read_request(args: list[str]) -> Request:
    """Raises ValueError."""
    parser = slices.make_parser(__doc__, "train.py SCRIPT [options]")
    parser.add_argument("--track", choices=list(TRACKERS), help="one curve per seed, and means over seeds")
    name, tool, flags = slices.split_arguments(parser, args)
    if tool.track and importlib.util.find_spec(TRACKERS[tool.track]) is None:
        raise ValueError(f"track = {tool.track}: needs the package {TRACKERS[tool.track]}, see requirements-tools.txt")
    script = common.load_script(name)
    script.use_all_cores()  # before anything starts JAX
    slices.check_names(script, flags)
    config, options = script.parse(slices.join_flags(flags), script.Config)
    script.check(config)
    return Request(script, config, options, tool)


# --- tracking ---


class Tracker(NamedTuple):
    log: Any  # (step, {name: value})
    close: Any


def open_tracker(request: Request, run_dir: Path, record: dict, name: str, steps_done: int) -> Tracker:
    """A TensorBoard or W&B run for one slice, on process 0. Raises OSError where it cannot be started."""
    if not request.tool.track or not slices.is_first():
        return Tracker(lambda step, values: None, lambda: None)
    if request.tool.track == "tensorboard":
        from tensorboardX import SummaryWriter

        # A resumed run writes again what came after its checkpoint: `purge_step` drops the older points.
        writer = SummaryWriter(str(run_dir / "tensorboard" / name), purge_step=steps_done + 1)

        def log(step, values):
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

        return Tracker(log, writer.close)
    import wandb

    label = " ".join(filter(None, [run_dir.name, name]))
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", Path(request.script.__file__).stem),
            name=label,
            id=hashlib.sha256(f"{run_dir} {record['started']} {name}".encode()).hexdigest()[:16],  # the same on resume
            resume="allow",
            dir=str(run_dir),
            config=record["settings"],
        )
    except Exception as error:  # of the network, of a login: many kinds
        raise OSError(f"track = wandb: cannot be started ({error})") from error
    run.define_metric("*", step_metric="environment_steps")
    return Tracker(lambda step, values: run.log(values | {"environment_steps": step}), run.finish)


def curves(script, metrics: dict, seeds: range) -> dict:
    """What is tracked of the updates of a chunk: the return of each seed, and each metric over all. NaN left out.

    `metrics` {name: [seeds, updates]}. The return of all seeds is the interquartile mean, other metrics are plain
    means over seeds and updates.
    """
    returns = script.mean_return(metrics, 0, metrics["episodes"].shape[1])
    values = {f"episodic_return/seed_{seed:04d}": value for seed, value in zip(seeds, returns, strict=True)}
    if len(some := returns[~np.isnan(returns)]):
        values["episodic_return/interquartile_mean"] = scipy.stats.trim_mean(some, 0.25)
    for name, each in metrics.items():
        if name != "episodic_return" and not np.isnan(each).all():
            values[f"{name}/mean"] = np.nanmean(each)
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


# --- training ---


def open_run(request: Request, args: list[str]) -> tuple[str, dict]:
    """The run directory and its record, as the script makes them. Raises ValueError."""
    run_dir, record = request.script.open_run_dir(request.config, request.options, args)
    if "slice" not in record:
        record["command"] = shlex.join(["python", "tools/train.py", *args])
        if (run_dir / "checkpoints").exists():  # a run that the script itself began
            record["slice"] = request.options.num_seeds
    return str(run_dir), record


def prepare(request: Request, args: list[str]):
    """`(run_dir, record, programs by their size)`, what is needed printed. Raises ValueError."""
    script, config, options, devices = request.script, request.config, request.options, len(jax.devices())
    script.make_learner(config)  # a wrong value is found before a directory is made
    step = devices if options.num_seeds % devices == 0 else 1
    if step != devices and jax.process_count() > 1:
        raise ValueError(f"num_seeds = {options.num_seeds}: must be a multiple of the {devices} devices of all hosts")
    run_dir, record = slices.only_first(open_run, request, args)
    memory, begun = slices.free_memory(request.tool.memory), time.perf_counter()
    compile_size = partial(slices.compile_slice, script, config, [], options=options)
    try:
        if "slice" in record:  # a resumed run keeps the slices that it began with, and so its numbers
            program = compile_size(record["slice"])
        else:
            program = slices.largest_slice(compile_size, options.num_seeds, step, memory)
    except ValueError:
        if "slice" not in record:
            slices.only_first(slices.withdraw, Path(run_dir))
        raise
    rest = options.num_seeds % program.size
    programs = {program.size: program} | ({rest: compile_size(rest)} if rest else {})
    if "slice" not in record:
        record["slice"] = program.size
        slices.only_first(script.write, Path(run_dir) / "run.json", json.dumps(record, indent=2))
    if slices.is_first():
        short = " (MORE THAN IS FREE)" if program.bytes > memory else ""
        print(
            f"{config.env_name}: {options.num_seeds} seeds in {-(-options.num_seeds // program.size)} slice(s) of "
            f"{program.size} on {program.num_devices} device(s), {program.bytes / slices.GIB:.3g} GiB of "
            f"{memory / slices.GIB:.3g} free on each{short}; {config.num_updates} updates of "
            f"{config.num_envs * config.num_steps} steps; compiled in {time.perf_counter() - begun:.1f} s"
        )
    return Path(run_dir), record, programs


def train(request: Request, run_dir: Path, record: dict, programs: dict) -> tuple[dict, int, Any]:
    """Train all slices. Returns metrics {name: [num_seeds, ...]} with `evaluation`, and the steps of this process.

    And the runner state of all agents, None where one slice in one process does not hold them all.
    """
    script, config, options = request.script, request.config, request.options
    keys, size, parts, trained = slices.seed_keys(options), record["slice"], [], 0
    steps = config.num_envs * config.num_steps
    total = options.num_seeds * config.num_updates * steps
    with tqdm(total=total, unit="step", unit_scale=True, disable=not slices.is_first()) as progress:
        for first in range(0, options.num_seeds, size):
            seeds = range(first, min(first + size, options.num_seeds))
            program, name = programs[len(seeds)], "" if size == options.num_seeds else f"{first:05d}-{seeds.stop:05d}"
            with slices.open_checkpoints(run_dir / f"checkpoints{'-' * bool(name)}{name}", keep=2) as manager:
                done = manager.latest_step() or 0
                if options.resume and slices.is_first():
                    how = f"{done} of {config.num_updates} updates are done" if done else "no checkpoint, starting anew"
                    tqdm.write(f"resume: seeds {first} to {seeds.stop - 1}: {how}")
                progress.update(done * len(seeds) * steps)
                trained += (config.num_updates - done) * len(seeds) * steps
                tracker = open_tracker(request, run_dir, record, name, done * steps)
                watch = partial(show, script, progress, tracker, seeds, steps)
                carry = slices.train_slice(program, {}, keys[first : seeds.stop], manager,
                                           options.checkpoint_interval, watch, save_last=True)  # fmt: skip
                tracker.close()
            part = slices.fetch(program, carry["metrics"])
            if program.evaluate is not None:
                part["evaluation"] = np.asarray(program.evaluate(carry["runner_state"]))
            parts.append(part)
            agents = carry["runner_state"] if not name and jax.process_count() == 1 else None  # where all are here
            del carry
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, trained, agents


def show(script, progress, tracker: Tracker, seeds: range, steps: int, first: int, last: int, metrics: dict) -> None:
    """Progress and curves after updates [first, last), on process 0. `steps` are of one agent in one update."""
    values = curves(script, metrics, seeds)
    tracker.log(last * steps, values)
    if (mean := values.get("episodic_return/interquartile_mean")) is not None:
        progress.set_postfix_str(f"return {mean:.4g}", refresh=False)
    progress.update((last - first) * len(seeds) * steps)


def finish(request: Request, run_dir: Path, record: dict, metrics: dict, agents) -> None:
    """The files that the script's `main` writes at its end, and its last lines."""
    record.pop("greedy return", None)  # of an end before this one
    record |= request.script.write_results(request.config, metrics, run_dir)
    if agents is not None:
        request.script.report(request.config, agents, run_dir)
    request.script.write(run_dir / "run.json", json.dumps(record, indent=2))
    print(f"results in {run_dir}")


def main(args=None) -> Path:
    """The command line. Returns the run directory."""
    args = sys.argv[1:] if args is None else [str(each) for each in args]
    begun = time.perf_counter()
    with slices.errors_in_one_line("train.py", 2, ValueError, OSError), slices.failures_in_one_line("train.py"):
        request = read_request(args)
        slices.connect(request.tool)
        run_dir, record, programs = prepare(request, args)
    about = f"run_dir = {run_dir}: "
    with slices.errors_in_one_line("train.py", 1, OSError, about=about), slices.failures_in_one_line("train.py"):
        compiled = time.perf_counter()
        metrics, steps, agents = train(request, run_dir, record, programs)
        seconds = {"compile": compiled - begun, "train": time.perf_counter() - compiled}
        if steps:  # of this process, which may have resumed the run
            record |= {"seconds": seconds, "steps_per_second": steps / seconds["train"]}
            if slices.is_first():
                print(f"trained in {seconds['train']:.1f} s, {steps / seconds['train']:,.0f} steps/s over all seeds")
        slices.only_first(finish, request, run_dir, record, metrics, agents)
    return run_dir


if __name__ == "__main__":
    main()
