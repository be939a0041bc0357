"""Fields that configs had in older versions of onejit, and what replaces each of them.

A line of OLD_FIELDS is all that a renamed field needs. A field is looked up here only where the
script's `Config` lacks it, and copies of older scripts therefore keep their fields.
"""

# {field: what to do}. The sentence follows "FIELD: is a field of an older version; ".
OLD_FIELDS = {
    "unroll": "delete it, because loops are no longer unrolled",
    "n_step": "rainbow.py has n-step targets; delete it if it is 1",
    "dueling": "rainbow.py has the dueling network; delete it if it is False",
    "clip_value": "use vf_clip_eps, the clip range of the value function; inf does not clip",
    "conv_features": "use convolutions: 16 is now [[16, 3, 1]], and 0 is []",
    "torso": "use convolutions: flat is now [], grid is [[16, 3, 1]], and nature is "
    "[[32, 8, 4], [64, 4, 2], [64, 3, 1]]",
    "snapshot_interval": "delete it; docs/q_learning_gridworld.md shows how to keep Q",
}

# {script: {field: what to do}}, where other scripts still have the field or never had it.
OLD_FIELDS_OF = {
    "apex_dqn": {
        "double": "delete it, because targets are always double",
        "dueling": "delete it, because the network is always dueling",
        "loss": "delete it, because the loss is the squared error",
    },
    "dqn": {"loss": "delete it, because the loss is the squared error"},
    "rainbow": {"loss": "delete it; without a distribution the loss is the squared error"},
}

# {(field, value): what to do}, for scripts that come with onejit. Copies of older scripts keep the
# old meaning.
OLD_VALUES = {
    ("max_grad_norm", 0.0): "0 stood for no limit in older versions; use inf",
}

# {script: what else has changed}. Added to the message, because these fields kept their names.
CHANGED_MEANINGS = {
    "apex_dqn": "actor_sync_interval and target_update_interval count environment steps from 0.3.0 "
    "on, not gradient steps",
    "rainbow": "target_update_interval counts environment steps from 0.3.0 on, not gradient steps",
}


def check_old_fields(script_name: str, known, names) -> None:
    """Raise ValueError if one of `names` is a field of an older version. `known` are today's."""
    for name in names:
        advice = OLD_FIELDS | OLD_FIELDS_OF.get(script_name, {})
        if name in known or name not in advice:
            continue
        message = f"{name}: is a field of an older version; {advice[name]}"
        if script_name in CHANGED_MEANINGS:
            message = f"{message}. Note: {CHANGED_MEANINGS[script_name]}"
        raise ValueError(message)


def check_old_values(settings: dict[str, str]) -> None:
    """Raise ValueError if a field has a value that meant something else in an older version.

    `settings` are the words of the command line, {field: word}.
    """
    for (name, value), advice in OLD_VALUES.items():
        if name in settings and is_number(settings[name], value):
            raise ValueError(f"{name} = {settings[name]}: {advice}")


def is_number(word: str, value: float) -> bool:
    try:
        return float(word) == value
    except ValueError:  # the message about a wrong value is tyro's
        return False
