"""Options of `onejit train`."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run."""

    num_seeds: int = 4  # number of agents, each with its own random key
    seed: int = 0  # seed of the key that the agents' keys are split from
    # new directory for the results; runs/SCRIPT/ENVIRONMENT-TIME-RANDOM by default
    run_dir: Path | None = None
    # greedy episodes of each agent in an evaluation; 0 for none
    eval_episodes: int = 16
    # updates between evaluations during training; 0 evaluates after training only
    eval_interval: int = 0
    # seconds between checkpoints; with 0 only the last one is written
    checkpoint_interval: float = 60.0
    # tracker for curves of the mean and of the worst agent
    track: Literal["tensorboard", "trackio", "wandb"] | None = None
    track_seeds: bool = False  # track a curve for each seed as well
    memory: float | None = None  # GiB of each device to use; 90 % of what is free by default
    # if a seed has diverged, find the first value that was not finite
    find_nan: bool = False
