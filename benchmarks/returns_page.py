"""Write benchmarks/RESULTS.md and its figures from what benchmarks/returns.py measured.

returns.yaml has the rows, thresholds and published scores, returns_page.yaml the sentences. A row
is a dict, as it is kept in benchmarks/results/.
"""

import collections
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.special
import yaml
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onejit.base import statistics

MEASURED = ROOT / "benchmarks" / "results"
FIRST_SEED = 2000  # tuning uses seeds below 1000
PLANS_FILE = MEASURED / "plans.json"
PEERS_FILE = MEASURED / "peers.json"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
FIGURES = ROOT / "docs" / "figures"

DATA = yaml.safe_load((ROOT / "benchmarks" / "returns.yaml").read_text())
TEXT = yaml.safe_load((ROOT / "benchmarks" / "returns_page.yaml").read_text())

SCRIPTS = yaml.safe_load((ROOT / "tools" / "scripts.yaml").read_text())["scripts"]

# --- rows ---


def config_name(name: str) -> str:
    """SCRIPT/CONFIG of a row SCRIPT/CONFIG, SCRIPT/CONFIG@STEPS or SCRIPT/CONFIG+VARIANT."""
    return re.split(r"[@+]", name)[0]


def config_of(name: str) -> Path:
    """The file of a row's config, from the root of the repository."""
    return Path("configs", config_name(name) + ".yaml")


def file_of(name: str) -> Path:
    return MEASURED / f"{re.sub(r'[/@+]', '_', name)}.json"


# {row: seeds}. A row whose config is not there yet is none.
ROWS = {
    name: entry["seeds"]
    for name, entry in DATA["rows"].items()
    if (ROOT / config_of(name)).exists()
}

# Of a plan for a GPU: {row: its seeds and, if not the config's, its steps}.
PLANNED = DATA["planned"] | {name: {"seeds": ROWS[name]} for name in DATA["planned_too"]}


def read_rows() -> list[dict]:
    """All rows that were measured."""
    return [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*_*.json"))]


def tuning_of(row: dict) -> dict:
    """What was tried for the config of a row, and the base seeds of these trials."""
    return DATA["tuning"].get(config_name(row["row"]), {"tried": "not recorded", "seeds": []})


def read_plans() -> dict:
    return json.loads(PLANS_FILE.read_text()) if PLANS_FILE.exists() else {}


def not_measured() -> list[str]:
    """Rows that were not measured with this version, in the order in which they are measured."""
    return [name for name in ROWS if not file_of(name).exists()]


def by_environment(rows: list[dict]) -> dict:
    """`{environment: rows}`, in the order of ROWS."""
    order = list(ROWS)

    def place(row):
        return order.index(row["row"]) if row["row"] in ROWS else len(order)

    grouped = {}
    for row in sorted(rows, key=place):
        grouped.setdefault(row["environment"], []).append(row)
    return grouped


# --- returns and thresholds ---


def values_of(row: dict, kind: str) -> np.ndarray:
    """The returns of all seeds, -inf for one that diverged or ended no episode: [num_seeds]."""
    values = np.array(row[kind], dtype=float)  # None becomes NaN
    return np.where(np.isfinite(values), values, -np.inf)


def interval_of(row: dict, kind: str) -> tuple[list, str]:
    """The mean over the seeds that have a return, its 95 % interval, and the interval's kind."""
    return possible_interval(row, statistics.finite(values_of(row, kind)))


def possible_interval(row: dict, returns) -> tuple[list, str]:
    """The mean of returns of the row's environment, its 95 % interval, and the interval's kind."""
    lowest, highest = of_environment(DATA["possible"], row) or (None, None)
    return statistics.mean_interval(
        np.asarray(returns),
        lowest=-np.inf if lowest is None else lowest,
        highest=np.inf if highest is None else highest,
    )


MARKS = {"student": "", "bootstrap": " b", "cut": " c"}  # of intervals, explained on the page


def show_interval(row: dict, kind: str) -> str:
    interval, of_kind = interval_of(row, kind)
    return statistics.show(*interval) + MARKS[of_kind]


def of_environment(table: dict, row: dict):
    """The entry of a row's environment, or None."""
    environment = row["environment"]
    return table.get(environment, table.get(environment.partition(",")[0]))


def threshold_of(row: dict) -> float | None:
    """The return below which an agent has failed, or None.

    A fixed number, or half of the published score that the row is compared with (twice a cost).
    """
    entry = of_environment(DATA["thresholds"], row)
    if entry:
        return entry["return"]
    within, _ = comparable(row)
    if within is None:
        return None
    return within.score / 2 if within.score > 0 else within.score * 2


def too_short(row: dict) -> bool:
    """Whether few episodes end in the last 10 %: the final return then means little.

    An environment ends less than one, mean over all seeds.
    """
    return row["episodes_at_end"] < 1


def kinds(row: dict) -> tuple:
    """Which returns count, the one to quote first."""
    return ("greedy_return",) if too_short(row) else ("final_return", "greedy_return")


def count_failed(row: dict) -> int | None:
    """How many seeds reach the threshold with none of the returns that count.

    A seed that diverged or ended no episode has failed. None if there is no threshold.
    """
    threshold = threshold_of(row)
    if threshold is None:
        return None
    values = [values_of(row, kind) for kind in kinds(row)]
    failed = ~np.isfinite(values[0]) | (np.max(values, axis=0) < threshold)
    return int(failed.sum())


# --- published scores ---


class Published(NamedTuple):
    """A published score, as in returns.yaml."""

    score: float
    steps: int
    algorithm: str
    scripts: list[str]
    source: str
    std: float | None = None  # over seeds
    place: str = ""
    version: str = ""
    rules: str = ""
    seeds: int | None = None  # where they are not the source's

    def num_seeds(self) -> int | None:
        return self.seeds or DATA["sources"][self.source]["seeds"]

    def kind(self) -> str:
        """Of the return, as the row of a measurement names it."""
        return RETURNS_OF_A_KIND[DATA["sources"][self.source]["kind"]]

    def interval(self) -> tuple[float, float]:
        """The 95 % interval by Student's t, where the spread over seeds is published."""
        seeds = self.num_seeds()
        if self.std is None or seeds is None or seeds < 2:
            return self.score, self.score
        margin = scipy.special.stdtrit(seeds - 1, 0.975) * self.std / np.sqrt(seeds)
        return self.score - margin, self.score + margin

    def link(self) -> str:
        link = f"[{self.source}]({DATA['sources'][self.source]['url']}{self.place})"
        return f"{link}, {self.version}" if self.version else link

    def quote(self) -> str:
        low, high = self.interval()
        spread = ""
        if high > low:
            spread = f" ({statistics.show_number(low)} to {statistics.show_number(high)})"
        return f"{self.score:g}{spread} at {number(self.steps)}, {self.algorithm}, {self.link()}"


RETURNS_OF_A_KIND = {
    "training": "final_return",
    "greedy": "greedy_return",
    "highest": "highest_return",
}
WORDS = {
    "final_return": "training return",
    "greedy_return": "evaluation return",
    "highest_return": "best evaluation",
}
PUBLISHED = {
    environment: [Published(**entry) for entry in entries]
    for environment, entries in DATA["published"].items()
}


def number(steps) -> str:
    return f"{steps:.2g}".replace("e+0", "e")


def published_for(row: dict) -> list[Published]:
    scores = of_environment(PUBLISHED, row) or []
    return [score for score in scores if row["script"] in score.scripts]


def best(scores: list[Published]) -> Published | None:
    return max(scores, key=lambda published: published.score, default=None)


def comparable(row: dict) -> tuple:
    """The best published score of at most 1.1 times a row's steps, and of more; or None."""
    scores = [score for score in published_for(row) if not score.rules]
    limit = 1.1 * row["total_timesteps"]
    within = [score for score in scores if score.steps <= limit]
    beyond = [score for score in scores if score.steps > limit]
    return best(within), best(beyond)


def best_of_all(row: dict) -> Published | None:
    """The best score of any algorithm within 1.1 times the steps, if better than the row's own."""
    within, _ = comparable(row)
    scores = [score for score in PUBLISHED.get(row["environment"], []) if not score.rules]
    first = best([score for score in scores if score.steps <= 1.1 * row["total_timesteps"]])
    if first is None or (within is not None and first.score <= within.score):
        return None
    return first


def with_more_steps(row: dict) -> list[Published]:
    """A better score with more steps; of each source and algorithm one, if there is no other."""
    within, beyond = comparable(row)
    if beyond is None:
        return []
    if within is not None:
        return [beyond] if beyond.score > within.score else []
    found = {}
    for score in published_for(row):
        if not score.rules:
            key = (score.source, score.algorithm)
            found[key] = best([score, found.get(key, score)])
    return sorted(found.values(), key=lambda score: score.steps)


def show_published(row: dict) -> str:
    """The cell: a comparable score, the best of any algorithm, more steps, other rules."""
    within, _ = comparable(row)
    of_all = best_of_all(row)
    parts = []
    if within:
        parts.append(within.quote())
    if of_all:
        parts.append(f"{of_all.quote()}: another algorithm")
    parts += [f"{score.quote()}: more steps" for score in with_more_steps(row)]
    for score in published_for(row):
        if score.rules:
            parts.append(f"{score.quote()}: {score.rules}, not comparable")
    return "; ".join(parts)


def state(row: dict) -> str:
    """`above`, `undecided` or `below`: how a row compares with a published score at no more steps.

    Returns of the same kind are compared. If their intervals overlap, or the row has no returns of
    this kind, it is undecided. Empty if there is no such score.
    """
    within, _ = comparable(row)
    if within is None:
        return ""
    kind = within.kind()
    if kind not in row or (kind == "final_return" and too_short(row)):
        return "undecided"
    (mean, low, high), _ = interval_of(row, kind)
    if np.isnan(low):  # one seed
        low = high = mean
    published_low, published_high = within.interval()
    if low > published_high:
        return "above"
    if high < published_low:
        return "below"
    return "undecided"


# --- tables ---


def markdown(head: list[str], lines: list[list]) -> str:
    rows = [f"| {' | '.join(map(str, cells))} |" for cells in [head, *lines]]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])


def hardware(row: dict) -> str:
    """In a few words, which the section on machines says in full."""
    if " cpu" not in row["device"]:
        return row["device"].partition(",")[0]
    name = row["processor"].replace("(R)", "").replace("Processor", "").strip()
    return f"{name}, {row['device'].rpartition(', ')[2]}"


def cells_of(row: dict) -> dict[str, str]:
    """A row of the tables, {column: cell}."""
    final = values_of(row, "final_return")
    greedy = values_of(row, "greedy_return")
    failed = count_failed(row)
    lost = int((~np.isfinite(values_of(row, kinds(row)[0]))).sum())
    cells = {
        "row": f"[{row['row']}](../{config_of(row['row'])})",
        "steps": number(row["total_timesteps"]),
        "seeds": f"{len(final)}, {base_seed(row)}",
        "failed": "" if failed is None else str(failed),
        "training return": show_interval(row, "final_return"),
        "IQM": f"{statistics.interquartile_mean(final):.4g}",
        "worst": f"{final.min():.4g}",
        "evaluation return": show_interval(row, "greedy_return"),
        "evaluation IQM": f"{statistics.interquartile_mean(greedy):.4g}",
        "evaluation worst": f"{greedy.min():.4g}",
        "in Gymnasium": "",
        "state": state(row),
        "public": show_published(row),
        "tuning": show_tuning(row),
        "hardware": hardware(row),
        "minutes": minutes(row),
    }
    if state(row) == "below":
        cells["state"] = "**below**"
    if lost:
        cells["seeds"] += f", {lost} without a return"
    if too_short(row):
        cells |= {"training return": "too short", "IQM": "", "worst": ""}
    if "gymnasium_return" in row:
        cells["in Gymnasium"] = show_interval(row, "gymnasium_return")
    return cells


def minutes(row: dict) -> str:
    """From start to end, and of all cores; a training that was resumed does not know the latter."""
    spent = row["processor_seconds"]
    of_cores = "resumed" if spent is None else f"{spent / 60:.1f}"
    return f"{row['seconds'] / 60:.1f} ({of_cores})"


def base_seed(row: dict) -> str:
    """From which seed a row was measured, and how often it moved there from another one."""
    moves = len(row["earlier_seeds"])
    moved = f", moved {moves} times" if moves > 1 else ", moved once" if moves else ""
    return f"from {row['seed']}{moved}"


def show_tuning(row: dict) -> str:
    tuning = tuning_of(row)
    if not tuning["seeds"]:
        return tuning["tried"]
    return f"{tuning['tried']}; from seed {' and '.join(map(str, tuning['seeds']))}"


def table(rows: list[dict]) -> str:
    lines = [cells_of(row) for row in rows]
    return markdown(list(lines[0]), [list(cells.values()) for cells in lines])


def summary(rows: list[dict]) -> str:
    """A line for each row: the mean, how many agents failed, the published score."""
    lines = []
    for environment, of_it in by_environment(rows).items():
        for row in of_it:
            script = " ".join([row["script"], *row["row"].split("+")[1:]])
            lines.append([environment, script, *summary_of(row)])
            environment = ""  # stands once
    head = ["environment", "script", "steps", "return", "failed", "state"]
    return markdown(head, lines)


def summary_of(row: dict) -> list[str]:
    kind = kinds(row)[0]
    (mean, _, _), _ = interval_of(row, kind)
    mean = statistics.show_number(mean)
    if too_short(row):
        mean += ", evaluation"
    failed = count_failed(row)
    failed = "" if failed is None else f"{failed} of {len(row['final_return'])}"
    return [number(row["total_timesteps"]), mean, failed, state(row)]


def peers_table(peers: dict) -> str:
    """The returns of the peers' own code. `peers` is what returns_vs_peers.py wrote."""
    head = ["script", "environment", "steps", "seeds", "onejit", "peer", "peer's code"]
    lines = []
    for name, entry in peers.items():
        (_, ours), (peer, theirs) = entry["returns"].items()
        cells = [name.partition("_")[0], entry["environment"], number(entry["steps"]), len(ours)]
        for returns in (ours, theirs):
            interval, kind = possible_interval(entry, returns)
            mean = statistics.show(*interval) + MARKS[kind]
            cells.append(f"{mean}, {min(returns):.4g}")
        lines.append([*cells, peer])
    return markdown(head, lines)


def pairs_table(rows: list[dict]) -> str:
    """Two rows with one task and budget. Empty if none is measured.

    The interval of the difference is Welch's: between scripts, a seed has no common meaning.
    """
    head = ["first", "second", "return", "first, mean", "second, mean", "second minus first"]
    rows = {row["row"]: row for row in rows}
    lines = []
    for names in DATA["pairs"]:
        if not set(names) <= set(rows):
            continue
        pair = [rows[name] for name in names]
        for kind in kinds(pair[0]):
            means = [show_interval(row, kind) for row in pair]
            first, second = (statistics.finite(values_of(row, kind)) for row in pair)
            half = statistics.student_interval(second, -first)  # mean of both, so half of their sum
            difference = statistics.show(*[2 * value for value in half])
            lines.append([*names, WORDS[kind], *means, difference])
    return markdown(head, lines) if lines else ""


def show_older_code(rows: list[dict]) -> str:
    """A sentence about rows whose script has another initialization today, or nothing."""
    older = [row["row"] for row in rows if is_of_older_code(row)]
    return f"{', '.join(older)}: {TEXT['older_code'].strip()}" if older else ""


def is_of_older_code(row: dict) -> bool:
    return row["script"] in ("sac", "td3", "crossq") and row["started"] < "2026-11-28"


def sources_table(rows: list[dict]) -> str:
    """What the figures of the sources are that the tables quote."""
    quoted = " ".join(show_published(row) for row in rows)
    lines = [
        [name, source["is"]] for name, source in DATA["sources"].items() if f"[{name}]" in quoted
    ]
    return markdown(["source", "what its scores are"], lines)


def thresholds(rows: list[dict]) -> str:
    """Below which return an agent counts as failed, for the environments that were measured."""
    names = set()
    without = set()
    for row in rows:
        environment = row["environment"]
        names |= {environment, environment.partition(",")[0]}
        if threshold_of(row) is None:
            without.add(f"{environment} ({row['row']})")
    lines = [
        [environment, f"{entry['return']:g}", entry["source"]]
        for environment, entry in DATA["thresholds"].items()
        if environment in names
    ]
    parts = [
        TEXT["thresholds_intro"].strip(),
        markdown(["environment", "threshold", "where it comes from"], lines),
    ]
    if without:
        parts.append(f"These rows have no threshold: {'; '.join(sorted(without))}.")
    return "\n\n".join(parts)


def plans_table(plans: dict) -> str:
    """What is sized for a GPU. `plans` {row: what `returns.plan` gave}."""
    head = ["row", "seeds", "memory, GiB", "kernels", "bytes, TB", "minutes at least"]
    lines = []
    for name, planned in DATA["planned"].items():
        if name not in plans:
            continue
        plan = plans[name]
        longer = f", {planned['steps']} steps" if "steps" in planned else ""
        lines.append(
            [
                f"[{name}](../configs/{name}.yaml){longer}",
                planned["seeds"],
                f"{plan['memory'] / 2**30:.2g}",
                f"{plan['kernels'] / 1e6:.3g} M",
                f"{plan['bytes'] / 1e12:,.0f}",
                f"{plan['seconds'] / 60:.2g}",
            ]
        )
    return markdown(head, lines)


def not_measured_table(names: list[str]) -> str:
    """Rows with the hours that they may take."""
    lines = []
    for name in names:
        hours = DATA["rows"][name].get("hours", "")
        lines.append([f"[{name}](../{config_of(name)})", ROWS[name], hours])
    return markdown(["row", "seeds", "processor hours"], lines)


# --- figures ---


def draw(rows: list[dict], path: Path) -> None:
    """Training curves of an environment. Published scores are marks at the right border."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    rows = [row for row in rows if not has_longer_curve(row, rows)]
    budgets = [row["total_timesteps"] for row in rows]
    references = []  # (published score, color)
    rows_of_script = collections.Counter()  # so far
    for row in rows:
        script = row["script"]
        color = lighter(SCRIPTS[script]["color"], times=rows_of_script[script])
        rows_of_script[script] += 1
        curve = row["curve"]
        if row["settings"].get("staggered_resets"):  # the first episodes are shortened
            curve = {key: values[1:] for key, values in curve.items()}
        draw_curve(axes, curve, name_of_curve(row, rows), color)
        within, beyond = comparable(row)
        reference = within or beyond
        if reference and reference not in [score for score, _ in references]:
            references.append((reference, color))
    if max(budgets) > 1.5 * min(budgets):  # 499,968 and 500,000 are one budget
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 10k, 1M
    axes.xaxis.set_minor_formatter(NullFormatter())
    draw_published(axes, references)
    axes.set(title=rows[0]["environment"], xlabel="environment steps of an agent")
    axes.set_ylabel("training return")
    name_curves(figure, axes)
    figure.savefig(path, dpi=100)


def has_longer_curve(row: dict, rows: list[dict]) -> bool:
    """Whether the curve of a row with more steps is drawn in place of this row's.

    Both have the same config and seeds, and their script has no schedule over the training. They
    are two trainings, whose curves differ.
    """
    has_schedule = {"anneal_lr", "exploration_fraction"} & set(row["settings"])
    if has_schedule or "+" in row["row"]:
        return False
    return any(
        "+" not in other["row"]
        and config_of(other["row"]) == config_of(row["row"])
        and other["seed"] == row["seed"]
        and other["total_timesteps"] > row["total_timesteps"]
        for other in rows
    )


def name_of_curve(row: dict, rows: list[dict]) -> str:
    """The script and its variant in words, and the steps if another curve has the same name."""

    def name(of_row):
        variants = [part.replace("_", " ") for part in of_row["row"].split("+")[1:]]
        return ", ".join([of_row["script"], *variants])

    if sum(name(other) == name(row) for other in rows) == 1:
        return name(row)
    return f"{name(row)}, {number(row['total_timesteps'])} steps"


def lighter(color: str, times: int) -> tuple:
    """The color of another row of the same script: red, green and blue in [0, 1]."""
    return tuple(1.0 - 0.7**times * (1.0 - part) for part in to_rgb(color))


def draw_curve(axes, curve: dict, name: str, color: tuple) -> None:
    """Draw a curve with its interval."""
    axes.plot(curve["steps"], curve["return"], color=color, label=name)
    low, high = curve["low"], curve["high"]
    axes.fill_between(curve["steps"], low, high, color=color, alpha=0.15, linewidth=0)


def draw_published(axes, references: list[tuple]) -> None:
    """Mark scores at the right border. Marks of almost equal scores stand next to each other."""
    transform = axes.get_yaxis_transform()
    how = {"linestyle": "", "marker": "<", "markersize": 8, "clip_on": False}
    marks = []
    for score, color in sorted(references, key=lambda each: each[0].score):
        name = f"published: {score.algorithm}, {score.score:g} at {number(score.steps)}"
        how |= {"transform": transform, "color": color, "label": name}
        marks += axes.plot([1.01], [score.score], **how)
    axes.autoscale_view()
    bottom, top = axes.get_ylim()
    columns = []  # the height of the highest mark so far
    for mark in marks:
        height = (mark.get_ydata()[0] - bottom) / (top - bottom)
        free = [i for i, highest in enumerate(columns) if height - highest > 0.04]
        column = free[0] if free else len(columns)
        columns[column : column + 1] = [height]
        mark.set_xdata([1.01 + 0.022 * column])


def name_curves(figure, axes) -> None:
    """A legend at the right: the curves and then the marks, each from the highest down."""
    lines = [line for line in axes.get_lines() if len(line.get_ydata())]
    is_mark = {line: line.get_linestyle() == "None" for line in lines}
    lines.sort(key=lambda line: (is_mark[line], -line.get_ydata()[-1]))
    how = {"frameon": False, "fontsize": 9, "borderpad": 1.5, "labelcolor": "linecolor"}
    legend = figure.legend(handles=lines, loc="outside right upper", **how)
    for handle in legend.legend_handles:
        handle.set_linewidth(2.5)


def figure_name(environment: str) -> str:
    letters = [letter if letter.isalnum() else "_" for letter in environment.lower()]
    return f"results_{''.join(letters)}.png"


# --- the page ---


def page(rows: list[dict], plans: dict) -> str:
    """RESULTS.md from what was measured and planned."""
    parts = [TEXT["intro"], summary(rows), TEXT["reading"]]
    for environment, of_it in by_environment(rows).items():
        parts += [f"## {environment}", table(of_it)]
        parts += [line for line in [show_older_code(of_it)] if line]
        for remarks in (DATA["notes"], DATA["below"]):
            for row in of_it:
                if row["row"] in remarks:
                    parts.append(f"{row['row']}: {remarks[row['row']]}")
        parts.append(
            f"![return over steps on {environment}](../docs/figures/{figure_name(environment)})"
        )
    if PEERS_FILE.exists():
        peers = json.loads(PEERS_FILE.read_text())
        parts += ["## The peers' own code", TEXT["with_peers"], peers_table(peers)]
    pairs = pairs_table(rows)
    if pairs:
        parts += ["## Differences between two rows", TEXT["pairs"], pairs]
    parts += ["## Thresholds", thresholds(rows)]
    parts += ["## Sources of published scores", TEXT["sources_intro"], sources_table(rows)]
    machines = {f"- {row['processor']}, {row['device']}: {versions(row)}" for row in rows}
    parts += ["## Machines and versions", "\n".join(sorted(machines))]
    if plans:
        title = "## Sized for a GPU: planned, not measured"
        parts += [title, TEXT["plans"], plans_table(plans)]
    missing = not_measured()
    if missing:
        parts += ["## To be measured", TEXT["not_measured"], not_measured_table(missing)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def versions(row: dict) -> str:
    return ", ".join(f"{name} {row['versions'][name]}" for name in ("jax", "gymnax", "brax"))


def cost(row: dict, total_timesteps: float) -> str:
    """What a row took, as the comment of its config with `total_timesteps` says it.

    Empty if its memory is not known, or if its training was resumed: its process may have been
    paused.
    """
    if "peak_memory" not in row or row["processor_seconds"] is None:
        return ""
    devices, _, cores = row["device"].rpartition(", ")
    count, platform = devices.split(" x ")
    seeds = f"{len(row['final_return'])} seeds"
    if row["settings"]["total_timesteps"] != total_timesteps:
        seeds += f" with {number(row['total_timesteps'])} steps"
    if platform != "cpu":  # peak_memory is the host's, not the GPU's
        return f"# {seeds} took {show_minutes(row['seconds'])} on {count} {platform}."
    if row["processor_seconds"] < 0.7 * row["seconds"]:  # other programs had the cores
        spent = show_minutes(row["processor_seconds"])
        size = float(f"{row['peak_memory'] / 2**30:.2g}")
        return f"# {seeds} took {spent} of a core ({row['processor']}) and {size:g} GiB."
    count = min(int(count), int(cores.split()[0]))  # a device may have no core of its own
    cores = f"{count} core{'s' if count != 1 else ''} ({row['processor']})"
    return f"# {seeds} took {show_cost(row['seconds'], row['peak_memory'])} on {cores}."


def planned_cost(name: str, plans: dict) -> str:
    """What a config would take on a GPU, as its comment says it. Empty if it was not planned."""
    if name not in plans:
        return ""
    plan = plans[name]
    planned = PLANNED[name]
    steps = f", {planned['steps']} steps" if "steps" in planned else ""
    least = show_cost(plan["seconds"], plan["memory"])
    return f"# Planned for {planned['seeds']} seeds{steps} on one H100, not measured: {least}."


def show_cost(seconds: float, size: float) -> str:
    """Minutes and GiB, with two digits each. `size` in bytes."""
    return f"{show_minutes(seconds)} and {float(f'{size / 2**30:.2g}'):g} GiB"


def show_minutes(seconds: float) -> str:
    return f"{float(f'{seconds / 60:.2g}'):g} min"


def update_config(text: str, costs: list[str]) -> str:
    """A config with these lines in its comment, before the row of its results if it names one."""
    lines = text.splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if not re.match(r"# (\d+ seeds (with \S+ steps )?took |Planned for )", line)
    ]
    ends = [line.startswith("# Results") or not line.startswith("#") for line in kept]
    place = ends.index(True)
    kept[place:place] = [f"{line}\n" for line in costs if line]
    return "".join(kept)


def update_configs(rows: list[dict], plans: dict) -> dict[Path, str]:
    """The files of configs with what their training takes, `{path: text}`."""
    measured = {row["row"]: row for row in rows}
    result = {}
    for name in [*ROWS, *plans]:
        path = ROOT / config_of(name)
        name = config_name(name)  # what more steps took is on the page
        text = path.read_text()
        costs = [planned_cost(name, plans)]
        if name in measured:
            row = measured[name]
            by_default = row["settings"]["total_timesteps"]
            total_timesteps = yaml.safe_load(text).get("total_timesteps", by_default)
            costs.insert(0, cost(row, float(total_timesteps)))
        result[path] = update_config(text, costs)
    return result


def render() -> None:
    """Write RESULTS.md, its figures, the costs in configs, and the numbers of the guide."""
    rows = read_rows()
    for path, config in update_configs(rows, read_plans()).items():
        path.write_text(config)
    for environment, of_it in by_environment(rows).items():
        draw(of_it, FIGURES / figure_name(environment))
    PAGE.write_text(page(rows, read_plans()))
