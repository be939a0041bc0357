"""A toy with Pgx's interface, whose values are known."""

import flax
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class NimState:
    pile: jax.Array
    current_player: jax.Array
    observation: jax.Array  # one-hot, the size of the pile, [1, SIZE + 1, 1]
    legal_action_mask: jax.Array
    rewards: jax.Array
    terminated: jax.Array
    _step_count: jax.Array


class Nim:
    """Take one (action 0) or two (1) of at most SIZE stones; whoever takes the last one wins.

    Action 2 takes one and keeps the turn. It is legal if `again` is set and more than one stone is
    left.
    """

    id, num_players, num_actions, longest, SIZE = "nim", 2, 3, 7, 7
    observation_shape = (1, SIZE + 1, 1)
    again = False

    def state(self, pile, player, rewards, terminated, steps):
        mask = jnp.array([pile >= 1, pile >= 2, (pile >= 2) & self.again]) | terminated
        obs = (
            (jnp.arange(self.SIZE + 1) == pile).astype(jnp.float32).reshape(self.observation_shape)
        )
        return NimState(pile, player, obs, mask, rewards, terminated, steps)

    def init(self, key):
        pile_key, player_key = jax.random.split(key)
        pile, player = (
            jax.random.randint(pile_key, (), 4, self.SIZE + 1),
            jax.random.randint(player_key, (), 0, 2),
        )
        return self.state(pile, player, jnp.zeros(2), jnp.bool_(False), jnp.int32(0))

    def step(self, state, action):
        mover, illegal = state.current_player, ~state.legal_action_mask[action]
        pile = state.pile - jnp.array([1, 2, 1])[action]
        won = jnp.where(jnp.arange(2) == mover, 1.0, -1.0)
        rewards = jnp.where(illegal, -won, jnp.where(pile == 0, won, 0.0))
        player = jnp.where(action == 2, mover, 1 - mover)
        after = self.state(pile, player, rewards, illegal | (pile <= 0), state._step_count + 1)
        ended = state.replace(rewards=jnp.zeros(2))
        return jax.tree.map(lambda x, y: jnp.where(state.terminated, x, y), ended, after)


class NimDraw(Nim):
    """Whoever takes the last two stones at once draws. A match is cut off after two moves."""

    longest = 2
    again = True

    def step(self, state, action):
        after = super().step(state, action)
        is_draw = (action == 1) & (after.pile == 0)
        return after.replace(rewards=jnp.where(is_draw, 0.0, after.rewards))


def nim_value(pile):
    """The outcome for the player to move."""
    return max(nim_values(pile)) if pile else -1


def nim_values(pile) -> list[float]:
    """The outcome of each action for the player to move, minus infinity if it is illegal."""
    return [-nim_value(pile - 1), -nim_value(pile - 2) if pile >= 2 else -np.inf, -np.inf]
