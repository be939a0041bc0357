"""Environment steps: of an update, until an update, and of a whole run."""


def steps_of(config) -> int:
    """Environment steps of one agent in one update."""
    return config.num_envs * config.num_steps


def total_steps(config, num_seeds: int) -> int:
    """Environment steps of a whole run, without the warm-up."""
    return num_seeds * config.num_updates * steps_of(config)


def timesteps_until(config, num_updates: int) -> int:
    """Environment steps of one agent until so many updates have ended, warm-up included."""
    return getattr(config, "warmup_timesteps", 0) + num_updates * steps_of(config)
