"""Write the tables of docs/environments.md with the names of gymnax and brax.

    python tools/pages/environment_names.py
    python tools/pages/environment_names.py --check

A name is in a table if a script can start the environment: it is made, and an update is traced. A
second process does the same in 64-bit mode, because environments keep arrays of the mode in which
their package was imported.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "environments.md"
sys.path.insert(0, str(ROOT))

import gymnax
import jax
import numpy as np
from brax import envs as brax_envs
from gymnax.environments import spaces

BUILT_IN = list(gymnax.registered_envs)
NOT_LISTED = {
    "MNISTBandit-bsuite": "downloads when it is made",
    "fast": "a test environment without physics",
    "swimmer": "refused by the scripts",
}
HEAD = "| name | actions | observation | time limit |\n|---|---|---|---|\n"


def trace_update(script, config) -> None:
    """Make the environment and trace an update of the script. Raises what they raise."""
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        init, update = script.make_learner(config)
        jax.eval_shape(update, jax.eval_shape(init, jax.random.key(0)))


def script_for(name: str) -> str:
    """The script for the actions of an environment that is registered with gymnax."""
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        env, params = gymnax.make(name)
        try:
            is_discrete = isinstance(env.action_space(params), spaces.Discrete)
        except ValueError:  # too many actions
            is_discrete = True
    return "ppo" if is_discrete else "ppo_continuous"


def can_start(script: str, name: str) -> bool:
    try:
        module = importlib.import_module(script)
        trace_update(module, module.Config(env_name=name))
    except Exception as error:  # each library refuses in its own way
        print(f"{script}, {name}: {' '.join(str(error).split())[:150]}", file=sys.stderr)
        return False
    return True


def fail_in_64_bits(scripts: dict[str, str]) -> set[str]:
    """The names that a process in 64-bit mode cannot start."""
    pairs = [f"{script}/{name}" for name, script in scripts.items()]
    command = [sys.executable, __file__, "--print-failing", *pairs]
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    child = subprocess.run(
        command,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return set(child.stdout.split())


def started(scripts: dict[str, str]) -> dict[str, str]:
    """The names that their scripts can start, and how the page has them: with a star if they fail
    in 64-bit mode. `scripts` has the script of each name, as --env-name takes it."""
    scripts = {name: script for name, script in scripts.items() if can_start(script, name)}
    failing = fail_in_64_bits(scripts) if scripts else set()
    written = {}
    for name in scripts:
        star = " *" if name in failing else ""
        written[name] = f"`{name.rpartition(':')[2]}`{star}"
    return written


def described(space) -> str:
    if isinstance(space, spaces.Discrete):
        return f"one of {space.n}"
    shape = " x ".join(map(str, space.shape)) or "1"
    return f"{shape}, {np.dtype(space.dtype).name}"


def gymnax_rows() -> list[str]:
    rows = []
    names = sorted(set(BUILT_IN) - set(NOT_LISTED))
    for name, written in started({name: script_for(name) for name in names}).items():
        env, params = gymnax.make(name)
        action, observation = env.action_space(params), env.observation_space(params)
        discrete = isinstance(action, spaces.Discrete)
        actions = f"{action.n} discrete" if discrete else f"{action.shape[0]} continuous"
        limit = int(params.max_steps_in_episode)
        rows.append(f"| {written} | {actions} | {described(observation)} | {limit} |")
    return rows


def brax_rows() -> list[str]:
    rows = []
    names = sorted(set(brax_envs._envs) - set(NOT_LISTED))
    for name, written in started(dict.fromkeys(names, "ppo_continuous")).items():
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            env = brax_envs.get_environment(name, backend="spring")
        actions, observation = env.action_size, env.observation_size
        rows.append(f"| {written} | {actions} continuous | {observation}, float32 | 1000 |")
    return rows


def table_of(text: str, library: str) -> re.Match:
    """The part of the page between the markers of a library."""
    found = re.search(
        rf"(?s)(<!-- {library}: begin[^>]*-->\n\n)(.*?)(\n<!-- {library}: end -->)", text
    )
    if not found:
        sys.exit(f"{PAGE} has no markers of {library}")
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, check the names")
    parser.add_argument("--print-failing", nargs="+", metavar="SCRIPT/NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.print_failing:
        for pair in args.print_failing:
            script, _, name = pair.partition("/")
            if not can_start(script, name):
                print(name)
        return
    text = PAGE.read_text()
    if args.check:
        for library, names in (("gymnax", BUILT_IN), ("brax", brax_envs._envs)):
            named = re.findall(r"(?m)^\| `(\S+)`", table_of(text, library)[2])
            if named != sorted(set(names) - set(NOT_LISTED)):
                sys.exit(f"{PAGE} is not current: run this script without --check")
        return
    for library, rows in (("gymnax", gymnax_rows()), ("brax", brax_rows())):
        found = table_of(text, library)
        table = HEAD + "\n".join(rows) + "\n"
        text = text[: found.start(2)] + table + text[found.end(2) :]
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
