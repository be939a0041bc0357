"""The measured numbers of the guide: what stands between markers in README.md, docs/ and dev/.

    python benchmarks/guide.py           # write them
    python benchmarks/guide.py --check   # exit with 1 if a page would change

A block begins with `<!-- KIND: NAME -->` and ends with `<!-- KIND: end -->`:

    row: dqn/cartpole     the return of a row of returns.yaml
    returns: MinAtar      the table of a family of environments: the best row of each script
    returns: unmeasured   tasks with a config and published scores, and without a result
    machines: counted     how many rows were measured on which machine
    machines: gpu         what five trainings took on a GPU
    speeds: all           steps per second over those of each peer, from results/speed.json
    plans: h100           what an H100 would run of each script and its peer, from gpu_plan.jsonl
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import returns_page as rows_page

BLOCK = re.compile(
    r"<!-- (row|returns|machines|speeds|plans): (\S+) -->\n.*?<!-- \1: end -->", re.S
)
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
# Rows whose time on a GPU docs/performance.md shows.
GPU_ROWS = {
    "ppo/breakout@1e7": "MinAtar Breakout",
    "ppo/seaquest@1e7": "MinAtar Seaquest",
    "rainbow/breakout": "MinAtar Breakout",
    "sac/mujoco_halfcheetah": "HalfCheetah-v4, stepped by EnvPool on the CPU",
    "crossq/mujoco_walker2d": "Walker2d-v4, stepped by EnvPool on the CPU",
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


def show(number: float, digits: int = 4) -> str:
    """A return, with all digits before the point."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.{digits}g}"


def kind_of(row: dict) -> str:
    """The return to quote: of training, or of greedy episodes where too few ended in training."""
    return rows_page.kinds(row)[0]


def show_return(row: dict, kind: str) -> str:
    """Mean with its 95 % interval, three or four digits; nothing if too few episodes ended."""
    if kind not in rows_page.kinds(row):
        return ""
    (mean, low, high), of_interval = rows_page.interval_of(row, kind)
    return f"{show(mean)} ({show(low)} to {show(high)}){rows_page.MARKS[of_interval]}"


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
    mean, low, high, worst = (show(number, digits=3) for number in (mean, low, high, values.min()))
    return (
        f"With {config}, {len(values)} agents reach a mean {kind} return of **{mean}** on "
        f"{task} after {steps} steps (95 % interval: {low} to {high}). "
        f"The worst agent reaches {worst}."
    )


def quote(score) -> str:
    """A published score with its kind, steps, source and seeds."""
    seeds = score.num_seeds()
    counted = "1 seed" if seeds == 1 else f"{seeds} seeds" if seeds else "seeds not published"
    kind = rows_page.WORDS[score.kind()].removesuffix(" return")
    steps = rows_page.number(score.steps)
    return f"{score.score:g} ({kind}) at {steps}, {score.algorithm}, {score.link()}, {counted}"


def show_published(row: dict) -> str:
    """The best score at no more steps, of any algorithm too, and those with more steps."""
    within, _ = rows_page.comparable(row)
    of_all = rows_page.best_of_all(row)
    parts = [quote(score) for score in (within, of_all) if score is not None]
    parts += [f"{quote(score)}: more steps" for score in rows_page.with_more_steps(row)]
    return "; ".join(parts)


def best_rows(rows: list[dict], family: str) -> list[dict]:
    """The row with the highest return of each script; tasks of memory show what it is worth."""
    best = {}
    for row in rows:
        script = row["script"]
        if family == "memory" and row["row"].endswith("+no_memory"):
            script = "no memory"
        (mean, _, _), _ = rows_page.interval_of(row, kind_of(row))
        if script not in best or mean > best[script][0]:
            best[script] = (mean, row)
    return [row for _, row in best.values()]


def show_task(environment: str, row: dict, is_first: bool) -> str:
    """The task, with a link to its curves where it stands first, the script and the steps."""
    figure = f"figures/{rows_page.figure_name(environment)}"
    task = f"[{environment}]({figure})" if is_first else environment
    variants = "".join(f", {part}" for part in row["row"].split("+")[1:]).replace("_", " ")
    config = f"[{row['script']}](../{rows_page.config_of(row['row'])}){variants}"
    older = " †" if rows_page.is_of_older_code(row) else ""
    return f"{task}: {config}, {rows_page.number(row['total_timesteps'])}{older}"


def returns_table(family: str) -> str:
    """A line for the best row of each script, on each environment of the family."""
    lines = []
    for environment, rows in rows_page.by_environment(rows_page.read_rows()).items():
        if family != family_of(environment):
            continue
        for place, row in enumerate(best_rows(rows, family)):
            returns = [show_return(row, kind) for kind in ("final_return", "greedy_return")]
            task = show_task(environment, row, is_first=place == 0)
            lines.append([task, *returns, len(row["final_return"]), show_published(row)])
    head = ["task: script, steps", "training return", "evaluation return", "seeds", "published"]
    note = ""
    if any("†" in line[0] for line in lines):
        text = rows_page.TEXT["older_code"].strip()
        note = f"\n\n† {text[0].upper()}{text[1:]}"
    return rows_page.markdown(head, lines) + note


def unmeasured_table() -> str:
    """Tasks without any measured row that have a config and published scores."""
    measured = {row["environment"] for row in rows_page.read_rows()}
    lines = {}
    for name in rows_page.not_measured():
        config = yaml.safe_load((ROOT / rows_page.config_of(name)).read_text())
        environment = config["env_name"].rpartition(":")[2]
        steps = float(name.partition("@")[2] or config["total_timesteps"])
        row = {"row": name, "script": name.partition("/")[0], "environment": environment}
        row["total_timesteps"] = steps
        published = show_published(row)
        if published and environment not in measured:
            link = f"[{row['script']}](../{rows_page.config_of(name)})"
            lines.setdefault((environment, row["script"]), [f"{environment}: {link}", published])
    return rows_page.markdown(["task: script", "published"], list(lines.values()))


def count_machines() -> str:
    """A sentence."""
    machines = collections.Counter()
    for row in rows_page.read_rows():
        count, _, name = row["device"].partition(",")[0].partition(" x ")
        cores = row["device"].rpartition(", ")[2].partition(" ")[0]
        many = int(count) * int(cores) > 2
        machines["16 CPU cores" if many and name == "cpu" else name] += 1
    on_cpus = machines.pop("cpu")
    others = [f"{number} on {machine}" for machine, number in machines.most_common()]
    others = [part.replace("on NVIDIA", "on one NVIDIA") for part in others]
    total = on_cpus + machines.total()
    return f"Of {total} rows, {on_cpus} were measured on one or two CPU cores, {', '.join(others)}."


def gpu_table() -> str:
    """What trainings took on a GPU, from the start of the command to its end."""
    lines = []
    for name, task in GPU_ROWS.items():
        row = json.loads(rows_page.file_of(name).read_text())
        script = f"[{row['script']}.py](../{rows_page.config_of(name)}), {task}"
        steps = rows_page.number(row["total_timesteps"])
        minutes = rows_page.show_minutes(row["seconds"])
        lines.append([script, len(row["final_return"]), steps, minutes])
    return rows_page.markdown(["script, task", "agents", "steps of an agent", "time"], lines)


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
            content = unmeasured_table() if name == "unmeasured" else returns_table(name)
        elif kind == "machines":
            content = gpu_table() if name == "gpu" else count_machines()
        elif kind == "speeds":
            content = speeds_table()
        else:
            content = plans_table()
        return f"<!-- {kind}: {name} -->\n\n{content}\n\n<!-- {kind}: end -->"

    return BLOCK.sub(block, text)


def changed_pages() -> dict[Path, str]:
    """The pages whose blocks are not current, with their new text."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("dev/*.md"))]
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
