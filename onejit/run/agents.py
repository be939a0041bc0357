"""agent.safetensors: the agents of a run, written and read."""

from pathlib import Path

import numpy as np
import yaml
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import save as as_safetensors

from onejit.base.files import load_yaml, reading
from onejit.script.contract import Script


def as_bytes(agents, metadata: dict[str, str] | None = None) -> bytes:
    """The content of a file with agents [num_seeds, ...], by dotted names."""
    arrays = {}
    for name, leaf in flatten_dict(agents, sep=".").items():
        arrays[name] = np.ascontiguousarray(leaf)
    return as_safetensors(arrays, metadata)


def save_agents(agents, script: Script, seed: int, path: Path) -> None:
    """Write agents [num_seeds, ...]. The file says from which script and seed they are."""
    # one entry: safetensors writes several in any order, and equal runs get equal files
    metadata = {"run": yaml.safe_dump({"script": Path(script.__file__).stem, "seed": seed})}
    path.write_bytes(as_bytes(agents, metadata))  # its own `save_file` hides the file


def read_agents(path: Path) -> tuple[dict, dict]:
    """Arrays [num_seeds, ...] by dotted names, and the metadata "script" and "seed".

    Raises ValueError.
    """
    with reading(path), safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
        if "run" in metadata:  # versions before 0.3.0 have the entries "script" and "seed"
            stored = load_yaml(metadata["run"])
            metadata = {name: str(value) for name, value in stored.items()}
        return arrays, metadata
