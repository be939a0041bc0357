"""Train a script as its own command line does, with what one file should not carry.

    python tools/train.py ppo --config configs/ppo/cartpole.yaml --num-seeds 1024 --track tensorboard
    python tools/train.py path/to/my_algorithm.py --num-seeds 64 --memory 8
    python tools/train.py --resume runs/ppo/my_run

All flags of the script work here too, `python tools/train.py ppo --help` lists them. The run directory is the script's
with checkpoints and a record in it; --resume goes on with a run, and takes all else from it. Seeds that do not fit in
memory at once run in slices; with the same command on each of many hosts they spread over all devices of all hosts.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import results
import training
from safetensors import SafetensorError
from tqdm import tqdm

TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # the package of each


@dataclasses.dataclass(frozen=True)
class Options:
    """One run."""

    num_seeds: int = 4  # agents, each with its own random key
    seed: int = 0  # of the key that the agents' keys are split from
    run_dir: Path | None = None  # a new directory for the results; runs/SCRIPT/ENVIRONMENT-TIME where not given
    eval_episodes: int = 16  # greedy episodes per agent after training, the same ones for all agents; 0 for none
    checkpoint_interval: float = 60.0  # seconds between checkpoints; with 0 only the last is written
    track: Literal["tensorboard", "wandb"] | None = None  # a curve per seed, and means over seeds


class Request(NamedTuple):
    """What the command line asks for."""

    script: Any
    config: Any
    options: Options
    hosts: training.Hosts
    run_dir: Path
    record: dict  # run.json


def read_request(words: list[str]) -> Request:
    """Connects to other hosts, where there are any, before it imports the script. Raises ValueError."""
    name, hosts, words = training.split_words(words)
    training.connect(hosts)
    if name == "--resume":
        run_dir, record, script = training.read_resumed(words, "train.py", "slice")
        config, settings = results.read_config(script, run_dir / "config.yaml"), record["settings"]
        options = Options(settings["num_seeds"], settings["seed"], run_dir, **record["options"])
    else:
        script = results.load_script(name)
        config, options, _ = training.parse_with(script, words, Options, description=__doc__)
        stamp = f"{config.env_name.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        run_dir = Path(training.agree(str(options.run_dir or Path("runs", Path(script.__file__).stem, stamp))))
        training.only_first(results.check_new, run_dir)
        record = results.make_record(script, config, options, ["tools/train.py", name, *words])
        record["options"] = {name: getattr(options, name) for name in ("eval_episodes", "checkpoint_interval", "track")}
    if options.track and importlib.util.find_spec(package := TRACKERS[options.track]) is None:
        raise ValueError(f"track = {options.track}: needs the package {package}, see requirements-tools.txt")
    return Request(script, config, options, hosts, run_dir, record)


# --- tracking ---


def open_tracker(request: Request, name: str, steps_done: int):
    """`log(step, {name: value})` and `close()` of a TensorBoard or W&B run for one slice. Raises OSError."""
    run_dir, record = request.run_dir, request.record
    if not request.options.track or not training.is_first():
        return lambda step, values: None, lambda: None
    if request.options.track == "tensorboard":
        from tensorboardX import SummaryWriter

        # A resumed run writes again what came after its checkpoint: `purge_step` drops the older points.
        writer = SummaryWriter(str(run_dir / "tensorboard" / name), purge_step=steps_done + 1)

        def log(step, values):
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

        return log, writer.close
    import wandb

    place = f"{run_dir.absolute()} {record['started']} {name}"
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", record["settings"]["script"]),
            name=" ".join(filter(None, [run_dir.name, name])),
            id=hashlib.sha256(place.encode()).hexdigest()[:16],  # the same on resume
            resume="allow",
            dir=str(run_dir),
            config=record["settings"],
        )
    except Exception as error:  # of the network, of a login: many kinds
        raise OSError(f"track = wandb: cannot be started ({error})") from error
    run.define_metric("*", step_metric="environment_steps")
    return lambda step, values: run.log(values | {"environment_steps": step}), run.finish


def curves(script, metrics: dict, seeds: range) -> dict:
    """What is tracked of the updates of a chunk: the return of each seed, and each metric over all. NaN left out.

    `metrics` {name: [seeds, updates]}. The return of all seeds is the interquartile mean of those with an episode that
    ended, other metrics are plain means over seeds and updates.
    """
    returns, ended = script.mean_return(metrics), metrics["episodes"].sum(axis=1) > 0
    values = {f"episodic_return/seed_{seed:04d}": value for seed, value in zip(seeds, returns, strict=True)}
    if ended.any():
        values["episodic_return/interquartile_mean"] = results.interquartile_mean(returns[ended])
    for name, each in metrics.items():
        if name != "episodic_return" and not np.isnan(each).all():
            values[f"{name}/mean"] = np.nanmean(each)
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


# --- training ---


def prepare(request: Request) -> dict:
    """Programs by their size, and what is needed printed. Begins a new run. Raises ValueError."""
    script, config, options, record = request.script, request.config, request.options, request.record
    num_seeds, devices, begun = options.num_seeds, jax.device_count(), time.perf_counter()
    step = devices if num_seeds % devices == 0 else 1
    if step != devices and jax.process_count() > 1:
        raise ValueError(f"num_seeds = {num_seeds}: must be a multiple of the {devices} devices of all hosts")
    memory = training.free_memory(request.hosts.memory)
    compile_size = partial(training.compile_slice, script, config, [], options=options)
    if "slice" in record:  # a resumed run keeps the slices that it began with, and so its numbers
        program = compile_size(record["slice"])
    else:
        program = training.largest_slice(compile_size, num_seeds, step, memory)
        record["slice"] = program.size
        training.only_first(results.begin_run, request.run_dir, config, record)
    rest = num_seeds % program.size
    programs = {program.size: program} | ({rest: compile_size(rest)} if rest else {})
    record.setdefault("seconds", {})["compile"] = time.perf_counter() - begun
    if training.is_first():
        short = " (MORE THAN IS FREE)" if program.bytes > memory else ""
        print(
            f"{config.env_name}: {num_seeds} seeds in {-(-num_seeds // program.size)} slice(s) of {program.size} on "
            f"{program.num_devices} device(s), {program.bytes / training.GIB:.3g} GiB of "
            f"{memory / training.GIB:.3g} free on each{short}; {config.num_updates} updates of "
            f"{config.num_envs * config.num_steps} steps; compiled in {record['seconds']['compile']:.1f} s"
        )
    return programs


def train(request: Request, programs: dict) -> tuple[dict, Any]:
    """Train and evaluate all slices, and record how long it took.

    Returns `metrics` {name: [num_seeds, num_updates]}, `agent` with leaves [num_seeds, ...] and, where asked for,
    `evaluation` [num_seeds, eval_episodes], in NumPy on every process. And the runner state of all agents on their
    devices, None where one slice in one process does not hold them all.
    """
    config, options, size = request.config, request.options, request.record["slice"]
    keys, parts, trained, seconds = training.seed_keys(options), [], 0, {"train": 0.0, "evaluate": 0.0}
    steps, warmup = config.num_envs * config.num_steps, getattr(config, "warmup_timesteps", 0)  # of one agent
    total, first_process = options.num_seeds * config.num_updates * steps, training.is_first()
    with tqdm(total=total, unit="step", unit_scale=True, disable=not first_process) as progress:
        for first in range(0, options.num_seeds, size):
            begun, state = time.perf_counter(), None  # the last slice's memory is needed
            seeds = range(first, min(first + size, options.num_seeds))
            program, name = programs[len(seeds)], "" if size == options.num_seeds else f"{first:05d}-{seeds.stop:05d}"
            with training.open_checkpoints(request.run_dir / "checkpoints" / name, keep=2) as manager:
                done = manager.latest_step() or 0
                if done and first_process:
                    tqdm.write(f"seeds {first} to {seeds.stop - 1}: {done} of {config.num_updates} updates are done")
                progress.update(done * len(seeds) * steps)
                trained += (config.num_updates - done) * len(seeds) * steps
                log, close = open_tracker(request, name, warmup + done * steps)
                watch = partial(show, request.script, progress, log, seeds, warmup, steps)
                key_data, interval = keys[first : seeds.stop], options.checkpoint_interval
                carry = training.train_slice(program, {}, key_data, manager, interval, watch, save_last=True)
                close()
            ended = time.perf_counter()
            part, state = {"metrics": training.fetch(program, carry.pop("metrics"))}, carry.pop("runner_state")
            part["agent"] = training.fetch(program, state.agent)
            if program.evaluate is not None:
                part["evaluation"] = np.asarray(program.evaluate(state.agent))
            parts.append(part)
            seconds["train"] += ended - begun
            seconds["evaluate"] += time.perf_counter() - ended
    if trained:  # by this process, which may have resumed the run
        request.record["steps_per_second"] = trained / seconds["train"]
        request.record["seconds"] = request.record.get("seconds", {}) | seconds
        if first_process:
            print(f"trained in {seconds['train']:.1f} s, {trained / seconds['train']:,.0f} steps/s over all seeds")
    whole = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return whole, state if len(parts) == jax.process_count() == 1 else None


def show(script, progress, log, seeds: range, warmup: int, steps: int, first: int, last: int, metrics: dict) -> None:
    """Progress and curves after updates [first, last), on process 0. `steps` are of one agent in one update."""
    values = curves(script, metrics, seeds)
    log(warmup + last * steps, values)
    if (mean := values.get("episodic_return/interquartile_mean")) is not None:
        progress.set_postfix_str(f"return {mean:.4g}", refresh=False)
    progress.update((last - first) * len(seeds) * steps)


def finish(request: Request, trained: dict, runner_state) -> None:
    """What the script's `main` writes at its end, each file whole or not at all, and the record. Raises OSError."""
    run_dir, record, folder = request.run_dir, request.record, request.run_dir / "results.partial"
    shutil.rmtree(folder, ignore_errors=True)  # of an end before this one
    folder.mkdir()
    try:
        request.script.save_results(request.config, request.options.seed, trained["agent"], trained["metrics"], folder)
    except SafetensorError as error:
        raise OSError(f"agent.safetensors: cannot be written ({error})") from error
    returns = {"final return": results.final_return(trained["metrics"])}
    if "evaluation" in trained:
        np.save(folder / "evaluation.npy", trained["evaluation"])
        returns["greedy return"] = trained["evaluation"].mean(axis=1)
    if runner_state is not None:
        request.script.report(request.config, runner_state, folder)
    for path in folder.iterdir():
        if (run_dir / path.name).is_dir():
            shutil.rmtree(run_dir / path.name)
        path.replace(run_dir / path.name)
    folder.rmdir()
    lost = results.diverged(trained["agent"])
    for name, values in returns.items():
        record |= results.summarize(name, values, lost)
    results.write(run_dir / "run.json", json.dumps(record, indent=2))
    print(f"results in {run_dir}")


def main(args=None) -> Path:
    """The command line. Returns the run directory."""
    words = sys.argv[1:] if args is None else [str(each) for each in args]
    if words[:1] in (["-h"], ["--help"]):
        raise SystemExit(print(__doc__))
    with training.errors_in_one_line("train.py", 2, ValueError, OSError), training.failures_in_one_line("train.py"):
        request = read_request(words)
        programs = prepare(request)
    run_dir, stop = request.run_dir, partial(training.errors_in_one_line, "train.py")
    with stop(1, OSError, about=f"run_dir = {run_dir}: "), training.failures_in_one_line("train.py"):
        with stop(130, KeyboardInterrupt, about=f"stopped; --resume {run_dir} goes on with it"):
            trained, runner_state = train(request, programs)
        training.only_first(finish, request, trained, runner_state)
    return run_dir


if __name__ == "__main__":
    main()
