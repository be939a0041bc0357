"""The results of population-based training, and of the replay of a schedule."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from onejit.base import statistics
from onejit.base.files import write, write_picture
from onejit.base.text import align, as_csv, plural
from onejit.run.record import now, write_record
from onejit.script.configs import task_of, write_config
from onejit.script.steps import steps_of, timesteps_until
from onejit.sweep import pictures
from onejit.sweep.options import required
from onejit.sweep.population import EVALUATION, OF_POPULATION, exchange_of, number_of_runs
from onejit.sweep.request import Request, float_names
from onejit.sweep.results import write_run
from onejit.sweep.slice_files import delete_slices, finished_slices, read_agents, read_slice
from onejit.sweep.values import show_value


class Populations(NamedTuple):
    """What all populations have done. S is the number of stretches between exchanges."""

    schedule: dict  # {field: [populations, agents, S]}
    parent: np.ndarray  # an agent's number in the stretch before: [populations, agents, S]
    returns: np.ndarray  # -inf if not finite, NaN without an episode: [populations, agents, S]
    rank: np.ndarray  # 1 for the best agent of a population: [populations, agents, S]
    metrics: dict  # {name: [populations, agents, updates]}
    evaluation: np.ndarray  # greedy returns: [populations, agents, episodes]
    agents: dict  # {name: [populations, agents, ...]}
    diverged: np.ndarray  # [populations, agents]


def collect(request: Request) -> tuple[dict, dict]:
    """All arrays of all slices, and the agents: `{name: [runs, ...]}`. Raises OSError."""
    parts = [read_slice(file) for file in finished_slices(request.run_dir, 0)]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return arrays, read_agents(request.run_dir, 0, range(number_of_runs(request)))


def read_populations(request: Request) -> Populations:
    """Raises OSError."""
    arrays, agents = collect(request)
    diverged = statistics.diverged(unflatten_dict(agents, sep="."))
    size = request.options.samples

    def by_population(values):
        return values.reshape(-1, size, *values.shape[1:])

    arrays = {name: by_population(values) for name, values in arrays.items()}
    schedule = {}
    for name in float_names(request):
        schedule[name] = arrays[f"{OF_POPULATION}schedule.{name}"]
    metrics = {}
    for name, values in arrays.items():
        if name != EVALUATION and not name.startswith(OF_POPULATION):
            metrics[name] = values
    return Populations(
        schedule=schedule,
        parent=arrays[OF_POPULATION + "parent"],
        returns=arrays[OF_POPULATION + "return"],
        rank=arrays[OF_POPULATION + "rank"],
        metrics=metrics,
        evaluation=arrays[EVALUATION],
        agents={name: by_population(values) for name, values in agents.items()},
        diverged=by_population(diverged),
    )


# --- who is the best, and where it comes from ---


def best_agents(populations: Populations) -> np.ndarray:
    """The best agent of each population by its last return: [populations]."""
    return populations.rank[:, :, -1].argmin(axis=1)


def winner(populations: Populations) -> tuple[int, int]:
    """The population and the agent with the best last return."""
    best = best_agents(populations)
    last = populations.returns[np.arange(len(best)), best, -1]
    population = int(np.where(np.isfinite(last), last, -np.inf).argmax())
    return population, int(best[population])


def lineage(parent: np.ndarray, agent: int) -> np.ndarray:
    """The agent in each stretch from whose state `agent` descends: [S]. `parent` is [agents, S]."""
    agents = [agent]
    for stretch in range(parent.shape[1] - 1, 0, -1):
        agents.append(int(parent[agents[-1], stretch]))
    return np.array(agents[::-1])


def along_lineage(populations: Populations, best, interval: int) -> dict:
    """Metrics of the agents `best` and those they descend from: `{name: [populations, updates]}`.

    An agent that copies another one gets its weights, and not its past.
    """
    followed = {}
    for name, values in populations.metrics.items():
        rows = []
        for population, agent in enumerate(best):
            ancestors = lineage(populations.parent[population], agent)
            agents = np.repeat(ancestors, interval)[: values.shape[-1]]
            rows.append(values[population, agents, np.arange(len(agents))])
        followed[name] = np.stack(rows)
    return followed


def shortest(value) -> float:
    """The shortest number that is the same in 32 bits."""
    return float(str(np.float32(value)))


def schedule_of(populations: Populations, population: int, agent: int) -> dict[str, list[float]]:
    """The floats of an agent's lineage in each stretch."""
    agents = lineage(populations.parent[population], agent)
    stretches = np.arange(len(agents))
    schedule = {}
    for name, values in populations.schedule.items():
        schedule[name] = [shortest(value) for value in values[population, agents, stretches]]
    return schedule


# --- tables ---


def greedy_returns(populations: Populations) -> np.ndarray:
    """The mean greedy return of each agent, -inf if it has diverged: [populations, agents]."""
    return np.where(populations.diverged, -np.inf, populations.evaluation.mean(axis=2))


def make_table(populations: Populations) -> list[str]:
    """A row for each population, with its best agent."""
    titles = ["return", "greedy return", "mean of all", "worst", "agents"]
    rows = [["population", "best agent", *populations.schedule, *titles]]
    greedy = greedy_returns(populations)
    for population, agent in enumerate(best_agents(populations)):
        of_all = greedy[population]
        finite = statistics.finite(of_all)
        values = [values[population, agent, -1] for values in populations.schedule.values()]
        row = [
            str(population),
            str(agent),
            *[show_value(float(value)) for value in values],
            f"{populations.returns[population, agent, -1]:.4g}",
            f"{of_all[agent]:.4g}",
            f"{finite.mean():.4g}",
            f"{finite.min():.4g}",
            statistics.count_finite(of_all),
        ]
        rows.append(row)
    return align(rows).split("\n")


def summarize(populations: Populations) -> tuple[list[str], dict]:
    """Lines below the table, and the same numbers for run.json.

    Agents of a population are relatives, so the intervals are over populations.
    """
    greedy = greedy_returns(populations)
    best = greedy[np.arange(len(greedy)), best_agents(populations)]
    means = np.array([statistics.finite(of_all).mean() for of_all in greedy])
    worst = float(statistics.finite(greedy).min())
    episodes = populations.evaluation.shape[2]
    number = plural(len(greedy), "population")
    lines = []
    record = {}
    for name, values in {"all agents": means, "best agents": best}.items():
        mean, low, high = statistics.student_interval(values)
        lines.append(f"greedy return of {name}: mean {statistics.show(mean, low, high)}, {number}")
        numbers = {"mean": mean, "low": low, "high": high}
        record[name] = {
            key: float(value) if np.isfinite(value) else None for key, value in numbers.items()
        }
        record[name]["of_populations"] = [float(v) if np.isfinite(v) else None for v in values]
    lines[0] += f", worst agent {worst:.4g}"
    record["worst"] = worst if np.isfinite(worst) else None
    lost = int(populations.diverged.sum())
    if lost:
        lines.append(f"{plural(lost, 'agent')} diverged, and no mean contains them")
    record["diverged"] = lost
    lines.append(
        "The column return is biased: it is the best of many, by which the best agent was chosen. "
        f"The greedy returns are of {episodes} fresh episodes of each agent."
    )
    return lines, record


def make_schedule_csv(request: Request, populations: Populations) -> str:
    """A row for each population, stretch and agent."""
    names = list(populations.schedule)
    of_stretch = ["population", "agent", "first_update", "last_update", "parent"]
    rows = [[*of_stretch, *names, "return", "rank"]]
    interval = required(request.options.exploit_interval)
    number, size, stretches = populations.rank.shape
    for population in range(number):
        for stretch in range(stretches):
            for agent in range(size):
                at = (population, agent, stretch)
                values = [populations.schedule[name][at] for name in names]
                of_agent = [populations.returns[at], populations.rank[at]]
                updates = [stretch * interval, (stretch + 1) * interval]
                parent = populations.parent[at]
                rows.append([population, agent, *updates, parent, *values, *of_agent])
    return as_csv(rows)


def make_csv(populations: Populations) -> str:
    """A row for each population and agent, at the end of training."""
    names = list(populations.schedule)
    rows = [["population", "agent", *names, "return", "rank", "greedy_return", "diverged"]]
    greedy = greedy_returns(populations)
    number, size, _ = populations.rank.shape
    for population in range(number):
        for agent in range(size):
            at = (population, agent)
            values = [populations.schedule[name][at][-1] for name in names]
            of_end = [populations.returns[at][-1], populations.rank[at][-1]]
            of_agent = [*of_end, greedy[at], bool(populations.diverged[at])]
            rows.append([*at, *values, *of_agent])
    return as_csv(rows)


# --- files ---


def write_population(request: Request) -> bool:
    """Write and show the results of `--pbt`, and delete the files of single slices.

    Returns whether an agent is left that has not diverged. Raises OSError.
    """
    run_dir = request.run_dir
    populations = read_populations(request)
    population, agent = winner(populations)
    is_any_finite = bool(np.isfinite(populations.returns[population, agent, -1]))
    lines, numbers = summarize(populations)
    of_agents = {name: v.reshape(-1, v.shape[-1]) for name, v in populations.metrics.items()}
    few = statistics.few_episodes(of_agents, request.config)
    lines += statistics.warning_of_few(few, "agents")
    write(run_dir / "results.csv", make_csv(populations))
    write(run_dir / "schedule.csv", make_schedule_csv(request, populations))
    write(run_dir / "table.txt", "\n".join([*make_table(populations), "", *lines]) + "\n")

    last = {name: values[population, agent, -1] for name, values in populations.schedule.items()}
    config = with_floats(request, last)
    if is_any_finite:
        write_config(run_dir / "best.yaml", config)
    best = best_agents(populations)

    def of_best(values):
        return values[np.arange(len(best)), best]

    shutil.rmtree(run_dir / "agents", ignore_errors=True)  # of an earlier attempt
    trained = {
        "metrics": along_lineage(populations, best, required(request.options.exploit_interval)),
        "agent": unflatten_dict(
            {name: of_best(values) for name, values in populations.agents.items()}, sep="."
        ),
        "evaluation": of_best(populations.evaluation),
    }
    trained["final_return"] = statistics.final_return(trained["metrics"])
    write_run(request, "best", config, {"population": "the best agents"}, trained)

    metrics = dict(populations.metrics)
    metrics["warmup_timesteps"] = getattr(config, "warmup_timesteps", 0)
    metrics["steps_per_update"] = steps_of(config)
    write(run_dir / "metrics.npz", partial(np.savez_compressed, **metrics))
    save_evaluation = partial(np.save, arr=populations.evaluation)
    write(run_dir / "evaluation.npy", save_evaluation)
    write_pictures(request, populations, population, agent)

    record = request.record
    record.greedy_return = numbers
    record.winner = {"population": population, "agent": agent}
    record.schedule = schedule_of(populations, population, agent)
    record.finished = now()
    write_record(run_dir, record)
    delete_slices(run_dir)
    print((run_dir / "table.txt").read_text(), end="")
    print(f"results in {run_dir}")
    return not populations.diverged.all()


def with_floats(request: Request, floats: dict):
    """The config with other floats."""
    return dataclasses.replace(request.config, **{k: shortest(v) for k, v in floats.items()})


def write_pictures(request: Request, populations: Populations, population: int, agent: int):
    """A picture of the winner's population. Raises OSError."""
    config = request.config
    exchange = exchange_of(request)
    ends = [
        timesteps_until(config, exchange.interval * (i + 1)) for i in range(exchange.num_stretches)
    ]
    begins = [timesteps_until(config, 0), *ends[:-1]]
    script_name = Path(request.script.__file__).stem
    task = task_of(request.record.settings)
    title = f"{script_name} on {task}, population {population}, the best of {len(populations.rank)}"
    draw = partial(
        pictures.draw_population,
        title,
        begins=np.array(begins),
        ends=np.array(ends),
        returns=populations.returns[population],
        schedule={name: values[population] for name, values in populations.schedule.items()},
        distributions=exchange.distributions,
        ancestors=lineage(populations.parent[population], agent),
    )
    write_picture(request.run_dir / "population.png", draw)


def write_replay(request: Request) -> bool:
    """Write and show the results of `--replay`, and delete the files of single slices.

    Returns whether an agent is left that has not diverged. Raises OSError.
    """
    run_dir = request.run_dir
    arrays, agents = collect(request)
    evaluation = arrays.pop(EVALUATION)
    metrics = {name: v for name, v in arrays.items() if not name.startswith(OF_POPULATION)}
    schedule = request.record.replay["schedule"]
    interval = required(request.options.exploit_interval)
    rows = [["first_update", "last_update", *schedule]]
    for stretch, values in enumerate(zip(*schedule.values(), strict=True)):
        rows.append([stretch * interval, (stretch + 1) * interval, *values])
    write(run_dir / "schedule.csv", as_csv(rows))

    shutil.rmtree(run_dir / "agents", ignore_errors=True)  # of an earlier attempt
    last = {name: values[-1] for name, values in schedule.items()}
    agent = unflatten_dict(agents, sep=".")
    trained = {"metrics": metrics, "agent": agent, "evaluation": evaluation}
    trained["final_return"] = statistics.final_return(metrics)
    about = {"population": f"a replay of the schedule {schedule}"}
    written = write_run(request, "replay", with_floats(request, last), about, trained)
    request.record.final_return = written.final_return
    request.record.greedy_return = written.greedy_return
    request.record.finished = now()
    write_record(run_dir, request.record)
    delete_slices(run_dir)
    lost = statistics.diverged(agent)
    final = statistics.summarize(statistics.final_return(metrics), lost)
    greedy = statistics.summarize(evaluation.mean(axis=1), lost)
    lines = [*final.lines("training return"), *greedy.lines("evaluation return")]
    print("\n".join([*lines, f"results in {run_dir}"]))
    return not lost.all()


def write_results(request: Request) -> bool:
    """Write and show all results. Returns whether an agent is left that has not diverged."""
    if request.record.is_replay:
        return write_replay(request)
    return write_population(request)
