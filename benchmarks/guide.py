"""The measured numbers of the guide: what stands between markers in README.md and docs/*.md.

    python benchmarks/guide.py           # write them
    python benchmarks/guide.py --check   # exit with 1 if a page would change

A block begins with `<!-- KIND: NAME -->` and ends with `<!-- KIND: end -->`:

    row: dqn/cartpole     the return of a row of returns.yaml
    returns: MinAtar      the table of a family of environments
    speeds: all           steps per second over those of each peer, from results/speed.json
    plans: h100           what an H100 would run of each script and its peer, from gpu_plan.jsonl
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import returns_page as rows_page

BLOCK = re.compile(r"<!-- (row|returns|speeds|plans): (\S+) -->\n.*?<!-- \1: end -->", re.S)
SPEED_FILE = rows_page.MEASURED / "speed.json"
PLAN_FILE = rows_page.MEASURED / "gpu_plan.jsonl"

# The families of docs/results.md: {name: a pattern of the names of its environments}.
FAMILIES = {
    "classic": "(CartPole|Acrobot|MountainCar|MountainCarContinuous|Pendulum)-v[01]$",
    "memory": ".*observed$|MemoryChain|UmbrellaChain",
    "bsuite": ".*-(bsuite|misc)$|GridWorld",
    "MinAtar": ".*-MinAtar$",
    "MuJoCo": ".*-v4$",
    "brax": ".*, spring$",
    "Playground": "(CartpoleBalance|CartpoleSwingup|CheetahRun)$",
    "teams": "MPE_|overcooked|HeuristicEnemySMAX",
    "worlds": ".*",
}
# What speed.py compares: {row: (script, environment, whose code)}.
PEERS = {
    "ppo": ("ppo.py", "CartPole-v1", "PureJaxRL"),
    "ppo_minatar": ("ppo.py", "MinAtar Breakout", "PureJaxRL"),
    "ppo_continuous": ("ppo_continuous.py", "brax hopper", "PureJaxRL"),
    "ppo_rnn": ("ppo_rnn.py", "CartPole-v1", "PureJaxRL (which has one more layer)"),
    "dqn": ("dqn.py", "CartPole-v1", "PureJaxRL"),
    "pqn": ("pqn.py", "CartPole-v1", "PureJaxQL"),
    "sac": ("sac.py", "Pendulum-v1", "rejax"),
    "td3": ("td3.py", "Pendulum-v1", "rejax"),
    "flashsac": ("flashsac.py", "Pendulum-v1", "RL-X"),
    "mappo": ("mappo.py", "MPE simple_spread", "JaxMARL"),
    "ppo_torch": ("ppo.py", "CartPole-v1", "CleanRL"),
    "ppo_mujoco": ("ppo_continuous.py", "HalfCheetah-v4", "CleanRL"),
    "sac_mujoco": ("sac.py", "HalfCheetah-v4", "CleanRL"),
    "sac_sbx": ("sac.py", "HalfCheetah-v4", "sbx"),
    "crossq_sbx": ("crossq.py", "HalfCheetah-v4", "sbx"),
    "alphazero": ("alphazero.py", "connect_four", "Pgx's example"),
    "gridworld": ("q_learning_gridworld.py", "GridWorld", "a plain port of the articles"),
}
PLANNED = {"pqn_minatar": ("pqn.py", "MinAtar Breakout", "PureJaxQL")} | PEERS


# --- returns ---


def show(number: float) -> str:
    """Four digits."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def kind_of(row: dict) -> str:
    """The return to quote: of training, or of greedy episodes where too few ended in training."""
    return rows_page.kinds(row)[0]


def show_return(row: dict) -> str:
    """Mean with its 95 % interval, three or four digits."""
    (mean, low, high), _ = rows_page.interval_of(row, kind_of(row))
    note = ", evaluation" if kind_of(row) == "greedy_return" else ""
    return f"{show(mean)} ({show(low)} to {show(high)}){note}"


def show_row(name: str) -> str:
    """A sentence."""
    file = rows_page.file_of(name)
    config = f"[{rows_page.config_name(name)}.yaml](../{rows_page.config_of(name)})"
    if not file.exists():
        return f"{config} has not been measured yet."
    row = json.loads(file.read_text())
    values = rows_page.values_of(row, kind_of(row))
    kind = "evaluation" if kind_of(row) == "greedy_return" else "training"
    (mean, low, high), _ = rows_page.interval_of(row, kind_of(row))
    environment, _, variant = row["environment"].partition(", ")
    task = f"{environment} ({variant})" if variant else environment
    steps = rows_page.number(row["total_timesteps"])
    return (
        f"With {config}, {len(values)} agents reach a mean {kind} return of **{show(mean)}** on "
        f"{task} after {steps} steps (95 % interval: {show(low)} to {show(high)}). "
        f"The worst agent reaches {show(values.min())}."
    )


def show_published(row: dict) -> str:
    """The best published score of no more steps: score, source, and its seeds."""
    within, _ = rows_page.comparable(row)
    if within is None:
        return ""
    seeds = rows_page.DATA["sources"][within.source]["seeds"]
    counted = "1 seed" if seeds == 1 else f"{seeds} seeds" if seeds else "seeds not published"
    return f"{within.score:g}, {within.algorithm}, {within.link()}, {counted}"


def returns_table(family: str) -> str:
    """A line for each row whose environment belongs to the family."""
    lines = []
    for environment, rows in rows_page.by_environment(rows_page.read_rows()).items():
        if family != family_of(environment):
            continue
        shown = f"[{environment}](figures/{rows_page.figure_name(environment)})"
        for row in rows:
            script, _, variant = row["row"].partition("/")
            variant = "".join(f", {part}" for part in variant.split("+")[1:]).replace("_", " ")
            steps = rows_page.number(row["total_timesteps"])
            config = f"[{script}](../{rows_page.config_of(row['row'])}){variant}, {steps}"
            seeds = len(row["final_return"])
            lines.append([f"{shown}: {config}", show_return(row), seeds, show_published(row)])
            shown = environment
    return rows_page.markdown(["task: script, steps", "return", "seeds", "published"], lines)


def family_of(environment: str) -> str:
    return next(name for name, pattern in FAMILIES.items() if re.match(pattern, environment))


# --- speed ---


def read_speeds(row: str) -> list[dict]:
    return [entry for entry in json.loads(SPEED_FILE.read_text()) if entry["row"] == row]


def ratios_of(entry: dict) -> list[str]:
    """The median over neighbouring trainings, the least and the largest."""
    ratios = entry.get("spread ratio") or entry["bare ratio"]
    digits = ".0f" if ratios[0] >= 10 else ".2f"
    return [f"{ratio:{digits}}" for ratio in ratios]


def speeds_table() -> str:
    lines = []
    for row, (script, environment, peer) in PEERS.items():
        entries = {}
        for entry in read_speeds(row):
            middle, least, largest = ratios_of(entry)
            entries[entry["seeds"]] = f"{middle} ({least} to {largest})"
        one = entries.pop(1)
        more = next((f"{ratio}, {seeds} seeds" for seeds, ratio in entries.items()), "")
        lines.append([f"{script}, {environment}", peer, one, more])
    return rows_page.markdown(["script", "baseline", "one seed", "several seeds, all cores"], lines)


def plans_table() -> str:
    """Kernels and planned seconds of the baseline over the script's."""
    plans = dict(json.loads(line) for line in PLAN_FILE.read_text().splitlines())
    lines = []
    for key, ours in plans.items():
        _, row, agents, contestant = key.split("/")
        if contestant != "script":
            continue
        theirs = plans[f"planned/{row}/{agents}/peer"]
        script, environment, peer = PLANNED[row]
        kernels = theirs["kernels"] / ours["kernels"]
        seconds = theirs["planned"] / ours["planned"]
        lines.append(
            [f"{script}, {environment}, {agents}", peer, f"{kernels:.2f}", f"{seconds:.2f}"]
        )
    head = ["script, environment, agents", "baseline", "its kernels / ours", "its time / ours"]
    return rows_page.markdown(head, sorted(lines))


def fill(text: str) -> str:
    """A page with its blocks as the results are now."""

    def block(match):
        kind, name = match.groups()
        if kind == "row":
            content = show_row(name)
        elif kind == "returns":
            content = returns_table(name)
        elif kind == "speeds":
            content = speeds_table()
        else:
            content = plans_table()
        return f"<!-- {kind}: {name} -->\n\n{content}\n\n<!-- {kind}: end -->"

    return BLOCK.sub(block, text)


def changed_pages() -> dict[Path, str]:
    """The pages whose blocks are not current, with their new text."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    filled = {page: fill(page.read_text()) for page in pages}
    return {page: text for page, text in filled.items() if text != page.read_text()}


def write() -> list[Path]:
    """Write the pages whose blocks are not current, and return them."""
    changed = changed_pages()
    for page, text in changed.items():
        page.write_text(text)
    return list(changed)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    changed = list(changed_pages()) if options.check else write()
    for page in changed:
        print(page.relative_to(ROOT))
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
