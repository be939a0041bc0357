"""What the tools share about results: the script of a name, run directories and their records, intervals, errors.

A run directory is what a script's `save_results` writes: `config.yaml`, `metrics.npz`, `learning_curve.png` and
`agent.safetensors`. `tools/train.py` adds `run.json`, `evaluation.npy` and checkpoints.
"""

import contextlib
import dataclasses
import datetime
import difflib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import scipy.special
import scipy.stats
import tyro
import yaml
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ["Config", "make_learner", "make_train", "make_policy", "report", "make_env", "main"]
OF_MAIN = ["mean_return", "read_flags", "save_results"]  # what the tools take of the block `main`
PACKAGES = {"jax", "jaxlib", "flax", "optax", "distrax", "gymnax", "brax", "numpy"}
RESAMPLES = 2000

# --- scripts ---


def nearest(name, known) -> str:
    """'; did you mean ...?', or nothing where no known name is close."""
    found = difflib.get_close_matches(str(name), list(map(str, known)), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def load_script(name):
    """The module of a script: `ppo` and `ppo.py` are those of the repository, anything else is a path.

    A file in the working directory comes before one of the repository. Puts the script's folder and the working
    directory on the path, as `env_name: MODULE:NAME` needs. Raises ValueError.
    """
    file = str(name) if str(name).endswith(".py") else f"{name}.py"
    path = next((each.resolve() for each in (Path(file), ROOT / file) if each.is_file()), None)
    if path is None:
        known = sorted(each.stem for each in ROOT.glob("*.py"))
        raise ValueError(f"script = {name}: no such file; scripts here are {', '.join(known)}{nearest(name, known)}")
    sys.path[:0] = [each for each in (str(path.parent), os.getcwd()) if each not in sys.path]
    own_name = f"script_{path.stem}"  # so that a script called json.py does no harm
    loaded = (each for each in map(sys.modules.get, (path.stem, own_name)) if each is not None)
    module = next((each for each in loaded if Path(getattr(each, "__file__", None) or "").resolve() == path), None)
    if module is None:
        spec = importlib.util.spec_from_file_location(own_name, path)
        module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever somebody's file does
            del sys.modules[own_name]
            raise ValueError(f"script = {name}: cannot be imported ({type(error).__name__}: {error})") from error
    if missing := [each for each in CONTRACT + OF_MAIN if not hasattr(module, each)]:
        sys.modules.pop(own_name, None)
        raise ValueError(f"script = {name}: is not a training script, it has no {', '.join(missing)}")
    return module


def plain(config) -> dict:
    """A config as YAML and JSON can hold it."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(config).items()}


# --- the command line ---


def flags_of(command) -> list[str]:
    """The flags of a dataclass, or of a function that takes some."""
    classes = typing.get_type_hints(command).values() if inspect.isfunction(command) else [command]
    classes = [getattr(each, "__origin__", each) for each in classes]  # without tyro's marks
    return [f"--{field.name.replace('_', '-')}" for each in classes for field in dataclasses.fields(each)]


def parse(command, words: list[str], **how):
    """`tyro.cli`, but that a wrong flag is a ValueError that names it."""

    def refuse(event):
        argument, tokens = getattr(event, "argument", None), getattr(event, "tokens", ())
        if unknown := [word for word in tokens if word.startswith("--")]:
            raise ValueError(f"{unknown[0]}: is not a flag{nearest(unknown[0], flags_of(command))}")
        if tokens:  # after another value, most likely; the flag before tells of which field
            after_value = [
                i for i in range(1, len(words)) if words[i] == tokens[0] and not words[i - 1].startswith("--")
            ]
            before = [word for word in words[: (after_value or [0])[-1]] if word.startswith("--")]
            raise ValueError(f"{' '.join([*before[-1:], *tokens])}: is one word too many")
        if argument is not None:
            reason = getattr(event, "message", None) or f"takes {' | '.join(getattr(event, 'choices', ['a value']))}"
            value = getattr(event, "value", "")
            raise ValueError(f"{argument.display_name()} {value}: {reason}")

    # A private name of tyro's: without it the mistake is told as tyro does, in a box, with exit code 2 too.
    hook = getattr(getattr(tyro, "_errors", None), "on_parse_error", None)
    with hook(refuse) if hook else contextlib.nullcontext():
        return tyro.cli(command, args=words, **how)


def read_flags(script, words: list[str]) -> list[str]:
    """The script's own `read_flags`: what --config FILE holds comes first. Raises ValueError."""
    try:
        return script.read_flags(words)
    except Exception as error:  # of YAML, of what it holds, of files
        place = next((i for i, word in enumerate(words) if word.startswith("--config")), 0)
        raise ValueError(f"{' '.join(words[place : place + 2])}: {type(error).__name__}: {error}") from error


def read_config(script, file: Path):
    """The config that config.yaml holds, read as the script reads it. Raises ValueError."""
    try:
        marked = tyro.conf.FlagConversionOff[script.Config]
        return parse(marked, read_flags(script, ["--config", str(file)]))
    except ValueError as error:
        raise ValueError(f"{file}: is not a config of {script.__file__}: {error}") from error


# --- run directories ---


def write(path: Path, content) -> None:
    """Write a file whole or not at all; `content` is a string, or a function that writes to a binary file.

    Raises OSError, whose text says which file.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            content(file) if callable(content) else file.write(content.encode())
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror or error})") from error


def make_record(script, config, options, command: list[str]) -> dict:
    """What run.json says of a run that begins: settings, command, script, device, versions, commit."""
    import jax

    path = Path(script.__file__).resolve()
    git = ["git", "-C", path.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # not by a tag
    found = {each.name: each.version for each in importlib.metadata.distributions() if each.name in PACKAGES}
    return {
        "settings": {"script": path.stem, "num_seeds": options.num_seeds, "seed": options.seed} | plain(config),
        "command": shlex.join(["python", *command]),
        "started": f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}",
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores",
        "versions": {"python": sys.version.split()[0], **dict(sorted(found.items()))},
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
        "path": str(path),
        "sha256": file_hash(path),
    }


def file_hash(path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def check_new(run_dir: Path) -> None:
    """Raise ValueError where a run directory cannot be made: no run is overwritten."""
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise ValueError(f"run_dir = {run_dir}: is there already; --resume {run_dir} goes on with a run")


def begin_run(run_dir: Path, config, record: dict) -> None:
    """Make the run directory with config.yaml and run.json, all of it or nothing. Raises ValueError."""
    check_new(run_dir)
    temporary = run_dir.with_name(run_dir.name + ".partial")
    try:
        write(temporary / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False))
        write(temporary / "run.json", json.dumps(record, indent=2))
        temporary.replace(run_dir)
    except OSError as error:
        raise ValueError(f"run_dir = {run_dir}: cannot be made ({error})") from error


@contextlib.contextmanager
def reading(path: Path):
    """Raise ValueError where a file of a run is not there, or is not what it was."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: is not there; a run that has ended holds it") from None
    except Exception as error:  # of JSON, YAML, NumPy, safetensors and what they hold: many kinds
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def read_record(run_dir) -> dict:
    """What run.json says; `settings` is in it, with script, num_seeds and seed. Raises ValueError.

    Where a script's own `main` wrote the run there is no run.json: then `settings` is all, and of other files.
    """
    record, agents, config = (Path(run_dir) / name for name in ("run.json", "agent.safetensors", "config.yaml"))
    if record.is_file():
        with reading(record):
            found = json.loads(record.read_text())
            names = ["script", "num_seeds", "seed", *found["settings"]]
            return found | {"settings": {name: found["settings"][name] for name in names}}
    if not agents.is_file():
        raise ValueError(f"{run_dir}: is not the directory of a run, it has neither run.json nor agent.safetensors")
    arrays, metadata = read_agents(agents)
    with reading(config):
        settings = {"script": metadata["script"], "num_seeds": len(next(iter(arrays.values())))}
        return {"settings": settings | {"seed": int(metadata["seed"])} | yaml.safe_load(config.read_text())}


def script_of(record: dict):
    """The script of a run: the file that it was made with where that is still there, else the one of its name."""
    path = record.get("path", "")
    return load_script(path if Path(path).is_file() else record["settings"]["script"])


def read_agents(path: Path) -> tuple[dict, dict]:
    """Arrays [num_seeds, ...] by their names joined by dots, and the metadata, script and seed. Raises ValueError."""
    with reading(path), safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def load_run(run_dir):
    """`(script, config, agent)` of a run that has ended, of a script or of tools/train.py. Raises ValueError.

    `agent` is what `make_policy` takes, in NumPy, of all agents: leaves [num_seeds, ...].
    """
    record, (arrays, _) = read_record(run_dir), read_agents(Path(run_dir) / "agent.safetensors")
    script = script_of(record)
    return script, read_config(script, Path(run_dir) / "config.yaml"), unflatten_dict(arrays, sep=".")


def load_metrics(run_dir) -> dict:
    """`{name: [num_seeds, updates]}`, and `evaluation` [num_seeds, episodes] where there was one. Raises ValueError."""
    path, evaluation = Path(run_dir) / "metrics.npz", Path(run_dir) / "evaluation.npy"
    with reading(path), np.load(path) as stored:
        metrics = dict(stored)
    with reading(evaluation):
        return metrics | ({"evaluation": np.load(evaluation)} if evaluation.exists() else {})


# --- statistics over seeds ---


def final_return(metrics) -> np.ndarray:
    """Mean return of the episodes that ended in the last tenth of the updates, NaN where none did: [num_seeds]."""
    first = metrics["episodes"].shape[1] * 9 // 10
    episodes, returns = metrics["episodes"][:, first:], metrics["episodic_return"][:, first:]
    with np.errstate(invalid="ignore"):
        return np.where(episodes > 0, episodes * returns, 0.0).sum(axis=1) / episodes.sum(axis=1)


def interquartile_mean(values, axis=0):
    """The mean of the middle half (arXiv 2108.13264, section 4.3). What is not finite is the worst there is."""
    return scipy.stats.trim_mean(np.where(np.isfinite(values), values, -np.inf), 0.25, axis=axis)


def mean_interval(values) -> list:
    """The mean over seeds and its 95 % interval by Student's t: [seeds, ...] -> mean, low, high, each [...].

    One seed has no interval: low and high are NaN.
    """
    values, degrees = np.asarray(values, float), len(values) - 1
    with np.errstate(divide="ignore", invalid="ignore"):  # of one seed
        margin = scipy.special.stdtrit(degrees, 0.975) * values.std(axis=0) / np.sqrt(degrees)
    mean = values.mean(axis=0)
    return [mean, mean - margin, mean + margin]


def interval(values, statistic=interquartile_mean, level=95) -> list:
    """A statistic over seeds and its bootstrap interval of `level` %: [seeds, ...] -> value, low, high, each [...].

    Seeds are drawn jointly for all that follows the first axis. A seed that diverged is never left out: it counts as
    -inf, and so may value or low where there are many. One seed has no interval: low and high are NaN.
    """
    values, rng = np.where(np.isfinite(values), values, -np.inf), np.random.default_rng(0)
    if len(values) == 1:
        value = statistic(values)
        return [value, value * np.nan, value * np.nan]
    indices = rng.integers(len(values), size=(RESAMPLES, len(values)))
    one_by_one = values.ndim > 1  # arrays may be large
    drawn = [statistic(values[each]) for each in indices] if one_by_one else statistic(values[indices], axis=1)
    return [
        statistic(values),
        *np.percentile(drawn, [50 - level / 2, 50 + level / 2], axis=0, method="nearest"),
    ]  # never between -inf and x


def diverged(agent) -> np.ndarray:
    """Which seeds have parameters that are not finite: leaves [num_seeds, ...] -> [num_seeds].

    Their returns say nothing: of values that are not finite, the greedy action is the first one.
    """
    leaves = [np.asarray(leaf) for leaf in flatten_dict(agent).values()]
    return ~np.all([np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in leaves], axis=0)


def show(value, low, high) -> str:
    """`500 (429.8 to 504)`, or the value alone where there is no interval."""
    return f"{value:.4g}" + ("" if np.isnan(low) else f" ({low:.4g} to {high:.4g})")


def summarize(name: str, returns, lost=None) -> dict:
    """Print what was reached over seeds, and return it for run.json. `returns` and `lost`, who diverged: [num_seeds].

    Seeds that diverged, or have no return, count as -inf in the interquartile mean. The mean and the worst agent are of
    the other seeds, whose number is printed.
    """
    seeds = len(returns)
    lost = np.zeros(seeds, bool) if lost is None else lost
    good, silent = np.isfinite(returns) & ~lost, ~np.isfinite(returns) & ~lost
    mean = mean_interval(returns[good]) if good.any() else [np.nan] * 3
    middle = interval(np.where(good, returns, -np.inf))
    worst = returns[good].min() if good.any() else np.nan
    numbers = [*zip(("mean", "mean_low", "mean_high"), mean, strict=True), ("worst", worst)]
    numbers += zip(("interquartile_mean", "low", "high"), middle, strict=True)
    found = {key: float(value) if np.isfinite(value) else None for key, value in numbers}  # JSON has no -inf
    found |= {"seeds": seeds, "not_finite": int((~good).sum()), "diverged": int(lost.sum())}
    count = f"{seeds} seeds" if good.all() else f"{good.sum()} of {seeds} seeds"
    print(f"{name}: mean {show(*mean)}, worst agent {worst:.4g}, {count}; interquartile mean {show(*middle)}")
    if not good.all():
        said = f"{lost.sum()} seeds diverged, {silent.sum()} ended no episode in the last tenth of training"
        print(f"{name}: {said}; they count as -inf in the interquartile mean")
    return {name: found | {"no_episode": int(silent.sum())}}


# --- errors ---


def run_tool(tool, args=None):
    """Call `tool(args)`; a ValueError or an OSError becomes one line on stderr and exit code 2."""
    try:
        return tool(args)
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
