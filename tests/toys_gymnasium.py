"""Environments of Gymnasium that remember what reaches them."""

import asyncio
import copy
import signal
import sqlite3
import threading
from concurrent import futures

import gymnasium
import numpy as np
from gymnasium import spaces

VECTOR = spaces.Box(-1.0, 1.0, (3,))


class Toy(gymnasium.Env):
    """Observations are samples of the space, drawn from the seed, in episodes of `length` steps.

    `made` has the environments of this process. They keep what they got and gave.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    made = []  # noqa: RUF012

    def __init__(self, observation_space=VECTOR, action_space=None, length=4, render_mode=None):
        self.observation_space = copy.deepcopy(observation_space)  # which has a generator
        self.action_space = spaces.Discrete(3) if action_space is None else action_space
        self.length = length
        self.render_mode = render_mode
        self.actions = []
        self.observations = []
        self.options = []
        Toy.made.append(self)

    def observe(self):
        obs = self.observation_space.sample()
        self.observations.append(obs)
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options.append(options)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.actions.append(action)
        self.time += 1
        return self.observe(), float(self.time), self.time >= self.length, False, {}

    def render(self):
        return np.full((8, 8, 3), self.time, np.uint8)


class Switch(Toy):
    """Keeps the arguments that it was given."""

    def __init__(self, slippery=True, mode="off", speed=None, render_mode=None):
        super().__init__()
        self.given = {"slippery": slippery, "mode": mode, "speed": speed}


class ReadsOptions(Toy):
    """Starts that an option would fix."""

    def reset(self, *, seed=None, options=None):
        if options is not None:
            raise KeyError(f"{options} has no start")
        return super().reset(seed=seed)


class Sqlite(Toy):
    """A connection belongs to the thread that opened it."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table steps (action integer)")

    def step(self, action):
        self.database.execute("insert into steps values (?)", (int(action),))
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        self.database.execute("delete from steps")
        return super().reset(seed=seed)

    def render(self):
        (steps,) = self.database.execute("select count(*) from steps").fetchone()
        return np.full((8, 8, 3), steps, np.uint8)

    def close(self):
        self.database.close()


class Asyncio(Toy):
    """The loop of the thread, as programs with one thread take it."""

    def __init__(self, render_mode=None):
        super().__init__()
        self.loop = asyncio.get_event_loop()

    async def answer(self, action):
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        return super().step(action)

    def step(self, action):
        return asyncio.get_event_loop().run_until_complete(self.answer(action))


class Threads(Toy):
    """Steps in threads of its own."""

    def __init__(self, render_mode=None):
        super().__init__()
        self.threads = futures.ThreadPoolExecutor(2)

    def step(self, action):
        return self.threads.submit(super().step, action).result()

    def close(self):
        self.threads.shutdown()


class OneThread(Toy):
    """As a context of OpenGL: whatever is done in another thread fails."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.thread = threading.get_ident()

    def check(self):
        assert threading.get_ident() == self.thread, "this context belongs to another thread"

    def reset(self, *, seed=None, options=None):
        self.check()
        return super().reset(seed=seed)

    def step(self, action):
        self.check()
        return super().step(action)

    def render(self):
        self.check()
        return super().render()

    def close(self):
        self.check()


class MainThread(Toy):
    """Handles signals, which only a main thread may."""

    def __init__(self, render_mode=None):
        super().__init__()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class UsesJax(Toy):
    """Computes with JAX, in large arrays, which its threads share."""

    def __init__(self, rate=None, render_mode=None):
        super().__init__()
        import jax

        self.rate = jax.jit(lambda x: (x @ x).sum()) if rate is None else rate

    def step(self, action):
        import jax.numpy as jnp

        obs, _, *ends = super().step(action)
        return obs, float(self.rate(jnp.ones((256, 256)))) / 256**3, *ends


class Sized(Toy):
    """Cannot be made without a parameter, and has images that ask for another."""

    def __init__(self, size, render_mode=None):
        super().__init__(spaces.Box(0, 255, (size, 3, 3), np.uint8))


class OtherObservations(Toy):
    """Observations that are not of the space, at the reset or in the first step."""

    def __init__(self, space, observed, when="reset", render_mode=None):
        super().__init__(observation_space=space)
        self.observed = observed
        self.when = when

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return (self.observed if self.when == "reset" else obs), info

    def step(self, action):
        _, *others = super().step(action)
        return self.observed, *others
