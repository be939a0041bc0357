"""The exchange of population-based training, on the devices.

Jaderberg et al. 2017 (arXiv 1711.09846), with truncation selection. The axis of runs holds the
agents of one or several populations, one population after the other. A worst quarter of a
population copies agents of its best quarter, and changes their floats.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from onejit.engine.compilation import Program
from onejit.engine.loop import episode_fields, holds, running_episodes
from onejit.engine.memory import program_bytes
from onejit.sweep.values import from_uniform

FACTORS = (0.8, 1.25)
REDRAWN = 0.25  # probability that a float is drawn again
KEY = 2**31 + 2  # what the key of exchanges is folded from: no training uses it
# fields of runner states that belong to the replay, for `--keep-replay`
OF_REPLAY = ("replay", "tree", "max_priority", "rollout_count")


class Exchange(NamedTuple):
    """How a population exchanges."""

    size: int  # agents of a population
    interval: int  # updates from one exchange to the next one
    num_stretches: int  # stretches of so many updates
    distributions: dict[str, tuple[str, float, float]]  # {field: (kind, low, high)}
    keeps_replay: bool


# --- ranks ---


def return_before(population, stretch, size: int):
    """The return [runs] of an agent, or of the parent it has copied, in the stretch before.

    NaN if there was none.
    """
    runs = jnp.arange(len(population["parent"]))
    ancestor = runs // size * size + population["parent"][:, stretch]
    before = population["return"][ancestor, stretch - 1]
    return jnp.where((stretch > 0) & jnp.isfinite(before), before, jnp.nan)


def judge(carry, done, exchange: Exchange):
    """`(returns, level)`, both [runs], of the stretch of updates before `done`.

    A return is the mean over the episodes that ended, and over long running ones. Without any it is
    the return of the stretch before. The level is 2 for agents with a return, 1 if no episode has
    ended (the return is NaN), and 0 if a loss or a parameter is not finite.
    """
    interval = exchange.interval

    def in_stretch(values):
        return jax.lax.dynamic_slice_in_dim(values, done - interval, interval, axis=1)

    metrics = {name: in_stretch(values) for name, values in carry["metrics"].items()}
    episodes = metrics["episodes"]
    totals = jnp.where(episodes > 0, episodes * metrics["episodic_return"], 0.0)
    total_running, num_running = running_episodes(carry["runner_state"])
    number = episodes.sum(axis=1) + num_running
    before = return_before(carry["population"], done // interval - 1, exchange.size)
    returns = jnp.where(number > 0, (totals.sum(axis=1) + total_running) / number, before)

    is_finite = ~jnp.isinf(returns)
    for name, values in metrics.items():
        if name.endswith("loss"):
            is_finite &= jnp.isfinite(values).all(axis=1)
    for leaf in jax.tree.leaves(carry["runner_state"].agent):
        is_finite &= jnp.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
    level = jnp.where(is_finite, jnp.where(jnp.isnan(returns), 1, 2), 0)
    return returns, level


def sort_agents(returns, level):
    """Agents of each population, best first: [populations, size]."""
    comparable = jnp.where(level == 2, returns, 0.0)
    return jnp.lexsort((-comparable, -level), axis=-1)


# --- copies ---


def choose_parents(key, order, level):
    """`(children, parents)`, both [size // 4]: agents that are replaced, and by whom.

    Parents are random members of the best quarter that have a return. Without any there is nothing
    to choose by, and children are their own parents.
    """
    number = len(order) // 4
    best = order[:number]
    children = order[-number:]
    num_parents = (level[best] == 2).sum()  # they come first
    chosen = jax.random.randint(key, (number,), 0, jnp.maximum(num_parents, 1))
    return children, jnp.where(num_parents > 0, best[chosen], children)


def copy_rows(tree, children, parents):
    """Rows `parents` [n] of all arrays replace the rows `children` [n].

    Agents keep their random keys, or they would explore alike.
    """

    def copied(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or not leaf.size:
            return leaf
        return leaf.at[children].set(leaf[parents])

    return jax.tree.map(copied, tree)


def own_fields(runner_state, keeps_replay: bool) -> tuple[str, ...]:
    """The fields of the runner state that each agent keeps.

    Episodes outside of JAX cannot be copied. The replay goes on with the episodes it comes from.
    """
    from onejit.envs.host.batch import HostState  # not at the top: it starts JAX

    of_episodes = episode_fields(runner_state)
    if keeps_replay:
        return *of_episodes, *(name for name in OF_REPLAY if hasattr(runner_state, name))
    return of_episodes if holds(runner_state, HostState) else ()


# --- floats ---


def perturb(key, values, kind: str, low: float, high: float):
    """Multiply values by 0.8 or 1.25 on the scale of their distribution, or draw them again."""
    redraw_key, value_key, factor_key = jax.random.split(key, 3)
    is_up = jax.random.bernoulli(factor_key, shape=values.shape)
    factor = jnp.where(is_up, FACTORS[1], FACTORS[0])
    is_mirrored = kind == "one-minus-log-uniform"
    changed = 1.0 - (1.0 - values) * factor if is_mirrored else values * factor
    drawn = from_uniform(kind, low, high, jax.random.uniform(value_key, values.shape))
    is_redrawn = jax.random.bernoulli(redraw_key, REDRAWN, values.shape)
    return jnp.clip(jnp.where(is_redrawn, drawn, changed), low, high)


def change_floats(distributions: dict, key, floats: dict) -> dict:
    """New values of `floats` {field: [n]}, which children have copied."""
    changed = {}
    for index, (name, distribution) in enumerate(distributions.items()):
        changed[name] = perturb(jax.random.fold_in(key, index), floats[name], *distribution)
    return changed


# --- the exchange ---


def first_population(exchange: Exchange, floats, key_data):
    """What a carry remembers of its populations: the floats, and all that has happened.

    The arrays are [runs], and [runs, stretches] of the schedule. A parent is an agent's number in
    its population. A rank of 0 means that it is not known yet.
    """
    runs = len(key_data)
    shape = (runs, exchange.num_stretches)

    def first_column(values, rest):
        return jnp.full(shape, rest, values.dtype).at[:, 0].set(values)

    schedule = {name: first_column(values, jnp.nan) for name, values in floats.items()}
    return {
        "floats": floats,
        "key": key_data,
        "schedule": schedule,
        "parent": first_column(jnp.arange(runs, dtype=jnp.int32) % exchange.size, -1),
        "return": jnp.full(shape, jnp.nan),
        "rank": jnp.zeros(shape, jnp.int32),
    }


def keys_of_exchange(exchange: Exchange, key_data, stretch):
    """A key for the parents and one for the floats, both [populations]."""
    keys = jax.random.wrap_key_data(key_data[:: exchange.size])

    def split_key(key):
        return jax.random.split(jax.random.fold_in(jax.random.fold_in(key, KEY), stretch))

    return jax.vmap(split_key)(keys).T


def copy_agents(exchange: Exchange, runner_state, child_runs, parent_runs):
    """The runner state after children have become copies of their parents."""
    names = own_fields(runner_state, exchange.keeps_replay)
    kept = {name: getattr(runner_state, name) for name in names}
    without_kept = runner_state._replace(**dict.fromkeys(kept))
    return copy_rows(without_kept, child_runs, parent_runs)._replace(**kept)


def copy_floats(exchange: Exchange, keys, floats: dict, child_runs, parent_runs) -> dict:
    """The floats [runs] after the exchange: a child copies its parent's floats and changes them.

    `keys` are [populations]. A child that is its own parent keeps its floats.
    """
    of_parents = {name: values[parent_runs] for name, values in floats.items()}
    by_population = {name: values.reshape(len(keys), -1) for name, values in of_parents.items()}
    changed = jax.vmap(partial(change_floats, exchange.distributions))(keys, by_population)
    is_replaced = child_runs != parent_runs
    after = {}
    for name, values in floats.items():
        new = jnp.where(is_replaced, changed[name].reshape(-1), of_parents[name])
        after[name] = values.at[child_runs].set(new)
    return after


def note_ranks(population: dict, stretch, returns, level, rank) -> dict:
    """The population's record with the returns and ranks [runs] of a stretch."""
    noted = jnp.where(level == 0, -jnp.inf, returns)
    return population | {
        "return": population["return"].at[:, stretch].set(noted),
        "rank": population["rank"].at[:, stretch].set(rank),
    }


def note_next_stretch(population: dict, stretch, parent, floats: dict) -> dict:
    """The population's record with the parents and floats [runs] that a stretch begins with.

    After the last stretch there is none, and nothing is written.
    """
    schedule = {}
    for name, values in population["schedule"].items():
        schedule[name] = values.at[:, stretch].set(floats[name], mode="drop")
    return population | {
        "floats": floats,
        "parent": population["parent"].at[:, stretch].set(parent, mode="drop"),
        "schedule": schedule,
    }


def exchange_agents(exchange: Exchange, carry, done):
    """The carry after an exchange. At the end of training, only the ranks are noted."""
    population = carry["population"]
    stretch = done // exchange.interval - 1
    is_end = stretch == exchange.num_stretches - 1

    returns, level = judge(carry, done, exchange)
    levels = level.reshape(-1, exchange.size)  # [populations, size]
    order = sort_agents(returns.reshape(-1, exchange.size), levels)
    rank = 1 + jnp.argsort(order, axis=1).astype(jnp.int32)

    parent_keys, float_keys = keys_of_exchange(exchange, population["key"], stretch)
    children, parents = jax.vmap(choose_parents)(parent_keys, order, levels)
    parents = jnp.where(is_end, children, parents)
    first = exchange.size * jnp.arange(len(order))[:, None]  # number of a population's first run
    child_runs = (first + children).reshape(-1)
    parent_runs = (first + parents).reshape(-1)

    runner_state = copy_agents(exchange, carry["runner_state"], child_runs, parent_runs)
    floats = copy_floats(exchange, float_keys, population["floats"], child_runs, parent_runs)
    parent = jnp.arange(len(returns), dtype=jnp.int32) % exchange.size
    parent = parent.at[child_runs].set(parents.reshape(-1).astype(jnp.int32))

    population = note_ranks(population, stretch, returns, level, rank.reshape(-1))
    population = note_next_stretch(population, stretch + 1, parent, floats)
    return {**carry, "runner_state": runner_state, "population": population}


def follow_schedule(schedule: dict, interval: int, carry, done):
    """The carry with the floats of the next stretch of a `schedule` {field: [stretches]}."""
    floats = {}
    for name, values in carry["population"]["floats"].items():
        next_value = jnp.asarray(schedule[name], values.dtype)[done // interval]
        floats[name] = jnp.full_like(values, next_value)
    return {**carry, "population": {**carry["population"], "floats": floats}}


# --- the program ---


def add_exchange(program: Program, names, interval: int, first, exchange) -> Program:
    """The program with an `exchange(carry, done) -> carry` after every `interval` updates.

    `first(floats, key_data)` is what the carry remembers at the start, under "population". `names`
    are the fields in `floats`.
    """
    first = jax.jit(first, out_shardings=program.sharding)

    def start(floats, key_data):
        carry = program.start(floats, key_data)
        carry["population"] = first(floats, key_data)
        return carry

    abstract = dict(program.abstract)
    axis = program.axis
    abstract["population"] = first.eval_shape(axis.floats(names), axis.key_data())
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract["population"])]
    exchange = jax.jit(exchange, donate_argnums=0, out_shardings=program.sharding)
    exchange = exchange.lower(abstract, 0).compile()
    return program._replace(
        start=start,
        abstract=abstract,
        bytes=max(program.bytes, program_bytes(exchange)),
        held=program.held + sum(sizes) // axis.num_devices,
        exchange=exchange,
        exchange_interval=interval,
    )
