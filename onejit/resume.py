"""Continue a run or a sweep that was stopped or killed, or give a run more steps.

    onejit resume runs/ppo/my_run
    onejit resume runs/ppo/my_run --total-timesteps 2e6
    onejit resume runs/ppo/my_sweep

It continues from the last checkpoint, with the settings and the code that it began with. A larger
`--total-timesteps` extends a run, unless it has a schedule, such as an annealed rate. A resumed run
begins new episodes if its environments run outside JAX. A run of several hosts is resumed by the
same command on each of them.
"""

from pathlib import Path

import tyro

from onejit import sweep, train
from onejit.engine import hosts
from onejit.run.record import read_record
from onejit.run.resume import ResumeOptions
from onejit.script.command_line import Hosts, check_options


def main(
    run_dir: tyro.conf.Positional[Path],
    options: ResumeOptions = ResumeOptions(),  # noqa: B008
    of_hosts: Hosts = Hosts(),  # noqa: B008
) -> Path:
    """Train the rest. Returns `run_dir`. Raises ValueError.

    Args:
        run_dir: a run of `onejit train`, or a sweep
    """
    check_options(options)
    hosts.connect(of_hosts)
    command = sweep if read_record(run_dir).kind == "sweep" else train
    return command.resume(run_dir, options)
