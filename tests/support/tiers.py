"""Which tests the fast tier runs for which scripts."""

import pytest
import yaml

from support.files import ROOT

LISTED = yaml.safe_load((ROOT / "tools" / "scripts.yaml").read_text())["scripts"]
SLOW = [name for name, entry in LISTED.items() if entry["tier"] == "slow"]
COMMON_QUICKLY = ("ppo_continuous", "q_learning_gridworld")  # the fast tier's for common blocks
PROCESSES_QUICKLY = ("q_learning_gridworld",)  # and for scripts as processes of their own


def slow(*values):
    """Parameters of a test for the slow tier alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def is_for_slow_tier(item, script) -> bool:
    """Whether a test of what all scripts share, or of a costly script, is left to the slow tier.

    The mark `common` may name the scripts for the fast tier as its arguments.
    """
    common = item.get_closest_marker("common")
    if not common and script not in SLOW:
        return False
    if common and common.args:
        return script not in common.args
    if item.path.stem == "test_processes":
        return script not in PROCESSES_QUICKLY
    return script not in COMMON_QUICKLY


def shard(groups: set[str], text: str) -> set[str]:
    """The groups of tests of one process of several, such as the text 1/4. Scripts take longest."""
    number, total = map(int, text.split("/"))
    if not 1 <= number <= total:
        raise pytest.UsageError(f"--shard {text}: must be from 1/{total} to {total}/{total}")
    ordered = sorted(groups, key=lambda group: (group not in LISTED, group))
    return set(ordered[number - 1 :: total])
