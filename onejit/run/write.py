"""Writing a run: what it needs to be resumed, and its results."""

from functools import partial
from pathlib import Path

import numpy as np
import yaml

from onejit.base.files import write, write_picture
from onejit.run.agents import save_agents
from onejit.run.learning_curve import draw_learning_curve
from onejit.run.record import Record, write_record
from onejit.script import local_modules
from onejit.script.configs import plain, write_config
from onejit.script.contract import Script
from onejit.script.load import git, source_of


def save_results(script: Script, config, seed: int, agents, metrics: dict, folder: Path) -> None:
    """Write config.yaml, metrics.npz, agent.safetensors and learning_curve.png. Raises OSError.

    `metrics` {name: [num_seeds, num_updates]} and `agents` [num_seeds, ...] are NumPy arrays.
    """
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config), sort_keys=False))
    np.savez_compressed(folder / "metrics.npz", **metrics)
    save_agents(agents, script, seed, folder / "agent.safetensors")
    title = f"{Path(script.__file__).stem} on {config.env_name}"
    draw = partial(draw_learning_curve, config, metrics, title)
    write_picture(folder / "learning_curve.png", draw)


def write_inputs(run_dir: Path, config, script: Script, modules: dict[str, bytes]) -> None:
    """Write config.yaml, the script and the user's modules. Raises OSError.

    `script.diff` holds the changes of the script since the commit in run.json, unless it was edited
    meanwhile. `modules` comes from `local_modules.read_sources`.
    """
    path = Path(script.__file__)
    source = source_of(script)
    diff = git(path, "diff", "HEAD", "--", path) if path.read_bytes() == source else ""
    write_config(run_dir / "config.yaml", config)
    write(run_dir / path.name, lambda file: file.write(source))
    local_modules.write_copies(run_dir, modules)
    if diff:
        write(run_dir / "script.diff", diff)


def begin_run(
    run_dir: Path, config, record: Record, script: Script, modules: dict[str, bytes]
) -> None:
    """Write all that a run needs to be resumed; run.json is the last file. Raises OSError."""
    write_inputs(run_dir, config, script, modules)
    write_record(run_dir, record)
