"""What pyproject.toml says of the package, the command line of `onejit`, and what stands at the
repository's root.
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml
from packaging.version import Version
from support.files import ROOT, SCRIPTS, repository_files

import onejit
from onejit import __main__
from onejit.__main__ import COMMANDS, MODULE_OF
from onejit.base import packages

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_requirements_are_those_of_the_project():
    """requirements.txt, and what `make` installs for the tests, with the extra that `dev` names."""
    program = ["tools/requirements.py", "dev"]
    done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    extras = PROJECT["project"]["optional-dependencies"]
    first, *others = extras["dev"]
    assert first == "onejit[tools]" and lines[-len(others) :] == others
    lines = lines[: -len(others)]
    assert lines[-len(extras["tools"]) :] == extras["tools"]
    lines = lines[: -len(extras["tools"])]
    assert lines[1:] == PROJECT["project"]["dependencies"]
    assert lines == (ROOT / "requirements.txt").read_text().splitlines(), "run `make pins`"


@pytest.mark.slow  # downloads hatchling
def test_the_wheel_carries_all_scripts(tmp_path):
    """It is built from the sdist, which therefore holds the build hook."""
    build = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    scripts = {f"onejit/scripts/{name}.py" for name in SCRIPTS}
    assert {name for name in names if name.startswith("onejit/scripts/")} == scripts
    package = {str(path.relative_to(ROOT)) for path in repository_files("onejit/**/*.*")}
    assert {name for name in names if ".dist-info/" not in name} == scripts | package


def test_one_version_everywhere():
    versions = re.findall(r"(?m)^## (\S+) - ", (ROOT / "CHANGELOG.md").read_text())
    assert versions[0] == onejit.__version__
    assert f"version: {onejit.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_public_ci_runs_the_oldest_python_and_a_newer_one():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    oldest, newest = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert Version(newest) > Version(oldest)
    weekly = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text())
    assert weekly["jobs"]["newest"]["steps"][-1] == {"run": "make newest"}


def test_each_command_is_a_module_with_a_main():
    commands = {"train", "sweep", "resume", "find-nan", "list", "compare", "render", "play"}
    assert commands == set(COMMANDS)
    for name in COMMANDS:
        assert f"\n    onejit {name} " in __main__.__doc__
        path = ROOT / MODULE_OF[name].replace(".", "/")
        file = path.with_suffix(".py")
        if not file.is_file():  # a command of several modules
            file = path / "__init__.py"
        assert "\ndef main(" in file.read_text(), name


def test_importing_the_package_starts_no_jax(tmp_path):
    """Its functions are imported when they are used: workers of Gymnasium import the package.

    docs/bring_your_own.md imports the names in the last lines.
    """
    code = "import sys, onejit.envs.host.rows; assert 'jax' not in sys.modules\n"
    code += "onejit.load_run; assert 'onejit.run.directory' in sys.modules\n"
    code += "from onejit.envs import register\n"
    code += "from onejit.envs.host import Batch, HostEnv, close_all"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_help_starts_quickly_and_lists_the_commands(tmp_path):
    """Without importing JAX."""
    code = "import sys\nfrom onejit.__main__ import main\n"
    code += "try: main(['--help'])\nfinally: assert 'jax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(f"onejit {name}" in done.stdout for name in COMMANDS)


def test_versions_of_all_installed_packages_are_recorded():
    """A distribution may be called Navix."""
    installed = {}
    for distribution in importlib.metadata.distributions():
        installed.setdefault(distribution.name.lower(), distribution.version)
    recorded = packages.versions()
    assert recorded.pop("onejit") == onejit.__version__
    assert recorded.pop("python") == sys.version.split()[0]
    assert recorded == {name: installed[name] for name in packages.RECORDED if name in installed}
