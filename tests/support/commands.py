"""The commands of `onejit` and of scripts, in this process."""

import pytest
import tyro

from onejit import __main__

MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)  # as scripts have them


def refusal(words, capfd) -> str:
    """The one line with which a command of `onejit` refuses its words."""
    words = [str(word) for word in words]
    with pytest.raises(SystemExit) as stop:
        __main__.main(words)
    message = capfd.readouterr().err
    tool = f"onejit {words[0]}" if words[0] in __main__.COMMANDS else "onejit"
    assert stop.value.code == 2 and message.startswith(f"{tool}: error: "), message
    assert message.count("\n") == 1 and message.endswith("\n"), message
    return message


def run_script(script, *words):
    """As `python script.py WORDS` does."""
    args = script.read_flags([str(word) for word in words])
    tyro.cli(script.main, args=args, config=MARKERS, description=script.__doc__)


def config_of_words(script, *words):
    """The config that the command line of a script makes."""
    args = script.read_flags([str(word) for word in words])
    return tyro.cli(script.Config, args=args, config=MARKERS)
