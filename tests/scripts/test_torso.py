"""What comes before the dense layers where observations are images, in all scripts with discrete
actions.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments, of which Brightness shows pictures
from support.compilation import jit_quickly
from support.small import field_names, small_config
from support.tiers import slow

import apex_dqn
import dqn
import evolve_objective
import ppo
import ppo_rnn
import pqn
import pqn_rnn
import rainbow

SCRIPTS = [ppo, dqn, pqn, pqn_rnn, apex_dqn, rainbow, ppo_rnn, evolve_objective]
CONVOLUTIONS = {
    "flat": (),
    "grid": ((16, 3, 1),),  # the default: Young & Tian 2019 (arXiv 1903.03176)
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),  # Mnih et al. 2015
}
# features of an image [84, 84, 1]
LARGE = {"flat": 84 * 84, "grid": 82 * 82 * 16, "nature": 7 * 7 * 64}
CLASSIC = {"flat": 63 * 63 * 3, "grid": 61 * 61 * 16, "nature": 4 * 4 * 64}  # of one [63, 63, 3]
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


def make_config(script, torso="nature", image=(), **overrides):
    settings = {"normalize_obs": False, "normalize_reward": False, "n_step": 1, "cell_size": 8}
    settings = {name: value for name, value in settings.items() if name in field_names(script)}
    settings |= {"env_name": "Brightness", "env_params": dict(image)}
    return small_config(script, convolutions=CONVOLUTIONS[torso], **settings | overrides)


def kernels(script, config) -> set[tuple[int, ...]]:
    agent = jax.eval_shape(script.make_learner(config)[0], jax.random.key(0)).agent["params"]
    return {leaf.shape for leaf in jax.tree.leaves(agent) if leaf.ndim == 2}


def network(script, config):
    """`init(key) -> params` and `apply(params, obs [B, H, W, C]) -> [B, ...]`."""
    env, env_params = script.make_env(config)
    space = env.observation_space(env_params)
    obs = jnp.zeros((2, *space.shape), space.dtype)
    if script not in (ppo_rnn, pqn_rnn):
        if hasattr(script, "make_networks"):
            made, _ = script.make_networks(config, env, env_params)
        else:
            made = script.make_network(config, env, env_params)

        def apply(params, obs):
            output = made.apply(params, obs)
            return getattr(output, "logits", output)  # an actor's output is a distribution

        return lambda key: made.init(key, obs), apply
    if script is ppo_rnn:
        made, *_ = script.make_networks(config, env, env_params)
    else:
        made = script.make_network(config, env, env_params)
    first = jnp.ones((1, 2), bool)
    memory = jnp.zeros((2, config.cell_size))
    return (
        lambda key: made.init(key, memory, obs[None], first),
        lambda params, obs: jax.tree.leaves(made.apply(params, memory, obs[None], first))[-1][0],
    )


# --- the convolutions ---


@pytest.mark.parametrize(
    ("size", "stride", "shape"),
    [(8, 4, (84, 84, 4)), (8, 4, (63, 50, 3)), (4, 2, (9, 11, 2)), (3, 1, (9, 11, 2))],
)
def test_a_dense_layer_on_patches_is_a_convolution(size, stride, shape):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, *shape)), rng.normal(size=(size, size, shape[-1], 5))
    blocks = size // stride
    dense = kernel.reshape(blocks, stride, blocks, stride, shape[-1], 5).transpose(0, 2, 1, 3, 4, 5)
    names = jax.lax.conv_dimension_numbers((6, *shape), kernel.shape, ("NHWC", "HWIO", "NHWC"))

    @jit_quickly
    def outputs(x, kernel, dense):
        ours = ppo.patches(x, size, stride) @ dense
        theirs = jax.lax.conv_general_dilated(
            x.reshape(6, *shape), kernel, (stride, stride), "VALID", dimension_numbers=names
        )
        return ours.reshape(theirs.shape), theirs

    np.testing.assert_allclose(*outputs(x, kernel, dense.reshape(-1, 5)), rtol=1e-3, atol=1e-3)


@each_script
@pytest.mark.parametrize("torso", ["flat", "grid", "nature"])
def test_shapes(script, torso):
    expected = {"flat": set(), "grid": {(9, 16)}, "nature": {(64, 32), (512, 64), (576, 64)}}[torso]
    found = kernels(script, make_config(script, torso))
    assert expected | {(LARGE[torso], 8)} <= found and not found & {
        (size, 8) for size in {*LARGE.values()} - {LARGE[torso]}
    }
    found = kernels(
        script, make_config(script, torso, image={"size": 63, "channels": 3, "dtype": "float32"})
    )
    assert (CLASSIC[torso], 8) in found


@each_script
def test_the_smallest_images_and_strides_that_divide(script):
    assert script.Config().convolutions == CONVOLUTIONS["grid"]
    assert (64, 8) in kernels(script, make_config(script, "nature", image={"size": 36}))
    assert (16, 8) in kernels(script, make_config(script, "grid", image={"size": 3}))
    with pytest.raises(ValueError, match=r"convolutions: 3 x 3, stride 1, on \(2, 2\)"):
        kernels(script, make_config(script, "nature", image={"size": 35}))
    with pytest.raises(ValueError, match=r"convolutions: 3 x 3, stride 1, on \(2, 2\)"):
        kernels(script, make_config(script, "grid", image={"size": 2}))
    config = dataclasses.replace(make_config(script), convolutions=((16, 3, 2),))
    with pytest.raises(ValueError, match=r"convolutions: 3 x 3, stride 2, on \(84, 84\)"):
        kernels(script, config)


@each_script
@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-misc", "Catch-bsuite"])
def test_what_is_no_image_has_no_convolutions(script, name):
    """A vector, the number of a state and a matrix. Updates can be traced with them."""
    configs = [make_config(script, torso, env_name=name) for torso in LARGE]
    found = [kernels(script, config) for config in configs]
    assert found[0] == found[1] == found[2]
    init, update = script.make_learner(configs[0])
    jax.eval_shape(update, jax.eval_shape(init, jax.random.key(0)))


# --- bytes ---


def scanned(jaxpr):
    """What the scans of a program stack up."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            of_step = equation.params["jaxpr"].out_avals
            for leaf, aval in zip(equation.outvars, of_step, strict=True):
                if leaf.aval.shape != aval.shape:  # else it is carried
                    yield leaf.aval
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            yield from scanned(inner) if hasattr(inner, "eqns") else ()


@each_script
@pytest.mark.parametrize("torso", [slow("flat"), "nature"])
def test_bytes_are_stored_as_bytes(script, torso):
    """In rollouts and in replay buffers. Normalized ones are floats, as the policy saw them."""
    init, update = script.make_learner(make_config(script, torso))
    state = jax.eval_shape(init, jax.random.key(0))
    stored = [*jax.tree.leaves(state), *scanned(jax.make_jaxpr(update)(state).jaxpr)]
    images = [leaf for leaf in stored if leaf.shape[-3:] == (84, 84, 1)]
    # fewer are statistics
    images = [leaf for leaf in images if math.prod(leaf.shape[:-3]) >= 8]
    assert max(math.prod(leaf.shape[:-3]) for leaf in images) >= 32  # rollouts
    assert all(leaf.dtype == jnp.uint8 for leaf in images)


@each_script
@pytest.mark.parametrize("torso", [slow("flat"), "nature"])
def test_bytes_are_divided_by_255(script, torso):
    x = np.random.default_rng(0).integers(0, 256, (2, 40, 40, 1), np.uint8)
    more = {"layer_norm": False} if script in (pqn, pqn_rnn) else {}  # it makes up for any factor
    configs = [
        make_config(script, torso, image={"size": 40, "dtype": dtype}, **more)
        for dtype in ("uint8", "float32")
    ]
    (init, of_bytes), (_, of_floats) = (network(script, config) for config in configs)

    @jit_quickly
    def outputs(x):
        params = init(jax.random.key(0))
        inputs = x.astype(jnp.float32)
        return of_bytes(params, x), of_floats(params, inputs / 255), of_floats(params, inputs)

    found, divided, whole = map(np.asarray, outputs(x))
    np.testing.assert_allclose(found, divided, rtol=1e-4, atol=1e-5)
    assert np.abs(found - whole).max() > 1e-3


def test_numbers_that_are_stored_in_a_byte_are_not_divided():
    """`buffer_dtype` says how to store them: 0 and 1 stay 0 and 1."""
    x = np.random.default_rng(0).integers(0, 2, (2, 10, 10, 4)).astype(np.float32)
    for script in (ppo, dqn, apex_dqn, rainbow):
        config = make_config(script, "grid", env_name="Breakout-MinAtar", buffer_dtype="int8")
        init, apply = network(script, config)
        _, plain = network(script, dataclasses.replace(config, buffer_dtype=""))

        @jit_quickly
        def outputs(x, init=init, apply=apply, plain=plain):
            params = init(jax.random.key(0))
            return apply(params, x), apply(params, x.astype(jnp.int8)), plain(params, x)

        floats, stored, expected = outputs(x)
        np.testing.assert_array_equal(floats, expected)
        np.testing.assert_array_equal(stored, expected)


@pytest.mark.parametrize(
    "script", [ppo, dqn, apex_dqn, rainbow], ids=lambda script: script.__name__
)
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_no_other_type_is_needed_to_store_bytes(script, dtype):
    with pytest.raises(ValueError, match=f"buffer_dtype = {dtype}: "):
        script.make_learner(make_config(script, buffer_dtype=dtype))


@pytest.mark.parametrize(
    "script, overrides, size",
    [
        (ppo_rnn, {"observe": (3,)}, 1),
        (ppo_rnn, {"observe_previous": True}, 84 * 84 + 2 + 1),
        (pqn_rnn, {"observe": (3, 5)}, 2),
    ],
)
def test_entries_of_images_are_vectors(script, overrides, size):
    assert (size, 8) in kernels(script, make_config(script, "grid", **overrides))
