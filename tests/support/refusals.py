"""What a command answers to bad input."""

import pytest

from onejit import sweep


def assert_sweep_refuses(args, words, run_dir, capfd):
    """`onejit sweep ARGS` prints one line with all words, exits with 2 and makes no `run_dir`."""
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={run_dir}"] if args else args)
    message = capfd.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1 and message.startswith("onejit sweep: error: "), message
    for word in words.split():
        assert word in message, message
    assert not run_dir.exists()
