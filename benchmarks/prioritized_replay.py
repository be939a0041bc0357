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

BATCH = 128
OBS_DIM = 4
ALPHA = 0.6
BETA = 0.4


def draw_transitions(key) -> apex_dqn.Transition:
    """What 128 actors would have made in a cycle: leaves [1, BATCH, ...]."""
    obs_key, next_obs_key, key = jax.random.split(key, 3)
    action, reward = jax.random.normal(key, (2, 1, BATCH))
    return apex_dqn.Transition(
        obs=jax.random.normal(obs_key, (1, BATCH, OBS_DIM)),
        action=action.astype(jnp.int32),
        rewards=reward[..., None],
        length=jnp.ones((1, BATCH), jnp.int32),
        next_obs=jax.random.normal(next_obs_key, (1, BATCH, OBS_DIM)),
        terminated=jnp.zeros((1, BATCH), bool),
    )


def draw_priorities(key):
    return apex_dqn.priority_of(jax.random.normal(key, (BATCH,)), ALPHA)


def onejit_cycle(size):
    rollouts = size // BATCH
    empty = jax.eval_shape(draw_transitions, jax.random.key(0))
    replay = jax.tree.map(lambda leaf: jnp.zeros((rollouts, *leaf.shape), leaf.dtype), empty)
    tree = apex_dqn.set_priorities(apex_dqn.init_sum_tree(size), jnp.arange(size), jnp.ones(size))

    def cycle(state, key):
        replay, tree, count = state
        transitions_key, priority_key, sample_key, new_priority_key = jax.random.split(key, 4)
        replay = apex_dqn.add_rollout(replay, draw_transitions(transitions_key), count)
        new = count % rollouts * BATCH + jnp.arange(BATCH)
        tree = apex_dqn.set_priorities(tree, new, draw_priorities(priority_key))
        batch, index, weight = apex_dqn.sample(sample_key, replay, tree, size, BATCH, BETA)
        tree = apex_dqn.set_priorities(tree, index, draw_priorities(new_priority_key))
        return (replay, tree, count + 1), digest([batch, weight])

    return (replay, tree, jnp.asarray(rollouts)), cycle


def cumulative_cycle(size):
    """The same without a tree: O(N) additions for a batch."""
    empty = jax.eval_shape(draw_transitions, jax.random.key(0))
    replay = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape[2:]), leaf.dtype), empty)

    def cycle(state, key):
        replay, priority, count = state
        transitions_key, priority_key, sample_key, new_priority_key = jax.random.split(key, 4)
        new = (count + jnp.arange(BATCH)) % size
        transitions = draw_transitions(transitions_key)
        replay = jax.tree.map(lambda ring, x: ring.at[new].set(x[0]), replay, transitions)
        priority = priority.at[new].set(draw_priorities(priority_key))

        sums = jnp.cumsum(priority)
        part = jnp.arange(BATCH) + jax.random.uniform(sample_key, (BATCH,))
        index = jnp.searchsorted(sums, part / BATCH * sums[-1], side="right")
        index = jnp.minimum(index, size - 1)
        weight = apex_dqn.importance_weights(priority[index] / sums[-1], size, BETA)
        batch = jax.tree.map(lambda ring: ring[index], replay)
        priority = priority.at[index].set(draw_priorities(new_priority_key))
        return (replay, priority, count + BATCH), digest([batch, weight])

    return (replay, jnp.ones(size), jnp.asarray(size)), cycle


def flashbax_cycle(size):
    import flashbax

    buffer = flashbax.make_prioritised_item_buffer(
        size, 1, BATCH, add_batches=True, priority_exponent=ALPHA, device=jax.devices()[0].platform
    )
    empty = jax.eval_shape(draw_transitions, jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), empty)  # [BATCH, ...]

    @jax.jit
    def fill(state):
        return jax.lax.fori_loop(0, size // BATCH, lambda _, state: buffer.add(state, zeros), state)

    state = fill(buffer.init(jax.tree.map(lambda leaf: leaf[0], zeros)))

    def cycle(state, key):
        transitions_key, sample_key, error_key = jax.random.split(key, 3)
        transitions = jax.tree.map(lambda x: x[0], draw_transitions(transitions_key))
        state = buffer.add(state, transitions)
        batch = buffer.sample(state, sample_key)
        weight = apex_dqn.importance_weights(batch.probabilities, size, BETA)
        error = jax.random.normal(error_key, (BATCH,))
        state = buffer.set_priorities(state, batch.indices, jnp.abs(error) + 1e-6)
        return state, digest([batch.experience, weight])

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
