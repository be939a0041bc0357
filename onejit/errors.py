"""Errors of the commands: a mistake of the user is one line on standard error."""

import contextlib
import dataclasses
import os
import sys

import jax
from jax.experimental import multihost_utils

from onejit.configs import plain
from onejit.text import nearest


@contextlib.contextmanager
def errors_in_one_line(tool: str, code: int = 2, kinds=(ValueError, OSError), about: str = ""):
    """Print an exception of these kinds as one line that begins with `about`, and exit."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone, as of `onejit list | head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or Python complains at its end
        raise SystemExit(code) from None
    except kinds as error:
        print(f"{tool}: error: {about}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():
            os._exit(code)  # a normal exit would wait for processes that may be gone
        raise SystemExit(code) from None


@contextlib.contextmanager
def failures_in_one_line(tool: str):
    """Print one line and exit with 1 if memory runs out or another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, multihost_utils.ProcessFailureError) as error:
        text = " ".join(str(error).split())[:300]
        if "RESOURCE_EXHAUSTED" in text:
            cause = "out of memory, try --memory"
        elif jax.process_count() > 1:
            cause = "another process may be gone"
        else:
            raise
        print(f"{tool}: error: {cause}: {text}", file=sys.stderr, flush=True)
        os._exit(1)  # a normal exit would wait for the other processes


@contextlib.contextmanager
def naming_the_field(script, config):
    """If no program can be made for a config, raise a ValueError that names the field to blame.

    A program can be made if this field has its default. If the default config fails as well, the
    mistake is in the script, and the script's own exception is raised.
    """
    try:
        yield
    except Exception as error:  # many kinds: of the script, an environment, JAX for wrong sizes
        values = plain(config)
        if isinstance(error, ValueError) and str(error).startswith(tuple(values)):
            similar = similar_environment(config.env_name)
            if similar and str(error).startswith("env_name = "):
                raise ValueError(f"{error}{similar}") from error
            raise
        default = script.Config()
        changed = [name for name in values if getattr(config, name) != getattr(default, name)]
        to_blame = []
        for name in changed:
            repaired = dataclasses.replace(config, **{name: getattr(default, name)})
            if is_possible(script, repaired):
                to_blame.append(name)
        if not to_blame and not is_possible(script, default):
            raise
        named = ", ".join(f"{name} = {values[name]}" for name in to_blame[:1] or changed)
        raise ValueError(f"{named}: {error} ({type(error).__name__})") from error


def is_possible(script, config) -> bool:
    """Whether a program can be made for a config."""
    with contextlib.suppress(Exception):
        init, update = script.make_learner(config)
        jax.eval_shape(lambda key: update(init(key)), jax.random.key(0))
        return True
    return False


def similar_environment(name: str) -> str:
    """'; did you mean NAME?' with an environment of gymnax or brax."""
    import brax.envs
    import gymnax

    return nearest(name, [*gymnax.registered_envs, *brax.envs._envs])
