"""Files that are written completely or not at all, and read with errors that name them."""

import contextlib
import io
import secrets
import shutil
import sys
from pathlib import Path

import yaml

MOST_VALUES = 100_000  # of a YAML file


def write(path: Path, content) -> None:
    """Write a file completely or not at all. Raises OSError, which names the file.

    `content` is text, bytes, or a function that writes to a binary file.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_picture(path: Path, draw) -> None:
    """Write the picture that `draw(file)` draws. If it cannot, print one line: results go first.

    Raises OSError if the file cannot be written.
    """
    picture = io.BytesIO()
    try:
        draw(picture)
    except Exception as error:  # many kinds, of Matplotlib and NumPy
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: {path.name} cannot be drawn ({cause})", file=sys.stderr)
        return
    write(path, picture.getvalue())


def delete_folder(folder: Path) -> None:
    """Delete what is no longer needed, under another name: a kill may come at any time.

    What cannot be deleted stays: NFS keeps open files.
    """
    with contextlib.suppress(OSError):
        folder.rename(folder.with_name(f".deleted-{secrets.token_hex(4)}"))
    for unused in [folder, *folder.parent.glob(".deleted-*")]:
        shutil.rmtree(unused, ignore_errors=True)


def load_yaml(text: str):
    """The content of a YAML file. Raises ValueError if its aliases stand for too many values."""
    tree = yaml.safe_load(text)
    sizes = {}

    def count(node) -> int:
        """The values below a node, where a shared node is visited once."""
        if not isinstance(node, (dict, list)):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = MOST_VALUES  # of a node that contains itself
            children = [*node, *node.values()] if isinstance(node, dict) else node
            sizes[id(node)] = 1 + sum(map(count, children))
        return sizes[id(node)]

    if count(tree) > MOST_VALUES:
        raise ValueError("its aliases stand for too many values")
    return tree


@contextlib.contextmanager
def reading(path: Path):
    """Raise ValueError if a file of a run is missing or damaged."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: does not exist; it is written when a run ends") from None
    except Exception as error:  # many kinds: of JSON, YAML, NumPy, safetensors and their content
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
