"""gpu.md, gpu_seconds.png and gpu_throughput.png from the results of gpu.py."""

import statistics
from pathlib import Path

from matplotlib.figure import Figure
from returns_page import markdown, show_interval

from onejit.base import files

PEERS = {"pqn_minatar": "PureJaxQL", "sac": "rejax", "td3": "rejax"}  # others: PureJaxRL
PUBLISHED_STEPS = {"ppo": 500_000, "ppo_minatar": 10_000_000}  # of each agent
# PureJaxRL's points for an A100, read off its pictures: {agents: seconds}. Whether they contain the
# compilation is not said there.
PUBLISHED = {
    "ppo": {1: 26, 256: 29, 512: 38, 1024: 61, 2048: 98},
    "ppo_minatar": {1: 48, 32: 88, 64: 132, 128: 180, 256: 325},
}
HEAD = ["lane", "row", "agents", "steps of each", "script, s", "peer, s", "script, steps/s"]
HEAD += ["peer, steps/s", "ratio", "compilation, s", "kernels", "planned, s", "measured with"]


def cells_of(results: dict, lane: str) -> dict:
    """`{(row, agents): {contestant: result}}` of a lane."""
    cells = {}
    for key, result in results.items():
        if key.startswith(f"{lane}/"):
            _, row, agents, contestant = key.split("/")
            cells.setdefault((row, int(agents)), {})[contestant] = result
    return cells


def seconds_of(result: dict) -> float | None:
    return statistics.median(result["seconds"]) if "seconds" in result else None


def throughput_of(result: dict) -> float | None:
    """Steps per second of all agents together."""
    seconds = seconds_of(result)
    return result["agents"] * result["steps"] / seconds if seconds else None


def source_of(result: dict) -> str:
    if "machine" not in result:  # it was only planned, or its process died
        return ""
    return f"{result['machine']}, jax {result['jax']}, {result['commit'][:7]}"


def show(number, digits: str = ",.0f") -> str:
    return "" if number is None else format(number, digits)


def show_both(cell: dict, field: str, digits: str = ",.0f") -> str:
    """Of the script and of its peer."""
    shown = [show(cell.get(name, {}).get(field), digits) for name in ("script", "peer")]
    return " / ".join(shown) if any(shown) else ""


def show_cell(lane: str, row: str, agents: int, cell: dict, plans: dict) -> list[str]:
    script = cell.get("script", {})
    peer = cell.get("peer", {})
    both = "seconds" in script and "seconds" in peer
    return [
        lane,
        row,
        str(agents),
        show(script.get("steps", peer.get("steps"))),
        script.get("failed", show(seconds_of(script), ".2f")),
        peer.get("failed", show(seconds_of(peer), ".2f")),
        show(throughput_of(script)),
        show(throughput_of(peer)),
        show(seconds_of(peer) / seconds_of(script), ".2f") if both else "",
        show_both(cell if lane == "headline" else plans, "compilation", ".0f"),
        show_both(plans, "kernels"),
        show_both(plans, "planned", ".2f"),
        source_of(script or peer),
    ]


def page_of(results: dict) -> str:
    """The table, and a line for each check and row."""
    plans = cells_of(results, "planned") | cells_of(results, "compiled")
    speeds = cells_of(results, "speed")
    headlines = cells_of(results, "headline")
    rows = []
    for cell in sorted(plans.keys() | speeds.keys()):
        rows.append(show_cell("speed", *cell, speeds.get(cell, {}), plans.get(cell, {})))
    for cell in sorted(headlines):
        rows.append(show_cell("headline", *cell, headlines[cell], {}))
    parts = [markdown(HEAD, rows)]
    for key, result in results.items():
        if key.startswith("checks/"):
            left_out = ("machine", "jax", "commit")
            shown = {name: value for name, value in result.items() if name not in left_out}
            parts.append(f"{key}: {shown} {source_of(result)}")
        if key.startswith("rows/"):
            shown = result.get("failed") or show_interval(result["row"], "final_return")
            parts.append(f"{key}: final return {shown}, {source_of(result)}")
    return "\n\n".join(parts) + "\n"


def draw(results: dict, path: Path, of_seconds: bool) -> None:
    """Seconds of the published number of steps, or steps per second, over agents."""
    cells = cells_of(results, "speed")
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(dict.fromkeys(row for row, _ in cells)):
        if of_seconds and row not in PUBLISHED:
            continue
        style = {"color": f"C{index}", "marker": "o"}
        for contestant, line in (("script", "-"), ("peer", ":")):
            points = {}
            for (name, agents), cell in sorted(cells.items()):
                rate = throughput_of(cell.get(contestant, {}))
                if name == row and rate:
                    points[agents] = agents * PUBLISHED_STEPS[row] / rate if of_seconds else rate
            label = row if contestant == "script" else PEERS.get(row, "PureJaxRL")
            axes.plot(points.keys(), points.values(), line, label=label, **style)
        points = dict(PUBLISHED.get(row, {}))
        if not of_seconds:
            points = {n: n * PUBLISHED_STEPS[row] / seconds for n, seconds in points.items()}
        if points:
            label = "PureJaxRL, published for an A100"
            axes.plot(points.keys(), points.values(), "x", color=f"C{index}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="agents on one GPU")
    if of_seconds:
        axes.set_ylabel("seconds of as many steps as published, without compiling")
    else:
        axes.set_ylabel("steps per second, all agents together")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def write(results: dict, out: Path) -> None:
    files.write(out / "gpu.md", page_of(results))
    if cells_of(results, "speed"):
        draw(results, out / "gpu_seconds.png", of_seconds=True)
        draw(results, out / "gpu_throughput.png", of_seconds=False)
