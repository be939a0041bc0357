"""Options of `onejit sweep`, and which of them go together."""

import dataclasses
from pathlib import Path
from typing import Literal

from onejit.base.packages import check_packages
from onejit.run.tracking import TRACKERS
from onejit.script.configs import as_flag
from onejit.script.contract import Script
from onejit.sweep.swept import DISTRIBUTIONS, is_float_field

# samplers of Optuna, and the packages that they need
SAMPLERS = {
    "tpe": ["optuna"],
    "random": ["optuna"],
    "cmaes": ["optuna", "cmaes"],
    "grid": ["optuna"],
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a sweep."""

    num_seeds: int = 4  # agents per trial; all trials use the same random keys
    samples: int = 0  # number of draws of the fields with a distribution
    # sampler of Optuna that proposes the samples; grid are the points of a grid that several sweeps
    # share, all of them if --samples is not given
    optuna: Literal["tpe", "cmaes", "random", "grid"] | None = None
    # file, or URL of a database, with a study of Optuna's that several sweeps share
    storage: str | None = None
    batch: int = 8  # number of trials that Optuna proposes at a time, and that train together
    # successive halving: the best 1/HALVING of the trials of a rung go on to the next rung; with 0
    # all trials train to the end
    halving: int = 0
    # number of rungs of --halving, 0 for as many as the number of trials allows; the last rung ends
    # at all timesteps, and each earlier rung at 1/HALVING of the timesteps of the next rung
    rungs: int = 0
    seed: int = 0  # seed of the key that the agents' keys are split from, and of the draws
    # new directory for the results; runs/SCRIPT/sweep-ENVIRONMENT-TIME-RANDOM by default
    run_dir: Path | None = None
    keep: int = 5  # number of best trials whose agents are saved
    # tracker for the training returns of each trial
    track: Literal["tensorboard", "trackio", "wandb"] | None = None
    # seconds between checkpoints of the current slice; 0 for none
    checkpoint_interval: float = 60.0
    memory: float | None = None  # GiB of each device to use; 90 % of what is free by default


# {option: another that it goes with}
NEEDS = {"batch": "optuna", "storage": "optuna", "rungs": "halving"}


def check_together(options: Options) -> None:
    """Raise ValueError if an option lacks the one that it goes with."""
    for name, needed in NEEDS.items():
        is_given = getattr(options, name) != getattr(Options, name)
        if is_given and not getattr(options, needed):
            raise ValueError(f"{name}: goes with {as_flag(needed)}")


def without_password(name: str) -> str:
    """The URL of a database without its user and its options."""
    scheme, separator, place = name.partition("://")
    return f"{scheme}{separator}{place.rpartition('@')[2].partition('?')[0]}"


def check_options(script: Script, swept: dict[str, list[str]], options: Options) -> None:
    """Raise ValueError if options do not fit together."""
    if not swept:
        raise ValueError("nothing to sweep over: give a field several values, as in --lr 1e-4 1e-3")
    drawn = [name for name, words in swept.items() if words[0] in DISTRIBUTIONS]
    if options.batch < 1:
        raise ValueError("batch = 0: must be at least 1")
    if not options.samples and drawn:
        kind = swept[drawn[0]][0]
        raise ValueError(f"{drawn[0]}: {kind} needs --samples, the number of values to draw")
    if not options.samples and options.optuna and options.optuna != "grid":
        raise ValueError(f"optuna = {options.optuna}: needs --samples, the number of trials")
    if options.samples and not drawn and not options.optuna:
        kinds = ", ".join(DISTRIBUTIONS)
        raise ValueError(
            f"samples = {options.samples}: needs a field to draw, with {kinds}, or --optuna"
        )
    check_together(options)
    check_halving(swept, options)
    check_packages(f"optuna = {options.optuna}", SAMPLERS.get(options.optuna or "", ()))
    check_packages(f"track = {options.track}", TRACKERS.get(options.track or "", ()))
    if options.optuna == "cmaes" and len(drawn) < 2:
        raise ValueError(
            "optuna = cmaes: needs at least two fields with a distribution; tpe needs one"
        )
    if options.storage == "":
        raise ValueError("storage: needs a file or the URL of a database")
    if options.optuna == "grid":
        if not options.storage:
            raise ValueError("optuna = grid: needs --storage; a sweep alone is a grid without both")
        if drawn:
            raise ValueError(f"{drawn[0]}: a grid has lists of values; --optuna random draws them")
    elif options.optuna:
        for name in swept:
            if not is_float_field(script, name):
                raise ValueError(
                    f"{name}: is not a float field; Optuna can only choose values of float fields"
                )


def check_halving(swept: dict[str, list[str]], options: Options) -> None:
    """Raise ValueError if --halving is not possible."""
    for name in ("halving", "rungs"):
        if getattr(options, name) == 1:
            raise ValueError(f"{name} = 1: must be at least 2")
    if options.halving and "total_timesteps" in swept:
        raise ValueError(
            "total_timesteps: cannot be swept with --halving, which compares trials at equal steps"
        )
