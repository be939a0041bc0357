"""Errors of the commands: a mistake in flags or fields is one line on standard error.

An error that comes from the user's own code keeps its traceback.
"""

import contextlib
import errno
import io
import os
import re
import sys
import traceback
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from onejit.base.text import nearest, printable
from onejit.script.configs import plain
from onejit.script.contract import Script
from onejit.script.environment import check_env_params
from onejit.script.local_modules import is_of_the_user

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

CONFIG = "config: "  # begins the note of an exception of a training


class FieldError(ValueError):
    """A field has a value with which no program can be made."""


def comes_from_the_user(error: BaseException) -> bool:
    """Whether an error that a context manager here has caught passed through the user's code."""
    if isinstance(error, FieldError):
        return False
    if any(note.startswith(CONFIG) for note in getattr(error, "__notes__", [])):
        return True  # of the script's training
    frames = traceback.extract_tb(error.__traceback__)
    called = frames[2:]  # without the context manager and the `with` statement
    return any(is_of_the_user(frame.filename) for frame in called)


@contextlib.contextmanager
def errors_in_one_line(tool: str, code: int = 2, kinds=(ValueError, OSError), about: str = ""):
    """Print an exception of these kinds as one line that begins with `about`, and exit.

    An exception that comes from the user's code is raised, unless the disk is full. If memory runs
    out or another process is gone, the exit code is 1.
    """
    try:
        yield
    except kinds as error:
        if comes_from_the_user(error) and getattr(error, "errno", None) not in DISK_FULL:
            if not jax.distributed.is_initialized():
                raise
            traceback.print_exc()
            os._exit(1)  # a normal exit would wait for processes that may be gone
        text = "; ".join([str(error), *getattr(error, "__notes__", [])])
        line = f"{tool}: error: {about}{' '.join(text.split())}"
        print(printable(line), file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():
            os._exit(code)
        raise SystemExit(code) from None
    except (jax.errors.JaxRuntimeError, multihost_utils.ProcessFailureError) as error:
        text = " ".join(str(error).split())[:300]
        if "RESOURCE_EXHAUSTED" in text:
            cause = "out of memory; a new run with a smaller --memory has smaller slices"
        elif jax.process_count() > 1:
            cause = "another process may be gone"
        else:
            raise
        print(f"{tool}: error: {cause}: {text}", file=sys.stderr, flush=True)
        os._exit(1)


def exit_as_diverged(tool: str, run_dir: Path) -> None:
    """Exit with 1, after results without any use have been written."""
    cause = "all seeds diverged: their parameters are not finite"
    print(f"{tool}: error: {cause}; the results are in {run_dir}", file=sys.stderr, flush=True)
    raise SystemExit(1)


@contextlib.contextmanager
def about_the_config(script: Script, config):
    """Turn what a script raises for a config into one line, if its message names a field.

    All other exceptions keep their traceback, with a note of the fields that are not the defaults.
    """
    try:
        check_env_params(script, config)
        yield
    except Exception as error:  # many kinds: of the script, an environment, JAX for wrong sizes
        about = message_about_a_field(error, config)
        if about:
            raise FieldError(about) from error
        if "is not in registered gymnax environments" in str(error):
            similar = similar_environment(config.env_name)
            raise FieldError(
                f"env_name = {config.env_name}: is not registered; "
                f"{imported_file(config.env_name)}{similar}"
            ) from error
        if "Non-hashable static arguments" in str(error):
            kind = str(error).partition("of type ")[2].partition(",")[0]
            raise FieldError(
                f"env_name = {config.env_name}: an environment must be hashable, and {kind} is "
                "not: it defines __eq__, as a dataclass does, without __hash__, or holds a list or "
                "an array"
            ) from error
        if is_missing_module(error, config.env_name) or is_missing_library(error, config.env_name):
            raise FieldError(f"env_name = {config.env_name}: {error}") from error
        if isinstance(error, jax.errors.TracerBoolConversionError):
            error.add_note("floats of a config may be traced: use jnp.where on them, not `if`")
        error.add_note(f"{CONFIG}{changed_fields(script, config)}")
        raise


def changed_fields(script: Script, config) -> str:
    """The fields of a config that are not the defaults, as `NAME = VALUE, ...`."""
    default = script.Config()
    changed = [
        f"{name} = {value}"
        for name, value in plain(config).items()
        if getattr(config, name) != getattr(default, name)
    ]
    return ", ".join(changed) or "the defaults"


def message_about_a_field(error: Exception, config) -> str:
    """What an error says of a field, of a parameter of the environment or of its observations."""
    message = str(error)
    env_params = getattr(config, "env_params", {})
    if isinstance(error, ValueError):
        if names_a_field(message, plain(config)):
            return message
        if names_a_field(message, env_params):
            return f"env_params: {message}"
        if message.startswith("obs: "):
            return f"env_name = {config.env_name}: {message}"
    argument = re.search(r"unexpected keyword argument '(\w+)'", message)
    if isinstance(error, TypeError) and argument and argument[1] in env_params:
        return f"env_params: {argument[1]}: {message}"
    return ""


def names_a_field(message: str, names) -> bool:
    """Whether a message begins with `FIELD = VALUE` or `FIELD:`."""
    return message.partition(" = ")[0] in names or message.partition(":")[0] in names


def is_missing_module(error: Exception, env_name: str) -> bool:
    """Whether there is no module of the name in `env_name: MODULE:NAME`."""
    module = env_name.rpartition(":")[0]
    return isinstance(error, ModuleNotFoundError) and error.name == module


def is_missing_library(error: Exception, env_name: str) -> bool:
    """Whether an adapter of onejit lacks a library, or says what to install."""
    says_what = env_name.startswith("onejit.envs.") or "pip install" in str(error)
    return isinstance(error, ImportError) and says_what


def imported_file(env_name: str) -> str:
    """Which file MODULE:NAME has imported, as MODULE may be a module of Python, or what it is."""
    module = env_name.rpartition(":")[0]
    if not module:
        return (
            f"Gymnasium's are onejit.envs.gymnasium:{env_name}, and MODULE:NAME imports any module"
        )
    return f"{module} is {getattr(sys.modules.get(module), '__file__', 'a module of Python')}"


def similar_environment(name: str) -> str:
    """'; did you mean NAME?' with an environment of gymnax or brax."""
    import gymnax

    names = list(gymnax.registered_envs)
    module = name.rpartition(":")[0]
    if not module:
        # MuJoCo, which brax imports, may not find its library, and prints what else it lacks
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            import brax.envs

            names += brax.envs._envs
    return nearest(name, names, prefix=module)
