"""Compare the speed of apex_dqn.py's prioritized replay with flashbax's and with plain sums.

    pip install --target deps --no-deps flashbax
    PYTHONPATH=deps python benchmarks/prioritized_replay.py --seeds 1 16

A cycle is what one update of Ape-X asks of a replay: write the transitions of 128 actors, draw 128
by priority, write new priorities for these. A transition is CartPole's, 11 numbers. Some hundreds
of cycles run in one jitted scan over a full replay whose memory is donated; shown is the median
time of a cycle. flashbax gives what is new the highest priority so far, the other two are told one.
Cumulative sums are what a few lines of code can do without a tree.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import apex_dqn

BATCH, OBS_DIM, ALPHA, BETA = 128, 4, 0.6, 0.4


def made(key):
    """What actors and learner make in a cycle: transitions and two batches of errors."""
    numbers = jax.random.normal(key, (2 * OBS_DIM + 5, 1, BATCH))
    obs, next_obs = (
        jnp.moveaxis(x, 0, -1) for x in (numbers[:OBS_DIM], numbers[OBS_DIM : 2 * OBS_DIM])
    )
    rest = dict(zip(("action", "return", "discount"), numbers[2 * OBS_DIM :], strict=False))
    return rest | {"obs": obs, "next_obs": next_obs}, *numbers[-2:, 0]


def onejit_cycle(size):
    shape = size // BATCH, 1, BATCH
    replay = {name: jnp.zeros(shape) for name in ("return", "discount")} | {
        "action": jnp.zeros(shape, jnp.int32)
    }
    replay |= {name: jnp.zeros((*shape, OBS_DIM)) for name in ("obs", "next_obs")}
    tree = apex_dqn.set_priorities(apex_dqn.init_sum_tree(size), jnp.arange(size), jnp.ones(size))
    state = replay, tree, jnp.asarray(size // BATCH)

    def cycle(state, key):
        (replay, tree, count), (transitions, error, new_error) = state, made(key)
        replay = apex_dqn.add_to_replay(replay, transitions, count)
        index = count % len(replay["obs"]) * BATCH + jnp.arange(BATCH)
        tree = apex_dqn.set_priorities(tree, index, apex_dqn.priority_of(error, ALPHA))
        batch = apex_dqn.sample_replay(key, replay, tree, size, BATCH, BETA)
        tree = apex_dqn.set_priorities(
            tree, batch.pop("index"), apex_dqn.priority_of(new_error, ALPHA)
        )
        return (replay, tree, count + 1), digest(batch)

    return state, cycle


def cumulative_cycle(size):
    """The same without a tree: O(N) additions for each batch."""
    ring = jnp.zeros((size, OBS_DIM))
    state = (ring, ring, jnp.zeros((size, 3))), jnp.ones(size), jnp.asarray(size)

    def cycle(state, key):
        (rings, priority, count), (transitions, error, new_error) = state, made(key)
        rest = jnp.stack([transitions[name] for name in ("action", "return", "discount")], axis=-1)
        index = (count + jnp.arange(BATCH)) % size
        rows = transitions["obs"][0], transitions["next_obs"][0], rest[0]
        rings = tuple(ring.at[index].set(new) for ring, new in zip(rings, rows, strict=True))
        priority = priority.at[index].set(apex_dqn.priority_of(error, ALPHA))
        upto = jnp.cumsum(priority)
        mass = (jnp.arange(BATCH) + jax.random.uniform(key, (BATCH,))) / BATCH * upto[-1]
        drawn = jnp.minimum(jnp.searchsorted(upto, mass, side="right"), size - 1)
        weight = apex_dqn.importance_weights(priority[drawn] / upto[-1], size, BETA)
        priority = priority.at[drawn].set(apex_dqn.priority_of(new_error, ALPHA))
        return (rings, priority, count + BATCH), digest([weight, *(ring[drawn] for ring in rings)])

    return state, cycle


def flashbax_cycle(size):
    import flashbax

    buffer = flashbax.make_prioritised_item_buffer(
        size, 1, BATCH, add_batches=True, priority_exponent=ALPHA, device=jax.devices()[0].platform
    )
    item = {"obs": jnp.zeros(OBS_DIM), "next_obs": jnp.zeros(OBS_DIM), "rest": jnp.zeros(3)}
    state = buffer.init(item)
    filled = jax.tree.map(lambda leaf: jnp.zeros((BATCH, *leaf.shape)), item)
    fill = jax.jit(
        lambda state: jax.lax.fori_loop(0, size // BATCH, lambda _, s: buffer.add(s, filled), state)
    )
    state = fill(state)

    def cycle(state, key):
        transitions, _, new_error = made(key)
        rest = jnp.stack([transitions[name] for name in ("action", "return", "discount")], axis=-1)[
            0
        ]
        items = {"obs": transitions["obs"][0], "next_obs": transitions["next_obs"][0], "rest": rest}
        state = buffer.add(state, items)
        batch = buffer.sample(state, key)
        weight = apex_dqn.importance_weights(batch.probabilities, size, BETA)
        state = buffer.set_priorities(state, batch.indices, jnp.abs(new_error) + 1e-6)
        return state, digest([weight, batch.experience])

    return state, cycle


def digest(batch):
    """A number that depends on all of what was drawn, so that none of it is optimized away."""
    return sum(leaf.sum() for leaf in jax.tree.leaves(batch))


def microseconds(make, size, seeds, cycles, repeats):
    state, cycle = make(size)

    def run_cycles(state, key):
        return jax.lax.scan(cycle, state, jax.random.split(key, cycles))

    if seeds > 1:
        state = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], seeds, axis=0), state)
        run_cycles = jax.vmap(run_cycles)
    run = jax.jit(run_cycles, donate_argnums=0)
    state = jax.tree.map(jnp.copy, state)  # a leaf that occurs twice cannot be donated
    taken = []
    for repeat in range(repeats + 1):  # the first compiles
        key = jax.random.key(repeat)
        key = jax.block_until_ready(jax.random.split(key, seeds) if seeds > 1 else key)
        begun = time.perf_counter()
        state, _ = jax.block_until_ready(run(state, key))
        taken.append((time.perf_counter() - begun) / cycles)
    return 1e6 * np.median(taken[1:])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2**14, 2**17, 2**20], help=f"multiples of {BATCH}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--fanout", type=int, nargs="+", default=[apex_dqn.FANOUT], help="of the tree"
    )
    parser.add_argument(
        "--cycles", type=int, default=0, help="per measurement; by default 2000 over the seeds"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], choices=("flashbax", "cumulative"))
    args = parser.parse_args()
    print(
        f"{os.cpu_count()} cores of {jax.devices()[0].platform}, jax {jax.__version__}", flush=True
    )
    for seeds in args.seeds:
        for size in args.sizes:
            cycles = args.cycles or max(50, 2000 // seeds)
            measure = partial(
                microseconds, size=size, seeds=seeds, cycles=cycles, repeats=args.repeats
            )
            shown = {}
            for fanout in args.fanout:
                apex_dqn.FANOUT = fanout
                shown[f"sum tree (fan-out {fanout})"] = measure(onejit_cycle)
            if "flashbax" not in args.without:
                shown["flashbax"] = measure(flashbax_cycle)
            if "cumulative" not in args.without:
                shown["cumulative sums"] = measure(cumulative_cycle)
            times = ", ".join(f"{name} {time:,.0f} us" for name, time in shown.items())
            print(f"{size} items, {seeds} seed(s), a cycle: {times}", flush=True)


if __name__ == "__main__":
    main()
