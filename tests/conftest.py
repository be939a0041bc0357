"""How the tests run: the environment, the two tiers, and the fixture `script`.

Every test with an argument `script` runs for each script of the repository. What tests share is in
tests/support.
"""

import os
import sys
from pathlib import Path

from support.files import ROOT, SCRIPTS

sys.path.insert(0, str(ROOT))

from onejit.base.cores import number_of_cores

# Python compiles a module once, not in each of the many processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# For `python -m onejit`.
os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
# For the subprocesses of the tests too.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(caches / "onejit" / "tests")
    # Only a directory that had a limit from the start can have one.
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**30)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share a GPU
os.environ["JAX_NUM_CPU_DEVICES"] = "1"  # read when JAX is imported; subprocesses choose their own

import gc
import importlib
import signal

import pytest
from support.compilation import QUICKLY
from support.compile_times import CompileTimes
from support.disks import full_disk, small_disk  # noqa: F401  fixtures
from support.registry import registry  # noqa: F401
from support.tiers import is_for_slow_tier, shard

# A shell that starts `make test &` ignores Ctrl-C, and subprocesses would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--shard", help="run a share of the tests alone, such as 1/4")


def pytest_xdist_auto_num_workers():
    return number_of_cores()


def pytest_configure(config):
    """The fast tier compiles in a third of the time; the slow tier compiles as users do."""
    config.pluginmanager.register(CompileTimes())
    if config.option.markexpr == "not slow":
        flags = f"{QUICKLY} {os.environ.get('XLA_FLAGS', '')}"
        os.environ["XLA_FLAGS"] = flags  # read when the backend starts


def pytest_collection_finish(session):
    """Collect garbage less often, and not among what has been imported: a tenth of all time."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_itemcollected(item):
    """Give all tests of a script or file to one of the processes, which compiles once."""
    script = item.callspec.params.get("script") if hasattr(item, "callspec") else None
    if not isinstance(script, str):
        script = None
    item.group = script or item.path.stem
    item.add_marker(pytest.mark.xdist_group(item.group))
    if script in SCRIPTS and is_for_slow_tier(item, script):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config, items):
    if config.option.shard:
        mine = shard({item.group for item in items}, config.option.shard)
        others = [item for item in items if item.group not in mine]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.group in mine]


# What adapters share stays: fixtures of some tests forget the modules of libraries.
importlib.import_module("onejit.envs.adapter")
importlib.import_module("onejit.envs.host.batch")


@pytest.fixture(scope="session", autouse=True)
def another_folder(tmp_path_factory):
    """Stand elsewhere: nothing that a test writes by default, as in runs/, is in the checkout."""
    os.chdir(tmp_path_factory.mktemp("folder"))
    yield
    os.chdir(ROOT)


@pytest.fixture(autouse=True)
def folders_of_modules():
    """A folder that a test imports from, which may hold a script's name, is none after it."""
    folders = list(sys.path)
    yield
    sys.path[:] = folders


@pytest.fixture(scope="session", params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)
