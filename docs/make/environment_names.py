"""Write docs/environment_names.md: the names of all environments that `--env-name` accepts.

    python docs/make/environment_names.py
    python docs/make/environment_names.py --check

A section is written if its package is installed, and is otherwise kept as it is on the page.
EnvPool and Gymnasium have more than a thousand names, and the page says how to list them.
"""

import argparse
import contextlib
import importlib
import io
import re
import sys
import textwrap
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "environment_names.md"
sys.path.insert(0, str(ROOT))

import gymnax
import numpy as np
from brax import envs as brax_envs
from gymnax.environments import spaces

BUILT_IN = list(gymnax.registered_envs)  # before a module of onejit.envs adds names
NOT_LISTED = {
    "MNISTBandit-bsuite": "downloads when it is made",
    "fast": "a test environment without physics",
}
LIBRARIES = {"navix": "Navix", "craftax": "Craftax", "jumanji": "Jumanji", "pgx": "Pgx, one player"}
LIBRARIES["playground"] = "MuJoCo Playground"
HEAD = """# Environment names

`--env-name NAME` accepts these names. [Environments](environments.md) explains them and how to add
your own. This page is written by `python docs/make/environment_names.py`.

"""
TAIL = """## EnvPool and Gymnasium

These libraries have more than a thousand names. These commands list them:

```bash
# needs a network, to install the packages envpool and gymnasium
python -c "import envpool; print(*envpool.list_all_envs(), sep='\\n')"
python -c "import gymnasium; print(*gymnasium.registry, sep='\\n')"
```

Write `onejit.envs.envpool:NAME` or `onejit.envs.gymnasium:NAME` ([environments outside
JAX](host_environments.md)).
"""


def described(space) -> str:
    if isinstance(space, spaces.Discrete):
        return f"one of {space.n}"
    shape = " x ".join(map(str, space.shape)) or "1"
    return f"{shape}, {np.dtype(space.dtype).name}"


def gymnax_section() -> str:
    rows = ["| name | actions | observation | time limit |", "|---|---|---|---|"]
    for name in sorted(BUILT_IN):
        if name in NOT_LISTED:
            continue
        env, params = gymnax.make(name)
        action, observation = env.action_space(params), env.observation_space(params)
        discrete = isinstance(action, spaces.Discrete)
        actions = f"{action.n} discrete" if discrete else f"{action.shape[0]} continuous"
        limit = int(params.max_steps_in_episode)
        rows.append(f"| `{name}` | {actions} | {described(observation)} | {limit} |")
    return "## gymnax\n\n" + "\n".join(rows) + "\n\n"


def brax_section() -> str:
    rows = ["| name | actions | observation | time limit |", "|---|---|---|---|"]
    for name in sorted(brax_envs._envs):
        if name in NOT_LISTED:
            continue
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            backend = "generalized" if name == "swimmer" else "spring"
            env = brax_envs.get_environment(name, backend=backend)
        rows.append(
            f"| `{name}` | {env.action_size} continuous | {env.observation_size}, float32 | 1000 |"
        )
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
    names = sorted(set(gymnax.registered_envs) - before)
    listed = textwrap.fill(", ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False)
    intro = f"{len(names)} names, to be written as `onejit.envs.{module}:NAME`:"
    return f"## {title}\n\n{intro}\n\n{listed}.\n\n"


def teams_and_games() -> str:
    """The names that mappo.py and alphazero.py take, which have environments of their own."""
    import alphazero
    import mappo

    teams = []
    for name in sorted(mappo.jaxmarl.registered_envs):
        with (
            contextlib.suppress(Exception),
            contextlib.redirect_stdout(io.StringIO()),
        ):  # each refuses in its own way
            mappo.make_env(mappo.Config(env_name=name))
            teams.append(name)
    text = ""
    for title, script, names in (
        ("JaxMARL", "mappo", teams),
        ("Pgx", "alphazero", sorted(alphazero.LONGEST)),
    ):
        listed = textwrap.fill(
            ", ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False
        )
        text += (
            f"## {title}\n\nFor [{script}.py]({script}.md), {len(names)} names:\n\n{listed}.\n\n"
        )
    return text


def page(old: str) -> str:
    text = HEAD + gymnax_section() + brax_section()
    for module, title in LIBRARIES.items():
        kept = re.search(rf"(?ms)^## {title}\n.*?(?=^## )", old)
        text += library_section(module, title) or (kept[0] if kept else "")
    return text + teams_and_games() + TAIL


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, check gymnax and the names of brax"
    )
    args = parser.parse_args()
    if args.check:
        text = args.out.read_text()
        named = re.findall(
            r"(?m)^\| `(\w+)` \|", text.partition("## brax")[2].partition("\n## ")[0]
        )
        current = gymnax_section() in text and named == sorted(
            set(brax_envs._envs) - set(NOT_LISTED)
        )
        sys.exit(None if current else f"{args.out} is not current: run this script without --check")
    args.out.write_text(page(args.out.read_text() if args.out.exists() else ""))


if __name__ == "__main__":
    main()
