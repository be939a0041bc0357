"""What a script defines. The package relies on these names and on nothing else: docs/python.md."""

from typing import Any, Protocol


class Script(Protocol):
    """The module of a script. It may also have `report(config, runner_state, run_dir)`."""

    __file__: str
    # a frozen dataclass with the property `num_updates`, and `warmup_timesteps` if it has a warm-up
    Config: Any

    def make_learner(self, config) -> tuple[Any, Any]:
        """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
        ...

    def make_train(self, config) -> Any:
        """`train(rng) -> {"runner_state": ..., "metrics": {name: [num_updates]}}`."""
        ...

    def make_policy(self, config) -> Any:
        """`act(agent, obs) -> action`; with memory `start` and `act`."""
        ...

    def make_env(self, config) -> tuple[Any, Any]:
        """`env, env_params` with gymnax's interface."""
        ...


NAMES = ("Config", "make_learner", "make_train", "make_policy", "make_env")
