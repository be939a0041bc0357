"""Gumbel AlphaZero, written plainly: the twin of alphazero.py.

mctx searches as it is. What it is asked, and what is made of its answers, is written anew.
"""

import dataclasses

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest
from support import twin
from support.tiers import slow
from support.twin import Adam

import alphazero as script

SMALL = script.Config(
    env_name="board_games:NimDraw",  # players move again, draw, and are cut off after two moves
    num_envs=2,
    num_steps=4,
    simulations=6,
    max_considered_actions=2,  # of three
    sampled_moves=1,
    update_epochs=2,
    num_minibatches=2,
    total_timesteps=2 * 4 * 3 + 1,  # three updates
    lr=2e-2,
    gamma=0.9,
    vf_coef=0.7,
    weight_decay=0.5,
    hidden_sizes=(8,),
    eval_games=2,
    eval_steps=3,
)
CASES = {
    "all on": dataclasses.replace(
        SMALL, anneal_lr=True, activation="tanh", opponent_simulations=0, eval_simulations=2
    ),
    "all off": dataclasses.replace(
        SMALL,
        anneal_lr=False,
        lr=5e-3,  # Adam multiplies the rounding of gradients near 0 by it: more in a deep network
        max_considered_actions=16,
        sampled_moves=30,
        opponent_simulations=3,
        eval_simulations=0,
        network="residual",
        channels=4,
        num_blocks=1,
    ),
}


def to_numpy(function, **options):
    """The function as a program whose results are arrays of NumPy."""
    compiled = jax.jit(function, **options)
    return lambda *args, **named: jax.device_get(compiled(*args, **named))


def stack(states):
    """The states of several games as one, [games, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def mask(logits, legal):
    """Illegal moves have no probability."""
    return jnp.where(legal, logits, -1e30)


@jax.jit
def random_move(key, state):
    return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf))


def sample_by_visits(key, visits):
    """In proportion to the visits (page 3 of arXiv 1712.01815)."""
    return jax.random.categorical(key, jnp.log(visits))


class Match:
    """A game of the agent, player 0, against an opponent: `choose(key, state) -> move`."""

    def __init__(self, game, init, step, choose, key):
        self.game = game
        self.init = init
        self.step_game = step
        self.choose = choose
        self.reset(key)

    def reset(self, key) -> None:
        """A new game. If the opponent begins, its first turn is random."""
        init_key, opening_key = jax.random.split(key)
        self.state = self.init(init_key)
        self.outcome = 0.0
        self.reply(opening_key, random_move)
        self.outcome = 0.0  # the opening does not count
        self.moves = 0  # of the agent

    def move(self, action) -> None:
        """A move of the player who is to move."""
        self.state = self.step_game(self.state, np.int32(action))
        self.outcome += float(self.state.rewards[0])

    def reply(self, key, choose) -> None:
        """Moves of the opponent until the agent is to move."""
        while self.state.current_player != 0 and not self.state.terminated:
            key, move_key = jax.random.split(key)
            self.move(choose(move_key, self.state))

    def step(self, key, action):
        """A move of the agent and the reply. `(outcome, moves)` of the game if it has ended."""
        reply_key, reset_key = jax.random.split(key)
        self.move(action)
        self.reply(reply_key, self.choose)
        self.moves += 1
        if not self.state.terminated and self.moves < self.game.longest:
            return None
        ended = (self.outcome, self.moves)
        self.reset(reset_key)
        return ended


class Twin:
    def __init__(self, config, rng):
        self.config = config
        self.game = script.make_game(config.env_name)
        self.network = script.make_network(config, self.game)
        self.init_game = to_numpy(self.game.init)
        self.step_game = to_numpy(self.game.step)
        self.search = to_numpy(self.search_by_network, static_argnames="simulations")
        self.sample = to_numpy(sample_by_visits)
        self.apply = to_numpy(self.network.apply)
        self.mcts = jax.jit(self.search_at_random)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))

        network_key, game_key, match_key, self.key = jax.random.split(rng, 4)
        game_keys = jax.random.split(game_key, config.num_envs)
        self.games = [self.init_game(key) for key in game_keys]
        self.params = to_numpy(self.network.init)(network_key, stack(self.games).observation)
        self.optimizer = Adam(self.params)
        self.update_count = 0

        opponents = {"random": random_move}
        if config.opponent_simulations:
            opponents["mcts"] = self.mcts
        self.matches = {}
        for i, (name, choose) in enumerate(opponents.items()):
            keys = jax.random.split(jax.random.fold_in(match_key, i), config.eval_games)
            self.matches[name] = [
                Match(self.game, self.init_game, self.step_game, choose, key) for key in keys
            ]

    # --- what mctx asks for ---

    def expand(self, evaluate, gamma):
        """mctx's `recurrent_fn`. A value is of the player to move, and so changes its sign."""

        def move(state, action):
            next_state = self.game.step(state, action)
            reward = next_state.rewards[state.current_player]
            is_same_player = next_state.current_player == state.current_player
            sign = 2.0 * is_same_player - 1.0
            return next_state, reward, gamma * sign * (1.0 - next_state.terminated)

        def expand(params, key, actions, states):
            next_states, rewards, discounts = jax.vmap(move)(states, actions)
            logits, values = evaluate(params, key, next_states)
            output = mctx.RecurrentFnOutput(
                reward=rewards,
                discount=discounts,
                prior_logits=mask(logits, next_states.legal_action_mask),
                value=values * (1.0 - next_states.terminated),
            )
            return output, next_states

        return expand

    def root(self, evaluate, params, key, states):
        logits, values = evaluate(params, key, states)
        return mctx.RootFnOutput(
            prior_logits=mask(logits, states.legal_action_mask),
            value=values * (1.0 - states.terminated),
            embedding=states,
        )

    def search_by_network(self, params, key, states, simulations, gumbel_scale=1.0):
        """Moves, improved policies (Gumbel paper, equation 11), visits and values of the roots."""

        def evaluate(params, key, states):
            return self.network.apply(params, states.observation)

        root_key, search_key = jax.random.split(key)
        output = mctx.gumbel_muzero_policy(
            params,
            search_key,
            self.root(evaluate, params, root_key, states),
            self.expand(evaluate, self.config.gamma),
            num_simulations=simulations,
            invalid_actions=~states.legal_action_mask,
            max_num_considered_actions=self.config.max_considered_actions,
            gumbel_scale=gumbel_scale,
        )
        root = output.search_tree.summary()
        return output.action, output.action_weights, root.visit_counts, root.value

    def search_at_random(self, key, state):
        """The most visited move of a plain MCTS, whose leaves are judged by one random game."""

        def random_game(key, state):
            """The outcome for the player to move. After the end there are no rewards."""
            player = state.current_player
            outcome = 0.0
            for _ in range(self.game.SIZE):
                key, move_key = jax.random.split(key)
                state = self.game.step(state, random_move(move_key, state))
                outcome += state.rewards[player]
            return outcome

        def evaluate(params, key, states):
            legal = states.legal_action_mask
            keys = jax.random.split(key, len(legal))
            return jnp.zeros(legal.shape), jax.vmap(random_game)(keys, states)

        root_key, search_key = jax.random.split(key)
        states = jax.tree.map(lambda x: x[None], state)
        output = mctx.muzero_policy(
            (),
            search_key,
            self.root(evaluate, (), root_key, states),
            self.expand(evaluate, gamma=1.0),
            num_simulations=self.config.opponent_simulations,
            invalid_actions=~states.legal_action_mask,
            dirichlet_fraction=0.0,
            temperature=0.0,
        )
        return output.action[0]

    # --- training ---

    def collect(self, key) -> list[dict]:
        """Moves of self-play, one dict for each step in all games, in the order of time."""
        config = self.config
        *step_keys, last_key = jax.random.split(key, config.num_steps + 1)
        steps = []
        for step_key in step_keys:
            search_key, action_key, game_key = jax.random.split(step_key, 3)
            new_keys = jax.random.split(game_key, config.num_envs)
            states = stack(self.games)
            best_action, weights, visits, values = self.search(
                self.params, search_key, states, simulations=config.simulations
            )
            sampled_action = self.sample(action_key, visits)
            step = {
                "obs": states.observation,
                "legal": states.legal_action_mask,
                "weights": weights,
                "search_value": values,
                "reward": np.zeros(config.num_envs),
                "discount": np.zeros(config.num_envs),
                "terminated": np.zeros(config.num_envs, bool),
            }
            for i, state in enumerate(self.games):
                is_early = state._step_count < config.sampled_moves
                action = sampled_action[i] if is_early else best_action[i]
                next_state = self.step_game(state, action)
                step["reward"][i] = next_state.rewards[state.current_player]
                if next_state.terminated:
                    step["terminated"][i] = True
                    self.games[i] = self.init_game(new_keys[i])
                    continue
                if next_state.current_player == state.current_player:
                    step["discount"][i] = config.gamma
                else:
                    step["discount"][i] = -config.gamma
                self.games[i] = next_state
            steps.append(step)
        _, _, _, self.last_value = self.search(
            self.params, last_key, stack(self.games), simulations=config.simulations
        )
        return steps

    def compute_targets(self, steps) -> None:
        """The outcome of a game for the player to move. A search's value stands for its end."""
        for step in steps:
            step["target"] = np.zeros(self.config.num_envs, np.float32)
        for i in range(self.config.num_envs):
            outcome = self.last_value[i]
            for step in reversed(steps):
                outcome = step["reward"][i] + step["discount"][i] * outcome
                step["target"][i] = outcome

    def loss(self, params, batch):
        """arXiv 1712.01815, equation 1, with the policy's target of the Gumbel paper (12)."""
        logits, value = self.network.apply(params, batch["obs"])
        log_policy = jax.nn.log_softmax(mask(logits, batch["legal"]))
        policy_loss = -jnp.mean(jnp.sum(batch["weights"] * log_policy, axis=1))
        value_loss = jnp.mean((batch["target"] - value) ** 2)
        entropy = -jnp.mean(jnp.sum(jnp.exp(log_policy) * log_policy, axis=1))
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return policy_loss + self.config.vf_coef * value_loss, metrics

    def learn(self, batch, key) -> dict:
        config = self.config
        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * max(0, 1 - self.update_count / config.num_updates)
        all_metrics = []
        for epoch_key in jax.random.split(key, config.update_epochs):
            order = twin.order_of_bits(epoch_key, config.rollout_size)
            for indices in np.split(order, config.num_minibatches):
                minibatch = {name: x[indices] for name, x in batch.items()}
                grads, metrics = self.gradient(self.params, minibatch)
                before = self.params
                after = self.optimizer.step(before, grads, lr)
                decay = lr * config.weight_decay  # arXiv 1711.05101, algorithm 2
                self.params = jax.tree.map(
                    lambda p, x, decay=decay: np.asarray(p - decay * x, np.float32), after, before
                )
                all_metrics.append(metrics)
        return {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}

    def best_move(self, state):
        """The move of the greedy policy, without noise."""
        if self.config.eval_simulations:
            simulations = self.config.eval_simulations
            key = jax.random.key(0)
            action, _, _, _ = self.search(
                self.params, key, stack([state]), simulations=simulations, gumbel_scale=0.0
            )
            return action[0]
        logits, _ = self.apply(self.params, state.observation)
        return np.argmax(np.where(state.legal_action_mask, logits, -np.inf))

    def play_matches(self, name, key) -> dict:
        """Moves of the greedy policy against an opponent, and the outcomes of games that ended."""
        ended = []
        for step_key in jax.random.split(key, self.config.eval_steps):
            keys = jax.random.split(step_key, self.config.eval_games)
            for match, match_key in zip(self.matches[name], keys, strict=True):
                result = match.step(match_key, self.best_move(match.state))
                if result is not None:
                    ended.append(result)
        outcomes = [outcome for outcome, _ in ended]
        lengths = [length for _, length in ended]
        return {
            f"{name}_wins": outcomes.count(1.0),
            f"{name}_draws": outcomes.count(0.0),
            f"{name}_losses": outcomes.count(-1.0),
            "episodic_return": np.mean(outcomes) if ended else np.nan,
            "episodic_length": np.mean(lengths) if ended else np.nan,
            "episodes": len(ended),
        }

    def update(self) -> dict:
        self.key, collect_key, learn_key, match_key = jax.random.split(self.key, 4)
        steps = self.collect(collect_key)
        self.compute_targets(steps)
        batch = {
            name: np.concatenate([step[name] for step in steps])
            for name in ("obs", "legal", "weights", "target")
        }
        metrics = self.learn(batch, learn_key)
        draws = [step["terminated"] & (step["reward"] == 0) for step in steps]
        metrics["value"] = np.mean([step["search_value"] for step in steps])
        metrics["self_play_games"] = np.sum([step["terminated"] for step in steps])
        metrics["self_play_draws"] = np.sum(draws)
        for i, name in enumerate(self.matches):
            metrics |= self.play_matches(name, jax.random.fold_in(match_key, i))
        self.update_count += 1
        return metrics

    def check(self, state) -> None:
        twin.assert_trees(state.params, self.params, "params")
        adam = twin.adam_state(state.opt_state)
        twin.assert_trees(adam.mu, self.optimizer.mean, "mu")
        twin.assert_trees(adam.nu, self.optimizer.square, "nu", atol=1e-8)
        twin.assert_trees(state.game_state, stack(self.games), "games")
        assert state.matches.keys() == self.matches.keys()
        for name, matches in self.matches.items():
            obs, log = state.matches[name]
            game_state, moves = log.env_state
            games = stack([match.state for match in matches])
            twin.assert_trees(obs, games, name)
            twin.assert_trees(game_state, games, name)
            np.testing.assert_array_equal(moves, [match.moves for match in matches])
            np.testing.assert_array_equal(log.episode_lengths, moves)
            np.testing.assert_array_equal(log.episode_returns, [match.outcome for match in matches])
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, num_updates=4)
