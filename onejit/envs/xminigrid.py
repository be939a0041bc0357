"""XLand-MiniGrid: MiniGrid's rooms, and tasks made of rules, in JAX (arXiv 2312.12044).

    python ppo.py --env-name onejit.envs.xminigrid:MiniGrid-DoorKey-5x5
    python ppo_rnn.py --env-name onejit.envs.xminigrid:XLand-MiniGrid-R1-9x9 \
        --env-params ruleset build --observe-previous True

An agent sees the tiles in front of it, but not what it carries: a memory helps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from gymnax.environments import environment, spaces

from onejit.envs.adapter import State, needs, register, start_from

with needs("xminigrid==0.9.3"):
    from xminigrid import benchmarks, registration
    from xminigrid.core.constants import NUM_COLORS, NUM_TILES, TILES_REGISTRY, Colors, Tiles
    from xminigrid.core.goals import AgentHoldGoal, TileNearGoal
    from xminigrid.core.rules import EmptyRule, TileNearRule
    from xminigrid.types import RuleSet

OBSERVATIONS = ("flat", "grid")
NUM_DIRECTIONS = 4


def tile(kind: int, color: int):
    return TILES_REGISTRY[kind, color]


def make_rulesets() -> dict:
    """Rulesets that need no download, by their names."""
    red_ball = tile(Tiles.BALL, Colors.RED)
    blue_pyramid = tile(Tiles.PYRAMID, Colors.BLUE)
    purple_square = tile(Tiles.SQUARE, Colors.PURPLE)
    green_key = tile(Tiles.KEY, Colors.GREEN)
    # two objects are put next to each other and become the ball, which is to be picked up
    build = RuleSet(
        goal=AgentHoldGoal(tile=red_ball).encode(),
        rules=TileNearRule(tile_a=blue_pyramid, tile_b=purple_square, prod_tile=red_ball).encode()[
            None
        ],
        init_tiles=jnp.stack([blue_pyramid, purple_square, green_key]),
    )
    # the ball is put next to the key
    near = RuleSet(
        goal=TileNearGoal(tile_a=red_ball, tile_b=green_key).encode(),
        rules=EmptyRule().encode()[None],
        init_tiles=jnp.stack([red_ball, green_key, blue_pyramid]),
    )
    # the ball is picked up
    hold = RuleSet(
        goal=AgentHoldGoal(tile=red_ball).encode(),
        rules=EmptyRule().encode()[None],
        init_tiles=jnp.stack([red_ball, green_key, blue_pyramid]),
    )
    return {"build": build, "near": near, "hold": hold}


def find_ruleset(name: str) -> RuleSet:
    """A ruleset by its name, or BENCHMARK/NUMBER. Raises ValueError.

    A benchmark of rulesets is downloaded from Hugging Face when it is used for the first time.
    """
    rulesets = make_rulesets()
    if name in rulesets:
        return rulesets[name]
    benchmark_name, _, number = name.partition("/")
    names = benchmarks.registered_benchmarks()
    if benchmark_name not in names or not number.isdecimal():
        raise ValueError(
            f"ruleset = {name}: must be one of {', '.join(rulesets)}, or BENCHMARK/NUMBER with "
            f"one of {', '.join(names)}, which are downloaded"
        )
    try:
        benchmark = benchmarks.load_benchmark(benchmark_name)
    except OSError as error:
        raise ValueError(f"ruleset = {name}: cannot be downloaded: {error}") from error
    if int(number) >= benchmark.num_rulesets():
        raise ValueError(f"ruleset = {name}: there are {benchmark.num_rulesets()}")
    return benchmark.get_ruleset(int(number))


class XMiniGrid(environment.Environment):
    """`arguments` are fields of the library's `EnvParams`, such as `view_size`.

    Tiles and colors are one-hot, and so is the direction: a first layer on them is what the
    network of the paper has, an embedding of each. With `observation` "flat" all is one vector;
    with "grid" it is an image [view_size, view_size, C], in which the direction is the same
    everywhere. `ruleset` is for the environments whose names begin with XLand.
    """

    def __init__(
        self,
        name: str,
        observation: str = "flat",
        ruleset: str = "",
        start_states: int = 0,
        **arguments,
    ):
        if observation not in OBSERVATIONS:
            raise ValueError(
                f"observation = {observation}: must be one of {', '.join(OBSERVATIONS)}"
            )
        if name.startswith("XLand"):
            arguments["ruleset"] = find_ruleset(ruleset or "build")
        elif ruleset:
            raise ValueError(f"ruleset = {ruleset}: {name} has no rulesets")
        self.observation = observation
        self.env: Any
        self.params: Any
        self.env, self.params = registration.make(name, **arguments)
        self.start = start_from(lambda key: self.env.reset(self.params, key), start_states)

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=self.params.max_steps)

    def reset_env(self, key, params):
        state = State(time=jnp.int32(0), inner=self.start(key))
        return self.observe(key, state, None, params), state

    def step_env(self, key, state, action, params):
        # its reward falls with the fraction of the time limit that has passed
        own_params = self.params.replace(max_steps=params.max_steps_in_episode)
        timestep = self.env.step(own_params, state.inner, action)
        state = State(time=state.time + 1, inner=timestep)
        obs = self.observe(key, state, action, params)
        return obs, state, timestep.reward, timestep.discount == 0.0, {}

    def observe(self, key, state, action, params):
        tiles, colors = jnp.moveaxis(state.inner.observation, -1, 0)
        image = jnp.concatenate(
            [jax.nn.one_hot(tiles, NUM_TILES), jax.nn.one_hot(colors, NUM_COLORS)], axis=-1
        )
        direction = jax.nn.one_hot(state.inner.state.agent.direction, NUM_DIRECTIONS)
        if self.observation == "flat":
            return jnp.concatenate([image.ravel(), direction])
        planes = jnp.broadcast_to(direction, (*image.shape[:2], NUM_DIRECTIONS))
        return jnp.concatenate([image, planes], axis=-1)

    def observation_space(self, params):
        size = self.params.view_size
        depth = NUM_TILES + NUM_COLORS
        if self.observation == "flat":
            return spaces.Box(0.0, 1.0, (size * size * depth + NUM_DIRECTIONS,))
        return spaces.Box(0.0, 1.0, (size, size, depth + NUM_DIRECTIONS))

    def action_space(self, params=None):
        return spaces.Discrete(self.env.num_actions(self.params))

    def frame(self, state, params):
        return self.env.render(self.params, state.inner)


register(registration.registered_environments(), XMiniGrid, __name__)
