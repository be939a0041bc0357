"""FlashSAC: statistics of each pass, projection, categorical target, scaled rewards, held noise.

What it shares with SAC, tests/scripts/test_sac_td3.py tests there.
"""

import dataclasses
import functools
import math

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load, save
from support.compilation import jit_quickly
from support.networks import random_agent
from support.probe import learn
from support.trees import arrays, assert_same

import flashsac
from onejit.engine.evaluation import policy_of


def small_config(**settings):
    config = flashsac.Config(
        env_name="ProbeContinuous",
        env_params={"kinds": "cut"},
        num_envs=2,
        gradient_steps=4,
        policy_delay=2,
        batch_size=8,
        lr=0.03,
        noise_exponent=0.0,
        hidden_size=4,
        critic_hidden_size=5,
        num_atoms=7,
        learning_starts=31,
        buffer_size=100,
    )
    return dataclasses.replace(config, **settings)


@functools.cache
def learner(**settings):
    """`init` and `update` of two agents."""
    return [jit_quickly(jax.vmap(f)) for f in flashsac.make_learner(small_config(**settings))]


@functools.cache
def trained_states(num_updates, **settings):
    """The states of two agents."""
    init, update = learner(**settings)
    states = init(jax.random.split(jax.random.key(0), 2))
    for _ in range(num_updates):
        states, _ = update(states)
    return states


@jit_quickly
def first(states):
    return jax.tree.map(lambda leaf: leaf[0], states)


def trained_state(num_updates, **settings):
    return first(trained_states(num_updates, **settings))


def closures(function) -> dict:
    """The functions that `init` or `update` of a learner calls, by their names."""
    names = function.__code__.co_freevars
    return {
        name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)
    }


def nested(update, *names):
    """A closure of `make_learner` that `update` reaches through the others."""
    for name in names:
        update = closures(update)[name]
    return update


# --- statistics of batch normalization ---


def test_running_statistics_against_numpy():
    """Of data far from 0, where E[x^2] - E[x]^2 would have no correct digit."""

    class Layer(flashsac.nn.Module):
        @flashsac.nn.compact
        def __call__(self, x, training):
            return flashsac.batch_norm(training)(x)

    layer = Layer()
    batches = np.random.default_rng(0).normal(1e3, 1.0, size=(5, 64, 2)).astype(np.float32)

    @jit_quickly
    def passes(batches):
        variables = layer.init(jax.random.key(0), batches[0], training=True)
        outputs = []
        for x in batches:
            y, changed = layer.apply(variables, x, training=True, mutable=["batch_stats"])
            variables = variables | changed
            outputs.append(y)
        evaluated = layer.apply(variables, batches[-1], training=False)
        return outputs, evaluated, variables["batch_stats"]["BatchNorm_0"]

    outputs, evaluated, stats = passes(batches)
    mean, var = np.zeros(2), np.ones(2)
    for x, y in zip(batches, outputs, strict=True):
        expected = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5)
        np.testing.assert_allclose(y, expected, atol=1e-3)
        mean = 0.99 * mean + 0.01 * x.mean(axis=0)
        var = 0.99 * var + 0.01 * x.var(axis=0)
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(stats["var"], var, rtol=1e-4)
    np.testing.assert_allclose(evaluated, (x - mean) / np.sqrt(var + 1e-5), rtol=1e-4)


def random_batch(batch_size=8, seed=0):
    rng = np.random.default_rng(seed)
    return flashsac.Transition(
        obs=rng.normal(size=(batch_size, 5)).astype(np.float32),
        action=rng.uniform(-1, 1, size=(batch_size, 1)).astype(np.float32),
        reward=rng.normal(size=batch_size).astype(np.float32),
        next_obs=rng.normal(2.0, 3.0, size=(batch_size, 5)).astype(np.float32),
        terminated=rng.random(batch_size) < 0.3,
    )


def test_joint_pass_equals_two_passes_with_frozen_statistics():
    """In training it does not: its statistics are those of both halves."""
    config = small_config()
    _, critic = flashsac.make_networks(config, *flashsac.make_env(config))
    batch = random_batch()

    @functools.partial(jit_quickly, static_argnums=0)
    def logits(training):
        """Of one pass of both halves, and of a pass of each."""
        variables = critic.init(jax.random.key(2), batch.obs, batch.action, training=True)
        apply = functools.partial(critic.apply, training=training, mutable=["batch_stats"])
        halves = [(batch.obs, batch.action), (batch.next_obs, batch.action)]
        both = map(np.concatenate, zip(*halves, strict=True))
        apart = [apply(variables, *half)[0][0] for half in halves]
        return apply(variables, *both)[0][0], jnp.concatenate(apart)

    for training in (False, True):
        same = np.allclose(*logits(training), rtol=1e-4, atol=1e-5)
        assert same == (not training)


def changed_statistics(state, name):
    def change(stats):
        return jax.tree.map(lambda x: 1.5 * np.asarray(x) + 0.5, stats)

    return state._replace(batch_stats=state.batch_stats | {name: change(state.batch_stats[name])})


@jit_quickly
def losses(state, batch):
    """The losses of the critics and of the actor, with the statistics that they change."""
    _, update = flashsac.make_learner(small_config())
    critic_loss = nested(update, "gradient_step", "critic_step", "critic_loss_fn")
    actor_loss = nested(update, "gradient_step", "actor_step", "actor_loss_fn")
    key = jax.random.key(3)
    return (
        critic_loss(state.params["critics"], state, batch, key),
        actor_loss(state.params["actor"], state, batch, key),
    )


@pytest.mark.slow
def test_which_loss_reads_which_running_statistics():
    """Critics normalize by the batch in their own loss, by running statistics in the actor's."""
    state = trained_state(1)
    batch = random_batch()
    (critic_loss, _), (actor_loss, _) = losses(state, batch)
    (with_critics, _), (actor_with_critics, _) = losses(changed_statistics(state, "critics"), batch)
    np.testing.assert_allclose(with_critics, critic_loss, rtol=1e-6)
    assert abs(actor_with_critics - actor_loss) > 1e-4
    (with_actor, _), (actor_with_actor, _) = losses(changed_statistics(state, "actor"), batch)
    np.testing.assert_allclose(actor_with_actor, actor_loss, rtol=1e-6)
    assert abs(with_actor - critic_loss) > 1e-6  # by another action in s'


def test_the_actors_statistics_are_of_both_halves_and_its_loss_of_the_first():
    state = trained_state(1)
    batch = random_batch()
    _, (loss, (stats, _)) = losses(state, batch)
    rows = np.concatenate([batch.obs, batch.next_obs])
    before = state.batch_stats["actor"]["ResNet_0"]["BatchNorm_0"]["mean"]
    expected = 0.99 * np.asarray(before) + 0.01 * rows.mean(axis=0)
    after = stats["ResNet_0"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-6)

    # The same rows of s' in another order change nothing; s in another order only the noise.
    other = batch._replace(next_obs=batch.next_obs[::-1])
    _, (again, _) = losses(state, other)
    np.testing.assert_allclose(again, loss, rtol=1e-4, atol=1e-5)


def moves(before, after) -> bool:
    return any((a != b).any() for a, b in zip(arrays(before), arrays(after), strict=True))


@pytest.mark.slow
def test_statistics_change_in_the_networks_own_step_alone():
    """Not in `init`, in the warm-up, by acting, or by the other network's step."""
    state = trained_state(0)
    for path, leaf in flatten_dict(state.batch_stats).items():
        assert (leaf == (path[-1] == "var")).all()

    _, update = flashsac.make_learner(small_config())
    act = nested(update, "act_with_noise")
    collect = jit_quickly(nested(update, "collect"), static_argnums=(2, 3))
    collected, _ = collect(state, jax.random.key(1), act, 4)
    assert_same(collected.batch_stats, state.batch_stats)
    batch = random_batch()
    actor_step = jit_quickly(nested(update, "gradient_step", "actor_step"))
    stepped, _ = actor_step(state, batch, jax.random.key(2))
    assert_same(stepped.batch_stats["critics"], state.batch_stats["critics"])
    assert moves(stepped.batch_stats["actor"], state.batch_stats["actor"])
    critic_step = jit_quickly(nested(update, "gradient_step", "critic_step"))
    stepped, _ = critic_step(state, (batch, jax.random.key(2)))
    assert_same(stepped.batch_stats["actor"], state.batch_stats["actor"])
    assert moves(stepped.batch_stats["critics"], state.batch_stats["critics"])


def test_how_often_statistics_change():
    """A mean that starts at 0 keeps .99 in each pass: constant observations count the passes."""
    state = trained_state(2)
    for name, passes in {"actor": 2 * 2, "critics": 2 * 4}.items():
        mean = np.asarray(state.batch_stats[name]["ResNet_0"]["BatchNorm_0"]["mean"])
        np.testing.assert_allclose(mean[..., 1], 1 - 0.99**passes, rtol=1e-4)  # of the ones


# --- projection ---


def check_projected(params):
    """Each layer, of any number of agents and critics."""
    layers = {}
    for path, leaf in flatten_dict(params).items():
        layers.setdefault(path[:-1], {})[path[-1]] = np.asarray(leaf)
    assert layers
    for layer in layers.values():
        if "kernel" in layer:
            np.testing.assert_allclose(np.linalg.norm(layer["kernel"], axis=-2), 1.0, rtol=1e-5)
        else:
            squares = sum(np.square(x).sum(axis=-1) for x in layer.values())
            np.testing.assert_allclose(squares, layer["scale"].shape[-1], rtol=1e-5)


def test_networks_are_projected_and_targets_are_not():
    """After `init` and after updates, for each critic of each of two agents."""
    state = trained_states(0)
    check_projected(state.params["actor"])
    check_projected(state.params["critics"])
    assert_same(state.target_params, state.params["critics"])
    state = trained_states(1)
    check_projected(state.params["actor"])
    check_projected(state.params["critics"])
    with pytest.raises(AssertionError):
        check_projected(state.target_params)


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "Block_0": {
            "Dense_0": {"kernel": rng.normal(size=(2, 4, 3)), "bias": rng.normal(size=(2, 3))},
            "BatchNorm_0": {"scale": rng.normal(size=(2, 3)), "bias": rng.normal(size=(2, 3))},
        },
        "RMSNorm_0": {"scale": rng.normal(size=(2, 5))},
    }
    return jax.tree.map(np.float32, params)


def test_projection():
    """Biases of linear layers stay, directions stay, and a second projection changes nothing."""
    params = random_params()
    project = jit_quickly(flashsac.project_params)
    new = jax.device_get(project(params))
    check_projected(new)
    dense, old_dense = new["Block_0"]["Dense_0"], params["Block_0"]["Dense_0"]
    np.testing.assert_array_equal(dense["bias"], old_dense["bias"])
    ratio = dense["kernel"] / old_dense["kernel"]
    np.testing.assert_allclose(ratio, ratio[:, :1] * np.ones((1, 4, 1)), rtol=1e-5)
    norm, old_norm = new["Block_0"]["BatchNorm_0"], params["Block_0"]["BatchNorm_0"]
    ratio = norm["scale"] / old_norm["scale"]
    np.testing.assert_allclose(norm["bias"] / old_norm["bias"], ratio, rtol=1e-5)
    again = project(new)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(new), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_kernel_before_batch_normalization_has_no_scale():
    config = small_config()
    actor, _ = flashsac.make_networks(config, *flashsac.make_env(config))
    obs = 5.0 * random_batch().obs

    def rescale(path, leaf):
        name = jax.tree_util.keystr(path)
        return 2.0 * leaf if "Block_0" in name and "kernel" in name else leaf

    @jit_quickly
    def means():
        variables = actor.init(jax.random.key(2), obs, training=True)

        def mean(params):
            new = variables | {"params": params}
            return actor.apply(new, obs, training=True, mutable=["batch_stats"])[0].loc

        rescaled = jax.tree_util.tree_map_with_path(rescale, variables["params"])
        return mean(rescaled), mean(variables["params"])

    np.testing.assert_allclose(*means(), atol=1e-3)


# --- categorical target ---


def loop_target(reward, terminated, next_logits, next_log_prob, limit, num_atoms, alpha, gamma):
    atoms = np.linspace(-limit, limit, num_atoms)
    target = np.zeros((len(reward), num_atoms))
    for b in range(len(reward)):
        probability = np.exp(next_logits[:, b])
        probability /= probability.sum(axis=-1, keepdims=True)
        means = probability @ atoms
        probability = probability[0 if means[0] <= means[1] else 1]
        for j in range(num_atoms):
            value = reward[b]
            if not terminated[b]:
                value += gamma * (atoms[j] - alpha * next_log_prob[b])
            place = (min(max(value, -limit), limit) + limit) / (2 * limit) * (num_atoms - 1)
            low, high = math.floor(place), math.ceil(place)
            if low == high:
                target[b, low] += probability[j]
            else:
                target[b, low] += (high - place) * probability[j]
                target[b, high] += (place - low) * probability[j]
    return target


@functools.partial(jit_quickly, static_argnums=5)
def script_target(reward, terminated, next_logits, next_log_prob, limit, num_atoms, alpha, gamma):
    support = flashsac.atoms(limit, num_atoms)
    values, probability = flashsac.bellman_target(
        reward,
        terminated,
        next_logits=next_logits,
        next_q=(jax.nn.softmax(next_logits) * support).sum(axis=-1),
        next_log_prob=next_log_prob,
        support=support,
        ent_coef=alpha,
        gamma=gamma,
    )
    return flashsac.project(values, probability, support)


def test_target_against_a_loop():
    """Rewards on atoms, between them, at the ends and beyond them."""
    rng = np.random.default_rng(0)
    size, num_atoms, limit = 60, 11, 2.0
    reward = np.concatenate([rng.normal(size=50), [0.0, 0.4, 2.0, -2.0, 7.0, -7.0, 1, 1, 1, 1]])
    terminated = np.concatenate([rng.random(50) < 0.3, np.ones(6, bool), np.zeros(4, bool)])
    arguments = (
        reward,
        terminated,
        rng.normal(size=(2, size, num_atoms)),
        rng.normal(size=size),
        limit,
        num_atoms,
        0.3,
        0.9,
    )
    target = np.asarray(script_target(*arguments))
    np.testing.assert_allclose(target, loop_target(*arguments), atol=2e-5)
    np.testing.assert_allclose(target.sum(axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(target[50, 5], 1.0, atol=1e-5)  # reward 0, on an atom
    np.testing.assert_allclose(target[51, 6], 1.0, atol=1e-5)
    np.testing.assert_allclose(target[52:56] @ np.linspace(-2, 2, 11), [2, -2, 2, -2], atol=1e-5)


def test_mean_of_the_target():
    """r + gamma (Q - alpha log pi), as long as all atoms with probability stay inside."""
    num_atoms, limit = 21, 5.0
    next_logits = np.full((2, 3, num_atoms), -100.0)
    next_logits[0, :, 8:13] = np.random.default_rng(0).normal(size=(3, 5))
    next_logits[1, :, 14:16] = 0.0  # a higher mean: never taken
    reward, log_prob = np.array([0.1, -0.3, 0.7]), np.array([0.5, -1.0, 2.0])
    target = script_target(
        reward, np.zeros(3, bool), next_logits, log_prob, limit, num_atoms, 0.2, 0.9
    )
    atoms = np.linspace(-limit, limit, num_atoms)
    mean = np.asarray(target) @ atoms
    probability = np.exp(next_logits[0])
    q = probability @ atoms / probability.sum(axis=-1)
    np.testing.assert_allclose(mean, reward + 0.9 * (q - 0.2 * log_prob), rtol=1e-4)


def test_the_critic_of_the_lower_mean_is_taken_whole():
    """Not the lower probability of each atom; the first one where both means agree."""
    logits = np.full((2, 3, 5), -100.0)
    logits[0, 0, [0, 4]] = 0.0  # mean 0
    logits[1, 0, 3] = 0.0  # mean 1
    logits[0, 1, 3] = 0.0
    logits[1, 1, [0, 4]] = 0.0
    logits[0, 2, 2] = 0.0  # both means are 0
    logits[1, 2, [1, 3]] = 0.0
    target = script_target(np.zeros(3), np.zeros(3, bool), logits, np.zeros(3), 2.0, 5, 0.3, 1.0)
    expected = [[0.5, 0, 0, 0, 0.5], [0.5, 0, 0, 0, 0.5], [0, 0, 1, 0, 0]]
    np.testing.assert_allclose(target, expected, atol=1e-6)


def test_critic_loss_is_a_mean_over_critics_and_batch():
    logits = np.random.default_rng(0).normal(size=(2, 6, 5)).astype(np.float32)
    target = np.random.default_rng(1).dirichlet(np.ones(5), size=6)
    log_probability = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -(target * log_probability).sum(axis=-1).mean()
    loss = jit_quickly(flashsac.critic_loss)(logits, target)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_target_entropy_against_distrax():
    entropy = jit_quickly(flashsac.gaussian_entropy)
    expected = jit_quickly(lambda std: distrax.Normal(0.0, std).entropy())(0.15)
    np.testing.assert_allclose(entropy(0.15), expected, rtol=1e-5)
    np.testing.assert_allclose(entropy(0.15), -0.478, atol=1e-3)
    assert np.isfinite(entropy(0.0))


# --- scale of rewards ---


def test_divisor_of_rewards():
    """The standard deviation of discounted returns, or what brings the largest to the limit."""

    @jit_quickly
    def divisor(var, largest):
        statistics = flashsac.RunningMeanStd(jnp.float32(7.0), var, jnp.float32(10.0))
        return flashsac.reward_divisor(statistics, largest, 5.0)

    np.testing.assert_allclose(divisor(4.0, 3.0), 2.0, rtol=1e-5)
    np.testing.assert_allclose(divisor(4.0, 50.0), 10.0, rtol=1e-5)
    assert divisor(0.0, 0.0) > 0


@pytest.mark.slow
def test_statistics_of_returns_against_numpy():
    """Of streams of several environments. R begins anew after termination and truncation."""
    for kinds, length in (("ends", 3), ("cut", 4)):
        env_params = flashsac.FrozenDict({"kinds": kinds, "max_steps_in_episode": 4})
        settings = {"env_name": "ProbeContinuous", "env_params": env_params}
        settings |= {"num_envs": 3, "num_steps": 2, "gamma": 0.8}
        state = trained_state(3, **settings)
        config = small_config(**settings)
        steps = int(state.rollout_count) * 2
        assert steps == 2 * (config.warmup_rollouts + 3)
        reward = np.asarray(state.replay.reward).reshape(-1, 3)[:steps]  # nothing is overwritten
        assert set(np.unique(reward)) <= {-1.0, 1.0}  # as they were
        running = np.zeros(3)
        returns = []
        for step in range(steps):
            running = 0.8 * running + reward[step]
            returns.append(running)
            if step % length == length - 1:
                running = np.zeros(3)
        np.testing.assert_allclose(state.discounted_return, running, rtol=1e-5)
        np.testing.assert_allclose(state.largest_return, np.abs(returns).max(), rtol=1e-5)
        np.testing.assert_allclose(state.return_statistics.mean, np.mean(returns), atol=1e-3)
        np.testing.assert_allclose(state.return_statistics.var, np.var(returns), rtol=1e-2)


def test_batches_are_scaled_when_they_are_drawn():
    """The replay keeps rewards as they are, and the same batch is scaled anew later."""
    key = jax.random.key(5)

    def batches(**settings):
        _, update = flashsac.make_learner(small_config(**settings))
        return jit_quickly(nested(update, "gradient_step", "make_batch"))

    make_batch = batches()
    state = trained_state(2)
    statistics = jax.device_get(state.return_statistics)
    reward = np.asarray(make_batch(state, key).reward)
    divisor = jit_quickly(flashsac.reward_divisor)(statistics, state.largest_return, 5.0).item()
    larger = state._replace(largest_return=5.0 * 4.0 * divisor)
    np.testing.assert_allclose(make_batch(larger, key).reward, reward / 4.0)

    tenfold = state._replace(
        replay=state.replay._replace(reward=10.0 * np.asarray(state.replay.reward)),
        largest_return=10.0 * np.asarray(state.largest_return),
        return_statistics=statistics._replace(
            mean=10.0 * statistics.mean, var=100.0 * statistics.var
        ),
    )
    np.testing.assert_allclose(make_batch(tenfold, key).reward, reward, rtol=1e-5)

    raw = batches(normalize_reward=False)(state, key)
    np.testing.assert_allclose(raw.reward, reward * divisor, rtol=1e-5)


# --- exploration noise ---


def test_how_long_noise_is_held():
    @functools.partial(jit_quickly, static_argnums=(0, 1))
    def sample(number, max_steps):
        keys = jax.random.split(jax.random.key(0), number)
        return jax.vmap(lambda key: flashsac.sample_noise_steps(key, max_steps, 2.0))(keys)

    steps = np.asarray(sample(100_000, 16))
    expected = np.arange(1, 17) ** -2.0
    expected /= expected.sum()
    share = np.bincount(steps, minlength=17)[1:] / len(steps)
    np.testing.assert_allclose(share, expected, atol=0.006)
    np.testing.assert_allclose([expected[0], steps.mean()], [0.631, 2.13], atol=0.03)
    assert (np.asarray(sample(100, 1)) == 1).all()


@functools.cache
def held_noise():
    """The noise that an actor is given in a rollout, [100, 300, action_dim]."""
    settings = {"num_envs": 300, "num_steps": 100, "buffer_size": 30_000}
    settings |= {"noise_exponent": 0.5, "learning_starts": 0, "total_timesteps": 30_000}
    init, update = flashsac.make_learner(small_config(**settings))
    collect = nested(update, "collect")

    @jit_quickly
    def run(key):
        def act(state, obs, noise):
            return noise / 100.0  # not clipped by the environment

        state, _ = collect(init(key), key, act, max_noise_steps=4)
        return 100.0 * state.replay.action[0]

    return np.asarray(run(jax.random.key(0)))


def test_noise_is_renewed_in_all_environments_together():
    noise = held_noise()
    renewed = (np.diff(noise, axis=0) != 0).all(axis=(1, 2))
    held = (np.diff(noise, axis=0) == 0).all(axis=(1, 2))
    assert (renewed | held).all() and held.any()
    lengths = np.diff(np.flatnonzero(np.concatenate([[True], renewed])))
    assert set(lengths) == {1, 2, 3, 4}


def test_variance_of_noise():
    np.testing.assert_allclose(held_noise().mean(), 0.0, atol=0.05)
    np.testing.assert_allclose(held_noise().std(), 1.0, atol=0.05)


def test_actions_of_the_warm_up_are_new_in_each_step():
    state = trained_state(0)
    action = np.asarray(state.replay.action)[: small_config().warmup_rollouts, 0]
    assert (np.diff(action, axis=0) != 0).all() and int(state.noise_steps_left) == 0


# --- order of the steps ---


def test_the_actor_moves_before_the_critics_of_its_group():
    """By the critics as they were; the critics' target knows the new actor."""
    _, update = flashsac.make_learner(small_config())
    gradient_step = closures(update)["gradient_step"]
    actor_step = closures(gradient_step)["actor_step"]
    critic_step = closures(gradient_step)["critic_step"]
    make_batch = closures(gradient_step)["make_batch"]

    @jit_quickly
    def both_ways(state):
        keys = jax.random.split(jax.random.key(7), 5)
        batch_keys, action_key, critic_keys = keys[:2], keys[2], keys[3:]
        expected, _ = actor_step(state, make_batch(state, batch_keys[0]), action_key)
        for batch_key, critic_key in zip(batch_keys, critic_keys, strict=True):
            batch = make_batch(state, batch_key)
            expected, _ = critic_step(expected, (batch, critic_key))
        actual, _ = gradient_step(state, (batch_keys, action_key, critic_keys))
        return actual.params, expected.params

    actual, expected = both_ways(trained_state(1))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_rates_of_the_optimizers():
    """The critics end at lr_end_fraction, the actor, with half as many steps, above it."""
    counts = {name: int(x[0].count) for name, x in trained_state(2).opt_state.items()}
    assert counts == {"critics": 8, "actor": 4, "log_ent_coef": 4}


# --- policies and refusals ---


def test_saved_agent_played_in_numpy():
    """From the arrays of a file: tanh of the mean, by the running statistics."""
    config = small_config(num_blocks=2)
    flat = random_agent(flashsac, config)
    arrays = load(save(flat))

    def norm(x, path):
        path = f"actor.ResNet_0.{path}"
        std = np.sqrt(arrays[f"batch_stats.{path}.var"] + 1e-5)
        x = (x - arrays[f"batch_stats.{path}.mean"]) / std
        return x * arrays[f"params.{path}.scale"] + arrays[f"params.{path}.bias"]

    def kernel(path):
        return arrays[f"params.actor.ResNet_0.{path}.kernel"]

    obs = np.random.default_rng(1).normal(size=(20, 5)).astype(np.float32)
    x = norm(obs, "BatchNorm_0") @ kernel("Dense_0")
    for block in ("Block_0", "Block_1"):
        y = np.maximum(norm(x @ kernel(f"{block}.Dense_0"), f"{block}.BatchNorm_0"), 0.0)
        x = x + np.maximum(norm(y @ kernel(f"{block}.Dense_1"), f"{block}.BatchNorm_1"), 0.0)
    x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-6)
    x = x * arrays["params.actor.ResNet_0.RMSNorm_0.scale"]
    outputs = x @ kernel("Dense_1") + arrays["params.actor.ResNet_0.Dense_1.bias"]
    start, act = policy_of(flashsac, config)
    actual = jit_quickly(act)(unflatten_dict(flat, sep="."), start(), obs)[0]
    np.testing.assert_allclose(actual, np.tanh(outputs[:, :1]), rtol=1e-4, atol=1e-5)


# --- training ---


@pytest.mark.slow
def test_values_that_the_critics_cannot_represent_are_reported():
    """Scaled to the largest return of short episodes, bootstrapped values are beyond the limit."""
    learned = learn("flashsac", 400, kinds="cut", normalize_reward=True, value_limit=2.5)
    assert learned.metrics["outside_support"][-1] > 0.2
    learned = learn("flashsac", 400, kinds="cut")
    assert learned.metrics["outside_support"][-1] < 0.1


@pytest.mark.slow
def test_pendulum():
    config = flashsac.Config(total_timesteps=10_000)  # half the default
    metrics = jit_quickly(flashsac.make_train(config))(jax.random.key(0))["metrics"]
    episodes = np.asarray(metrics["episodes"])[-500:]
    returns = np.asarray(metrics["episodic_return"])[-500:]
    assert np.nansum(episodes * np.nan_to_num(returns)) / episodes.sum() > -300
