"""A team of known value with JaxMARL's interface, for `--env-name toys_team:ToyTeam`."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxmarl.environments.multi_agent_env import MultiAgentEnv
from jaxmarl.environments.multi_agent_env import State as BaseState
from jaxmarl.environments.spaces import Box, Discrete


@struct.dataclass
class State(BaseState):
    # steps since the start of the episode; `step` is the clock, which a test may turn back
    age: jax.Array
    sign: jax.Array  # drawn at the start
    action: jax.Array  # [A], the last ones, so that a played episode shows what the agents did


class ToyTeam(MultiAgentEnv):
    """Terminates after `length` steps, or ends by its clock after `max_steps`.

    Agent i is paid i + 1 in each step.

    Agents observe the sign and a fifth of the step. With `masks` only action 2 is available to
    agent 1 in odd steps. The last agent dies after `dies` steps: it sees zeros and can only take
    action 0.
    """

    def __init__(
        self,
        num_agents=2,
        length=5,
        max_steps=12,
        dies=1_000_000,
        pays="ones",
        masks=False,
        noise=0.0,
    ):
        super().__init__(num_agents)
        self.length, self.max_steps, self.dies, self.pays = length, max_steps, dies, pays
        self.masks, self.noise = masks, float(noise)

    def observation_space(self, agent):
        return Box(-jnp.inf, jnp.inf, (2,))

    def action_space(self, agent):
        return Discrete(3)

    def alive(self, state):
        return (jnp.arange(self.num_agents) < self.num_agents - 1) | (state.age < self.dies)

    def get_obs(self, state):
        seen = jnp.stack([state.sign, state.age / 5]) * self.alive(state)[:, None]
        return dict(zip(self.agents, seen, strict=True))

    def get_avail_actions(self, state):
        last = self.masks & (jnp.arange(self.num_agents) == 1) & (state.age % 2 == 1)
        available = jnp.where(last[:, None], jnp.arange(3) == 2, True)
        available = jnp.where(self.alive(state)[:, None], available, jnp.arange(3) == 0)
        return dict(zip(self.agents, available, strict=True))

    def is_terminal(self, state):
        return (state.age >= self.length) | (state.step >= self.max_steps)

    def reset(self, key):
        zero = jnp.int32(0)
        sign = jax.random.rademacher(key, (), jnp.float32)
        action = jnp.zeros(self.num_agents, jnp.int32)
        state = State(done=jnp.zeros((), bool), step=zero, age=zero, sign=sign, action=action)
        return self.get_obs(state), state

    def step_env(self, key, state, actions):
        stacked = jnp.stack([actions[name] for name in self.agents]).astype(jnp.int32)
        state = state.replace(step=state.step + 1, age=state.age + 1, action=stacked)
        state = state.replace(done=self.is_terminal(state))
        pay = {"ones": 1.0, "sign": state.sign, "action": (stacked == 2) * 1.0}[self.pays]
        rewards = pay * (jnp.arange(self.num_agents) + 1.0) + self.noise * jax.random.normal(key)
        dones = dict(zip(self.agents, ~self.alive(state), strict=True)) | {"__all__": state.done}
        shaped = dict(zip(self.agents, 10.0 * jnp.arange(self.num_agents), strict=True))
        paid = dict(zip(self.agents, rewards, strict=True))
        return self.get_obs(state), state, paid, dones, {"shaped_reward": shaped}


class PlainTeam(ToyTeam):
    """No state of it is random."""

    def __init__(self, noise=0.0):
        super().__init__(max_steps=11, noise=noise)

    def reset(self, key):
        state = super().reset(key)[1].replace(sign=jnp.float32(1))
        return self.get_obs(state), state
