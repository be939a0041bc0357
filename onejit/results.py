"""The results of a run: the files that a script's `main` writes, too."""

from functools import partial
from pathlib import Path

import numpy as np
import yaml
from flax.traverse_util import flatten_dict
from safetensors.numpy import save as as_safetensors

from onejit.configs import plain
from onejit.files import write_picture
from onejit.learning_curve import draw_learning_curve


def save_agents(agents, script, seed: int, path: Path) -> None:
    """Write agents [num_seeds, ...]. The file says from which script and seed they are."""
    arrays = {}
    for name, leaf in flatten_dict(agents, sep=".").items():
        arrays[name] = np.ascontiguousarray(leaf)
    # one entry: safetensors writes several in any order, and equal runs get equal files
    metadata = {"run": yaml.safe_dump({"script": Path(script.__file__).stem, "seed": seed})}
    path.write_bytes(as_safetensors(arrays, metadata))  # its own `save_file` hides the file


def save_results(script, config, seed: int, agents, metrics: dict, folder: Path) -> None:
    """Write config.yaml, metrics.npz, agent.safetensors and learning_curve.png. Raises OSError.

    `metrics` {name: [num_seeds, num_updates]} and `agents` [num_seeds, ...] are NumPy arrays.
    """
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config), sort_keys=False))
    np.savez_compressed(folder / "metrics.npz", **metrics)
    save_agents(agents, script, seed, folder / "agent.safetensors")
    title = f"{Path(script.__file__).stem} on {config.env_name}"
    draw = partial(draw_learning_curve, config, metrics, title)
    write_picture(folder / "learning_curve.png", draw)
