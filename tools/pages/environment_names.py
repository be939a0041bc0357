"""Write docs/environment_names.md: the names of all environments that `--env-name` accepts.

    python tools/pages/environment_names.py
    python tools/pages/environment_names.py --only craftax jumanji
    python tools/pages/environment_names.py --check

A section is written if its package is installed, and is otherwise kept as it is on the page. A
name is on the page if a script can start the environment: it is made, and an update is traced. A
second process does the same in 64-bit mode, because environments keep arrays of the mode in which
their package was imported. Those that download files when they are made are listed without a start.
EnvPool and Gymnasium have more than a thousand names, and the page says how to list them.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "environment_names.md"
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
LIBRARIES = {
    "navix": "Navix",
    "xminigrid": "XLand-MiniGrid",
    "craftax": "Craftax",
    "jumanji": "Jumanji",
    "pgx": "Pgx, one player",
    "playground": "MuJoCo Playground",
}
HEAD = """# Environment names

`--env-name NAME` accepts these names. [Environments](environments.md) describes them, and you can
[bring your own](bring_your_own.md). `python tools/pages/environment_names.py` writes this
page and starts each of them. A star: the environment fails in [64-bit
mode](questions.md#does-it-work-in-64-bit-mode).

"""
TAIL = """## EnvPool and Gymnasium

These libraries have more than a thousand names. These commands list them:

```bash
# needs a network, to install the packages envpool and gymnasium
python -c "import envpool; print(*envpool.list_all_envs(), sep='\\n')"
python -c "import gymnasium; print(*gymnasium.registry, sep='\\n')"
```

Write `onejit.envs.envpool:NAME` or `onejit.envs.gymnasium:NAME` ([non-JAX
environments](host_environments.md)).
"""


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


def gymnax_section() -> str:
    rows = ["| name | actions | observation | time limit |", "|---|---|---|---|"]
    names = sorted(set(BUILT_IN) - set(NOT_LISTED))
    for name, written in started({name: script_for(name) for name in names}).items():
        env, params = gymnax.make(name)
        action, observation = env.action_space(params), env.observation_space(params)
        discrete = isinstance(action, spaces.Discrete)
        actions = f"{action.n} discrete" if discrete else f"{action.shape[0]} continuous"
        limit = int(params.max_steps_in_episode)
        rows.append(f"| {written} | {actions} | {described(observation)} | {limit} |")
    return "## gymnax\n\n" + "\n".join(rows) + "\n\n"


def brax_section() -> str:
    rows = ["| name | actions | observation | time limit |", "|---|---|---|---|"]
    names = sorted(set(brax_envs._envs) - set(NOT_LISTED))
    for name, written in started(dict.fromkeys(names, "ppo_continuous")).items():
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            env = brax_envs.get_environment(name, backend="spring")
        actions, observation = env.action_size, env.observation_size
        rows.append(f"| {written} | {actions} continuous | {observation}, float32 | 1000 |")
    text = "For the scripts with continuous actions. The numbers are for the default backend.\n\n"
    return "## brax\n\n" + text + "\n".join(rows) + "\n\n"


def library_section(module: str, title: str) -> str | None:
    """None if the library is not installed."""
    before = set(gymnax.registered_envs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(f"onejit.envs.{module}")
    except ImportError:
        return None
    names = set(gymnax.registered_envs) - before  # onejit.envs.MODULE:NAME
    downloads = {f"onejit.envs.{module}:{name}" for name in names_that_download(module)} & names
    scripts = {name: script_for(name) for name in sorted(names - downloads)}
    written = started(scripts).values()
    intro = f"{len(written)} names, to be written as `onejit.envs.{module}:NAME`:"
    text = f"## {title}\n\n{intro}\n\n{listed(written)}.\n\n"
    if downloads:
        text += f"Not started, because making them downloads files ({len(downloads)}):\n\n"
        text += listed(f"`{name.rpartition(':')[2]}`" for name in sorted(downloads)) + ".\n\n"
    return text


def names_that_download(module: str) -> set[str]:
    """The names of a library that need a network when they are made."""
    if module == "jumanji":
        return {"Sokoban-v0"}  # its levels
    if module == "playground":
        from mujoco_playground import locomotion, manipulation

        return {*locomotion.ALL_ENVS, *manipulation.ALL_ENVS}  # models of robots
    return set()


def listed(names) -> str:
    return textwrap.fill(", ".join(names), 120, break_on_hyphens=False)


def teams_and_games() -> str:
    """The names that mappo.py and alphazero.py take, which have environments of their own."""
    import alphazero
    import mappo

    text = ""
    for title, script, names in (
        ("JaxMARL", "mappo", mappo.jaxmarl.registered_envs),
        ("Pgx", "alphazero", alphazero.LONGEST),
    ):
        written = started(dict.fromkeys(sorted(names), script)).values()
        text += f"## {title}\n\nFor [{script}.py]({script}.md), {len(written)} names:\n\n"
        text += f"{listed(written)}.\n\n"
    return text


SECTIONS = ("gymnax", "brax", *LIBRARIES, "teams_and_games")


def page(old: str, sections) -> str:
    """The page, with its other sections as they are in `old`."""

    def kept(title: str) -> str:
        found = re.search(rf"(?ms)^## {title}\n.*?(?=^## )", old)
        return found[0] if found else ""

    text = HEAD
    text += gymnax_section() if "gymnax" in sections else kept("gymnax")
    text += brax_section() if "brax" in sections else kept("brax")
    for module, title in LIBRARIES.items():
        section = library_section(module, title) if module in sections else None
        text += section or kept(title)
    text += teams_and_games() if "teams_and_games" in sections else kept("JaxMARL") + kept("Pgx")
    return text + TAIL


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, check the names of gymnax and brax"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="the sections to write"
    )
    parser.add_argument("--print-failing", nargs="+", metavar="SCRIPT/NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.print_failing:
        for pair in args.print_failing:
            script, _, name = pair.partition("/")
            if not can_start(script, name):
                print(name)
        return
    if args.check:
        text = args.out.read_text()
        current = True
        for title, names in (("gymnax", BUILT_IN), ("brax", brax_envs._envs)):
            section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
            named = re.findall(r"(?m)^\| `(\S+)`", section)
            current &= named == sorted(set(names) - set(NOT_LISTED))
        sys.exit(None if current else f"{args.out} is not current: run this script without --check")
    args.out.write_text(page(args.out.read_text() if args.out.exists() else "", args.only))


if __name__ == "__main__":
    main()
