"""How long many agents take: PPO on CartPole-v1, 5e5 steps each, all of a process included.

    python benchmarks/many_agents.py --cleanrl cleanrl --cleanrl-python torch/bin/python
    python benchmarks/many_agents.py --draw    # the table and the picture from what was measured

`python ppo.py --num-seeds N` runs with an empty compilation cache, so its times include the
compilation. CleanRL's ppo.py has the same hyperparameters and trains one agent a process. Its times
for several agents are computed: one after the other on the same machine. How to get CleanRL stands
in benchmarks/speed.py.

Writes results/times.json, the table between the markers in README.md, and
docs/figures/many_agents.png. What was measured before stays. tools/pages/first_picture.py draws the
picture of README.md from it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import origin

RESULTS = ROOT / "benchmarks" / "results" / "times.json"
PICTURE = ROOT / "docs" / "figures" / "many_agents.png"
BEGIN = "<!-- times: begin -->"
END = "<!-- times: end -->"
STEPS = 500_000
COLUMNS = [1, 8, 256]


def seconds_of(command: list, env: dict) -> float:
    """The seconds of a process in an empty directory."""
    with tempfile.TemporaryDirectory() as directory:
        cache = {"JAX_COMPILATION_CACHE_DIR": f"{directory}/cache"}
        begun = time.perf_counter()
        subprocess.run(command, cwd=directory, env=env | cache, check=True, capture_output=True)
        return time.perf_counter() - begun


def seconds_of_cleanrl(options) -> float:
    script = options.cleanrl.absolute() / "cleanrl" / "ppo.py"
    command = [options.cleanrl_python.absolute(), script, "--no-cuda"]
    command += ["--total-timesteps", str(STEPS)]
    return seconds_of(command, os.environ | {"PYTHONPATH": str(options.cleanrl.absolute())})


def seconds_of_ours(agents: int) -> float:
    command = [sys.executable, ROOT / "ppo.py", "--total-timesteps", str(STEPS)]
    return seconds_of([*command, "--num-seeds", str(agents)], dict(os.environ))


def in_words(seconds: float) -> str:
    """Two or three digits: 11 s, 3.4 min, 14 h."""
    for unit, size in [("h", 3600), ("min", 60)]:
        if seconds >= 2 * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{seconds:.0f} s"


def table(results: dict) -> str:
    ours = {int(agents): seconds for agents, seconds in results["onejit"].items()}
    one = results["cleanrl"]["1"]
    cores = results["cores"]
    header = [""]
    header += ["1 agent" if agents == 1 else f"{agents} agents" for agents in COLUMNS]
    cleanrl = [in_words(one)] + [f"{in_words(agents * one)}\\*" for agents in COLUMNS[1:]]
    rows = [
        header,
        ["---"] * len(header),
        [f"CleanRL on {cores} CPU cores", *cleanrl],
        [f"onejit on the same {cores} cores", *(in_words(ours[agents]) for agents in COLUMNS)],
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    note = (
        "\\* Computed: the time of one CleanRL process, which may use both cores, times the number "
        "of agents. Two processes at once were not timed."
    )
    return "\n".join([*lines, "", note])


def draw(results: dict) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    draw_times(figure.subplots(), results)
    figure.savefig(PICTURE, dpi=150)


def draw_times(axes, results: dict) -> None:
    """Seconds over the number of agents."""
    agents = sorted(int(number) for number in results["onejit"])
    ours = [results["onejit"][str(number)] for number in agents]
    cleanrl = [number * results["cleanrl"]["1"] for number in agents]
    axes.loglog(agents, cleanrl, "--", color="tab:gray", label="CleanRL, one after the other")
    axes.loglog(agents, ours, "o-", color="tab:blue", label="onejit, one program")
    axes.set_xticks(agents, [str(number) for number in agents])
    axes.minorticks_off()
    ticks = [10, 60, 600, 3600, 36_000]
    axes.set_yticks(ticks, ["10 s", "1 min", "10 min", "1 h", "10 h"])
    axes.set_xlabel("agents")
    axes.set_ylabel("time, compilation included")
    axes.set_title(f"PPO on CartPole-v1, 5e5 steps, {results['cores']} CPU cores", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def write_readme(results: dict) -> None:
    path = ROOT / "README.md"
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"README.md: lacks {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--agents", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--cleanrl", type=Path, help="a clone of the repository")
    parser.add_argument("--cleanrl-python", type=Path, help="a Python that has what CleanRL needs")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"onejit": {}, "cleanrl": {}}
    if not options.draw:
        results |= origin.origin() | {"cores": len(os.sched_getaffinity(0))}
        if options.cleanrl:
            results["cleanrl"]["1"] = seconds_of_cleanrl(options)
        for agents in options.agents:
            results["onejit"][str(agents)] = seconds_of_ours(agents)
            print(f"{agents} agents: {results['onejit'][str(agents)]:.1f} s", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw(results)
    write_readme(results)


if __name__ == "__main__":
    main()
