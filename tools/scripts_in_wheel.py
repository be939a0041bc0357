"""Hatch's build hook: a wheel holds the scripts, for `onejit train ppo`."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ScriptsInWheel(BuildHookInterface):
    """Adds the scripts at the root of the repository as onejit/scripts."""

    def initialize(self, version, build_data):
        if version == "editable":  # the package then finds them where they are
            return
        for script in Path(self.root).glob("*.py"):
            build_data["force_include"][str(script)] = f"onejit/scripts/{script.name}"
