"""Curves in TensorBoard, Trackio or Weights & Biases."""

import hashlib
import importlib
import os
import time
from pathlib import Path

import numpy as np

from onejit.base import statistics
from onejit.engine.hosts import is_first
from onejit.run.record import Record

# the packages that they need
TRACKERS = {"tensorboard": ["tensorboardX"], "trackio": ["trackio"], "wandb": ["wandb"]}


def digest_of_run(run_dir: Path, record: Record, name: str) -> str:
    """16 letters that another run has not."""
    place = f"{run_dir.absolute()} {record.started} {name}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]


class NoTracker:
    """Tracks nothing."""

    def log(self, step: int, values: dict) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard(NoTracker):
    """A run of TensorBoard. Unlike EventsWriter's, SummaryWriter's `flush` leaves its queue."""

    def __init__(self, folder: Path, steps_done: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )

        folder.mkdir(parents=True, exist_ok=True)
        self.writer = EventsWriter(str(folder / "events"))
        # A resumed run writes the points after its checkpoint again; this makes TensorBoard drop
        # the older ones.
        restart = SessionLog(status=SessionLog.START)
        self.writer.write_event(Event(step=steps_done + 1, session_log=restart))

    def log(self, step, values):
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import scalar

        for tag, value in values.items():
            event = Event(wall_time=time.time(), step=step, summary=scalar(tag, value))
            self.writer.write_event(event)
        self.writer.flush()  # a kill after the next checkpoint must not lose them

    def close(self):
        self.writer.close()


class ExperimentTracker(NoTracker):
    """A run of Trackio or Weights & Biases. Raises OSError if it cannot be started."""

    def __init__(self, track: str, run_dir: Path, record: Record, name: str):
        library = importlib.import_module(track)
        settings = record.settings
        words = [run_dir.name, *name.split()]
        digest = digest_of_run(run_dir, record, name)  # the same on resume
        if track == "trackio":  # on this machine unless TRACKIO_SPACE_ID is set
            words.append(digest[:6])
            own = {"group": settings["env_name"], "embed": False}
        else:
            tags = [settings["script"][:64], settings["env_name"][-64:]]  # longer ones fail
            group = os.environ.get("WANDB_RUN_GROUP", settings["env_name"])
            own = {"group": group, "tags": tags, "id": digest, "dir": str(run_dir)}
        try:
            self.run = library.init(
                project=os.environ.get(f"{track.upper()}_PROJECT", settings["script"]),
                name=" ".join(words),
                resume="allow",
                config=settings,
                **own,
            )
        except Exception as error:  # errors of the network, a missing login and others
            raise OSError(f"track = {track}: cannot be started ({error})") from error
        self.takes_any_step = track == "trackio"
        if not self.takes_any_step:  # the steps of Weights & Biases count calls
            self.run.define_metric("*", step_metric="environment_steps")

    def log(self, step, values):
        if self.takes_any_step:
            self.run.log(values, step=step)
        else:
            self.run.log(values | {"environment_steps": step})

    def close(self):
        self.run.finish()


def check_login(track: str | None) -> None:
    """Raise ValueError if Weights & Biases lacks a login, before anything is compiled."""
    if track != "wandb" or os.environ.get("WANDB_MODE", "online") in ("offline", "disabled"):
        return
    import wandb

    try:
        wandb.login(verify=False)
    except Exception as error:  # of the settings, or without a login
        advice = "`wandb login` or WANDB_API_KEY; WANDB_MODE=offline needs none"
        raise ValueError(f"track = wandb: needs a login: {advice} ({error})") from error


def open_tracker(track: str | None, run_dir: Path, record: Record, name: str, steps_done: int):
    """The tracker of a slice or trial `name`, which has done so many steps. Raises OSError."""
    if not track or not is_first():
        return NoTracker()
    if track == "tensorboard":
        return TensorBoard(run_dir / "tensorboard" / name, steps_done)
    return ExperimentTracker(track, run_dir, record, name)


# --- values ---


def curves(metrics: dict, seeds: range, evaluation=None, of_seeds: bool = False) -> dict:
    """The tracked values of a chunk of updates, without NaN.

    `metrics` {name: [seeds, updates]}, `evaluation` [seeds, episodes] or None. Returns are tracked
    as the mean over the seeds that ended an episode, its 95 % interval, and the worst agent; other
    metrics as means over seeds and updates. `of_seeds` adds the return of every seed.
    """
    returns = statistics.mean_return(metrics)
    values = returns_over_seeds("episodic_return", returns)
    if of_seeds:
        for seed, value in zip(seeds, returns, strict=True):
            values[f"episodic_return/seed_{seed:04d}"] = value
    if evaluation is not None:
        values |= returns_over_seeds("greedy_return", evaluation.mean(axis=1))
    for name, metric in metrics.items():
        if name != "episodic_return" and not np.isnan(metric).all():
            values[f"{name}/mean"] = np.nanmean(metric)
    return only_finite(values)


def only_finite(values: dict) -> dict:
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


def returns_over_seeds(name: str, returns) -> dict:
    """Mean, interval and worst of the returns that are finite."""
    returns = returns[np.isfinite(returns)]
    if not len(returns):
        return {}
    mean, low, high = statistics.student_interval(returns)
    return {
        f"{name}/mean": mean,
        f"{name}/low": low,
        f"{name}/high": high,
        f"{name}/worst_agent": returns.min(),
    }
