"""The command line of all commands: what it takes, what it refuses in one line, and its help."""

import dataclasses
import sys
from pathlib import Path

import pytest
from support.commands import config_of_words, refusal
from support.files import ROOT, SCRIPTS
from support.small import flags, small_config

from onejit import __main__, sweep, train
from onejit.report import compare
from onejit.run.directory import read_config
from onejit.script import command_line, configs, load
from onejit.watch import render

GRID = "q_learning_gridworld --num-steps=100 --total-timesteps=2000"
TOY = "ppo_continuous --env-name=toys:ToyContinuous"
HOST = "ppo --env-name=onejit.envs.gymnasium:CartPole-v1"
SMALL = "q_learning_gridworld --num-steps=200 --total-timesteps=5400"  # 27 updates
RATES = "q_learning_gridworld --lr 0.1 0.2 0.3"
SWEEP = f"sweep {SMALL} --lr 0.01 0.02 0.05 0.1 0.2 0.3 0.5 0.8 1.0"
DRAWN = f"sweep {SMALL} --lr log-uniform 0.01 1 --samples=8"
OPTUNA = f"{DRAWN} --optuna=tpe"

REFUSED = [
    # commands
    ("trian ppo", "trian: is not a command did you mean train?"),
    *((name, f"{name}: {what}") for name, what in __main__.REMOVED.items()),
    # what older versions took
    ("train --memory 4 --resume runs/a", "--resume: is gone; use onejit resume RUN_DIR"),
    ("sweep --resume runs/a", "--resume: is gone; use onejit resume RUN_DIR"),
    ("train --find-nan runs/a", "--find-nan: is gone; use onejit find-nan RUN_DIR"),
    ("sweep --merge runs/a runs/b", "--merge: is gone onejit compare"),
    ("render runs/a --trust", "--trust: is gone SECURITY.md"),
    ("play runs/a --force", "--force: is gone"),
    (f"{DRAWN} --pbt", "--pbt: is gone examples/population.py"),
    (f"{DRAWN} --part=1/2", "--part: is gone --storage"),
    # scripts and flags
    ("train --lr=1", "SCRIPT: must come first"),
    ("train no_such_script", "script no_such_script"),
    ("sweep pppo --lr 0.1 0.2", "pppo did you mean ppo"),
    (f"train {GRID} --gama=0.9", "--gama did you mean --gamma"),
    (f"train {GRID} --learning-rate=0.9", "--learning-rate is not a flag"),
    (f"train {GRID} --", "--: is one word too many"),
    ("train q_learning_gridworld stray --lr=1", "stray: is one word too many"),
    (f"train {GRID} --lr 0.1 0.2", "--lr 0.2: is one word too many"),
    (f"sweep {SMALL} --gamma=0.5 stray --lr 1 2", "gamma stray"),
    ("resume", "run_dir: must be given"),
    ("resume runs/a runs/b", "runs/b: is one word too many"),
    ("resume runs/a --num-seeds 8", "--num-seeds: is not a flag; a run that is resumed keeps"),
    ("find-nan runs/a --num-processes 2", "--num-processes: is not a flag"),
    ("list runs --long", "--long: is not a flag"),
    ("play runs/a --second=True", "--second True: is one word too many"),
    ("play nowhere", "nowhere: is not a run directory"),
    # values
    (f"train {GRID} --lr=fast", "--lr fast: takes a number"),
    (f"train {GRID} --lr", "--lr: takes a number"),
    (f"train {GRID} --num-steps=4.5", "--num-steps 4.5: takes a whole number"),
    (f"train {GRID} --num-steps=4.0", "--num-steps 4.0: takes a whole number"),
    (f"train {GRID} --memory 1 2", "--memory 2: is one word too many"),
    (f"train {GRID} --random-starts=3", "--random-starts 3: takes True | False"),
    (f"train {GRID} --start=1", "--start 1: takes 2 values"),
    ("train ppo --hidden-sizes 8 many", "--hidden-sizes 8 many: takes a whole number"),
    ("train ppo --env-params noise", "--env-params noise: takes pairs of a name and a value"),
    (f"train {GRID} --track=paper", "--track paper: takes tensorboard | trackio | wandb"),
    (f"train {GRID} --track-seeds=True", "--track-seeds True: is one word too many"),
    (f"train {GRID} --env-name=Nowhere", "--env-name Nowhere: takes GridWorld"),
    (f"train {GRID} --num-seeds=1e10", "num_seeds = 10000000000 32 bits"),
    (f"train {GRID} --num-seeds=0", "num_seeds = 0"),
    (f"train {GRID} --seed=-1", "seed = -1"),
    (f"train {GRID} --seed=4294967296", "seed = 4294967296"),
    (f"train {GRID} --memory=-1", "memory = -1"),
    (f"train {GRID} --memory=1e-9", "memory GiB"),
    (f"train {GRID} --checkpoint-interval=-1", "checkpoint_interval = -1"),
    (f"train {GRID} --eval-episodes=-1", "eval_episodes = -1"),
    (f"train {GRID} --eval-interval=1000", "eval_interval = 1000: at most"),
    (f"train {GRID} --track-seeds", "track_seeds: needs --track tensorboard"),
    (f"train {GRID} --total-timesteps=1e18", "total_timesteps = 1000000000000000000 2,147,483,647"),
    (f"train {GRID} --total-timesteps=10", "total_timesteps"),
    ("train ppo --num-envs=0", "num_envs = 0: must be at least 1"),
    ("train ppo --num-envs=1e8", "num_envs = 100000000: must fit in 32 bits"),
    ("train ppo --hidden-sizes 64 0", "hidden_sizes = (64, 0): at least 1"),
    ("train dqn --learning-starts=-1", "learning_starts = -1: must be at least 0"),
    ("train dqn --total-timesteps=2000", "total_timesteps = 2000: the warm-up and one update"),
    ("train ppo --num-steps=2147483648", "num_steps = 2147483648: must fit in 32 bits"),
    # environments
    ("train sac --env-name=CartPole-v1", "env_name = CartPole-v1 bounded"),
    ("train ppo_continuous --env-name=Nowhere", "env_name = Nowhere"),
    ("train ppo_continuous --env-name=halfchetah", "halfchetah did you mean halfcheetah?"),
    ("train ppo --env-name=cartpole", "env_name = cartpole did you mean CartPole-v1?"),
    ("train pqn --env-name=toys:ToyMasked", "env_name = toys:ToyMasked: obs: Masked only ppo.py"),
    ("train ppo --env-name=json:Catch-bsuite", "env_name = json:Catch-bsuite only gymnax has"),
    (
        "train ppo --env-name=onejit.envs.gymnasium:CartPole-v7",
        "is not registered did you mean onejit.envs.gymnasium:CartPole-v1?",
    ),
    ("train ppo --env-name=onejit.envs.gymnasium:NoSuch-v0", "is not registered"),
    (
        "train sac --env-name=onejit.envs.gymnasium:HalfCheetah-v3",
        "env_name = onejit.envs.gymnasium:HalfCheetah-v3: gymnasium-robotics",
    ),
    (f"train {TOY} --env-params noise loud", "env_params noise loud"),
    (f"train {TOY} --env-params wings 2", "env_params: wings"),
    (f"train {HOST} --env-params vectorization_mode no", "env_params: vectorization_mode = no"),
    (f"train {HOST} --env-params wings 2", "env_params: wings"),
    # hosts
    (f"train {GRID} --num-processes=2", "coordinator"),
    (f"train {GRID} --num-processes=2 --coordinator=x --process-id=0", "coordinator = x HOST:PORT"),
    (f"train {GRID} --num-processes=2 --coordinator=a:1 --process-id=2", "process_id = 2"),
    (f"{SWEEP} --process-id=0", "coordinator"),
    # swept fields
    (f"sweep {SMALL}", "nothing to sweep over"),
    (f"sweep {SMALL} --lr 0.1 fast", "--lr fast: takes a number"),
    (f"sweep {SMALL} --lr 0.1 0.10", "lr twice"),
    (f"sweep {SMALL} --lr 0.1 0.2 --lr=0.3", "lr twice"),
    ("sweep ppo --env-name CartPole-v1 Nowhere", "env_name Nowhere"),
    ("sweep q_learning_gridworld --num-steps 200 0", "num_steps 1"),
    (f"sweep {RATES} --total-timesteps=20", "total_timesteps = 20"),
    ("sweep ppo --num-steps log-uniform 10 20 --samples=2", "num_steps float"),
    (
        f"sweep {SMALL} --lr log-uniform 1 0.01 --samples=2",
        "lr: log-uniform 1 0.01 needs 0 < LOW < HIGH",
    ),
    # options of a sweep
    (f"sweep {SMALL} --lr log-uniform 0.1 0.2", "lr: log-uniform needs --samples, draw"),
    (f"{SWEEP} --samples=2", "samples = 2: needs uniform --optuna"),
    (f"{SWEEP} --keep=-1", "keep = -1"),
    # --optuna and --storage
    (f"{SWEEP} --optuna=tpe", "optuna = tpe: needs --samples, trials"),
    (f"{SWEEP} --batch=4", "batch: goes with --optuna"),
    (f"{OPTUNA} --batch=0", "batch = 0: must be at least 1"),
    (f"{DRAWN} --optuna=cmaes", "cmaes two tpe"),
    (f"{OPTUNA} --random-starts True False", "random_starts float"),
    (f"{SWEEP} --storage=study.log", "storage: goes with --optuna"),
    (f"{OPTUNA} --storage=/nowhere/at/all/study.log", "storage = /nowhere cannot be opened"),
    (f"{OPTUNA} --storage=nodb://host/x", "storage = nodb://host/x: cannot be opened"),
    (f"{OPTUNA} --storage=", "storage: needs a file"),
    (f"{SWEEP} --optuna=grid", "optuna = grid: needs --storage"),
    (f"{DRAWN} --optuna=grid --storage=study.log", "lr: lists --optuna random"),
    # --halving
    (f"{SWEEP} --halving=1", "halving = 1: at least 2"),
    (f"{SWEEP} --halving=10", "halving = 10: at least 10 trials there are 9"),
    (f"{OPTUNA} --batch=2 --halving=3", "halving = 3: at least 3 trials there are 2"),
    (f"{SWEEP} --rungs=2", "rungs: goes with --halving"),
    (f"{SWEEP} --halving=3 --rungs=1", "rungs = 1: at least 2"),
    (f"{SWEEP} --halving=3 --rungs=5", "rungs = 5: more than 4"),
    (
        f"sweep {RATES} --halving=3 --num-steps=200 --total-timesteps=400",
        "halving = 3: few updates",
    ),
    (
        "sweep q_learning_gridworld --total-timesteps 5400 9000 --lr 0.1 0.2 --halving=2",
        "total_timesteps: --halving",
    ),
]


@pytest.mark.parametrize(("command", "words"), REFUSED)
def test_refused_in_one_line(command, words, tmp_path, monkeypatch, capfd):
    """The message has all words, and no directory is left."""
    words_given = command.split()
    if words_given[0] in ("train", "sweep") and len(words_given) > 1:
        words_given.append(f"--run-dir={tmp_path / 'run'}")
    message = refusal(words_given, capfd)
    assert all(word in message for word in words.split()), message
    assert "did you mean" not in message or "did you mean" in words, message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (f"train {GRID} --track=wandb", "wandb"),
        (f"{DRAWN} --gamma uniform 0.5 1 --optuna=tpe", "optuna"),
        (f"{DRAWN} --gamma uniform 0.5 1 --optuna=cmaes", "cmaes"),
    ],
)
def test_a_package_that_is_missing(command, package, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install {package}" in refusal(command.split(), capfd)


# --- YAML ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gama: 0.9", "bad.yaml: gama: is not a field; did you mean gamma?"),
        ("learning-rate: 1", "bad.yaml: learning-rate: is not a field"),
        ("lr: [1, 2]", "bad.yaml: lr = [1, 2]: takes a number"),
        ("lr: true", "lr = True: takes a number"),
        ("lr:", "lr = None: takes a number"),
        (f"lr: 1{'0' * 400}", "lr = 1000"),
        ("num-envs: 4.5", "num-envs = 4.5: takes a whole number"),
        ("anneal_lr: 1", "anneal_lr = 1: takes True | False"),
        ("env_name: 3", "env_name = 3: takes text"),
        ("activation: sin", "activation = sin: takes tanh | relu"),
        ("hidden_sizes: 3", "hidden_sizes = 3: takes a list"),
        ("hidden_sizes: [3, b]", "takes a whole number"),
        ("env_params: [a, 1]", "takes names with their values"),
        ("env_params: {a: [1]}", "env_params = "),
        ("- lr", "bad.yaml"),
        ("lr: [1", "bad.yaml"),
        ("", "bad.yaml"),
        ("lr: !!python/object:os.system {}", "bad.yaml"),
        ("lr: " + "[" * 3000, "bad.yaml"),
        ("env_params: &a {x: *a}", "bad.yaml"),
        ('lr: !!int ""', "bad.yaml"),
        ("lr: !!bool x", "bad.yaml"),
        ("lr: \x00", "bad.yaml"),
        ('"a\\nb": 1', "a b: is not a field"),
    ],
    ids=range(24),
)
def test_a_yaml_file_is_refused(text, words, tmp_path, capfd):
    (tmp_path / "bad.yaml").write_text(text)
    command = f"train {TOY} --run-dir={tmp_path / 'run'} --config={tmp_path / 'bad.yaml'}"
    assert words in refusal(command.split(), capfd) and not (tmp_path / "run").exists()


def test_a_config_needs_a_file(capfd):
    assert "--config: takes a path" in refusal(["train", "ppo", "--config"], capfd)
    assert str(Path.home()) in refusal(["train", "ppo", "--config=~/none.yaml"], capfd)
    message = refusal(["train", "ppo", "--config=none.yaml"], capfd)
    assert "--config none.yaml: FileNotFoundError" in message


# --- what is taken ---


def parse(script, *words, options=train.Options):
    """`(config, options)` of a command line."""
    flags = command_line.split_flags([str(word) for word in words])
    return command_line.parse_with(script, flags, options, None)[:2]


@pytest.fixture(scope="module")
def ppo():
    return load.load_script("ppo")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_read_the_same(name, tmp_path):
    """Flags and YAML, as the script's own command line does."""
    script = load.load_script(name)
    words = [*flags(small_config(script)), "--total-timesteps", "5e5"]
    expected = config_of_words(script, *words)
    assert parse(script, *words)[0] == expected
    configs.write_config(tmp_path / "config.yaml", expected)
    assert parse(script, f"--config={tmp_path / 'config.yaml'}")[0] == expected
    assert read_config(script, tmp_path / "config.yaml") == expected


def test_values_of_env_params_keep_their_types(ppo, tmp_path):
    words = ["--env-params", "a", "1", "b", "0.5", "c", "True", "d", "off", "e", "1e3"]
    expected = {"a": 1, "b": 0.5, "c": True, "d": "off", "e": 1000}
    config, _ = parse(ppo, *words)
    assert {name: repr(value) for name, value in config.env_params.items()} == {
        name: repr(value) for name, value in expected.items()
    }
    file = tmp_path / "a.yaml"
    file.write_text("env_params: {a: '1', b: 'True', c: off, d: 1.0}")
    config, _ = parse(ppo, "--config", file)
    assert dict(config.env_params) == {"a": "1", "b": "True", "c": False, "d": 1.0}


def test_flags_override_the_file_wherever_it_stands(ppo, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("total-timesteps: 7e5\ngamma: 0.5\nhidden_sizes: [8, 16]\nlr: 1e-3\n")
    changes = {"total_timesteps": 700_000, "gamma": 0.25, "hidden_sizes": (8, 16), "lr": 1e-3}
    for words in (
        ["--config", file, "--gamma", 0.25],
        ["--gamma=0.25", f"--config={file}"],
        ["--num-seeds", 2, "--config", file, "--gamma=0.25"],
    ):
        assert parse(ppo, *words)[0] == dataclasses.replace(ppo.Config(), **changes)


def test_a_file_may_have_options(ppo, tmp_path):
    (tmp_path / "a.yaml").write_text("num_seeds: 1e1\nmemory: 2\ntrack_seeds: true\n")
    _, options = parse(ppo, "--config", tmp_path / "a.yaml", "--run-dir=runs/a")
    assert (options.num_seeds, options.memory, options.track_seeds) == (10, 2.0, True)
    assert options.run_dir == Path("runs/a")
    _, options = parse(ppo, "--config", tmp_path / "a.yaml", "--memory=None")
    assert options.memory is None


def test_words_without_a_flag_are_the_first_argument():
    def read(command, *words):
        return command_line.read(command, command_line.split_flags(list(words)), {})

    assert read(render.main, "runs/a")["run_dir"] == Path("runs/a")
    found = read(compare.main, "runs/a", "b=runs/b", "--latex")
    assert found == {"runs": ("runs/a", "b=runs/b"), "latex": True}


def test_whole_numbers_as_people_write_them(ppo):
    for word in ("5e5", "500000", "5.0e+05"):
        config, options = parse(ppo, "--total-timesteps", word, "--num_envs=8e0", "--num-seeds=1e1")
        assert (config.total_timesteps, config.num_envs, options.num_seeds) == (500_000, 8, 10)
        assert type(config.total_timesteps) is int


def test_types_of_a_script_that_imports_annotations():
    """They are words."""
    code = """from __future__ import annotations
@dataclasses.dataclass
class Config:
    total_timesteps: int = 3
    lr: float = 1.0
"""
    names = {"dataclasses": dataclasses, "__name__": __name__}
    exec(code, names)
    known = command_line.flags_of(names["Config"])
    assert {name: flag.kind for name, flag in known.items()} == {
        "total_timesteps": int,
        "lr": float,
    }


def test_a_field_of_the_script_named_like_a_flag_of_onejit(tmp_path, capsys):
    """The script's field keeps its flag, and the other one gets a prefix."""
    text = (ROOT / "q_learning_gridworld.py").read_text()
    own = "    height: int"
    assert text.count(own) == 1
    text = text.replace(own, f'    memory: str = "gru"\n    samples: int = 3\n{own}')
    (tmp_path / "mine.py").write_text(text)
    script = load.load_script(tmp_path / "mine.py")
    words = ["--memory=lstm", "--samples=4", "--onejit-memory=2", "--num-seeds=3"]
    config, options = parse(script, *words)
    assert (config.memory, config.samples, options.memory, options.num_seeds) == ("lstm", 4, 2.0, 3)
    configs.write_config(tmp_path / "config.yaml", config)
    assert read_config(script, tmp_path / "config.yaml") == config
    config, options = parse(script, *words, "--onejit-samples=8", options=sweep.Options)
    assert (config.samples, options.samples, options.memory) == (4, 8, 2.0)
    with pytest.raises(SystemExit):
        parse(script, "--help")
    assert "--onejit-memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "onejit train ppo;onejit resume RUN_DIR;onejit find-nan RUN_DIR"),
        ("train --help", "onejit train ppo;onejit resume"),
        ("sweep --help", "onejit sweep SCRIPT --help"),
        ("train q_learning_gridworld -h", "usage: onejit train q_learning_gridworld;--cliff-rew"),
        (
            "sweep ppo --help",
            "usage: onejit sweep ppo;log-uniform;--samples;--memory;--coordinator",
        ),
        ("resume --help", "usage: onejit resume;--total-timesteps;--force;--coordinator"),
        ("resume runs/a --help", "usage: onejit resume;a sweep"),
        ("find-nan --help", "usage: onejit find-nan;--memory"),
        ("render runs/a --help", "usage: onejit render;--formats"),
    ],
)
def test_help(command, words, capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(command.split())
    said = capsys.readouterr().out
    assert not stop.value.code and all(word in said for word in words.split(";")), said
