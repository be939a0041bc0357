"""What the scripts reach with the configs that are here, over many seeds: makes docs/results.md, or rows of it, again.

    python benchmarks/returns.py ppo/cartpole dqn/cartpole   # rows by name, SCRIPT/CONFIG
    python benchmarks/returns.py ppo/breakout@1e7            # the config with --total-timesteps 1e7
    python benchmarks/returns.py                             # all rows that are not measured yet: hours
    python benchmarks/returns.py --render                    # the page alone, from what was measured
    python benchmarks/returns.py --plan                      # what rows for a GPU would take, by onejit plan

A row is one run of onejit train from start to end. Agents of classic control then play in Gymnasium too, which has
environments of its own. benchmarks/results/SCRIPT_CONFIG.json (SCRIPT_CONFIG_STEPS.json) keeps the returns of each
seed, the learning curve, hardware, versions, commit and command. All rows take seed 100; configs were tuned with other
seeds.
"""

import argparse
import fnmatch
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault(
    "JAX_NUM_CPU_DEVICES", str(os.cpu_count())
)  # read when JAX is imported; onejit train too

import gymnasium
import jax
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onejit import command_line, runs, statistics  # noqa: E402

MEASURED, PAGE, FIGURES = (
    ROOT / "benchmarks" / "results",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "figures",
)
PLANS_FILE, PEERS_FILE = MEASURED / "plans.json", MEASURED / "peers.json"
SEED = 100

MUJOCO = ("halfcheetah", "hopper", "walker2d", "ant", "swimmer", "reacher")
MUJOCO += ("inverted_pendulum", "inverted_double_pendulum")
SEEDS = {  # of each row; a row SCRIPT/CONFIG@STEPS is the config with --total-timesteps STEPS
    32: """ppo/cartpole ppo/cartpole_fast pqn/cartpole dqn/cartpole ppo/acrobot pqn/acrobot dqn/acrobot
        ppo/mountaincar pqn/mountaincar ppo_continuous/mountaincar_continuous ppo_continuous/pendulum
        dpo_continuous/pendulum ppo/catch pqn/catch dqn/catch ppo/deepsea pqn/deepsea dqn/deepsea ppo/fourrooms
        pqn/fourrooms dqn/fourrooms ppo/frozenlake pqn/frozenlake dqn/frozenlake ppo_rnn/memory_chain
        ppo_rnn/umbrella_chain ppo_rnn/bandit ppo_continuous/reacher dpo_continuous/reacher
        ppo_continuous/pointrobot dpo_continuous/pointrobot ppo_continuous/hopper dpo_continuous/hopper
        ppo_continuous/inverted_pendulum dpo_continuous/inverted_pendulum ppo_continuous/inverted_double_pendulum
        dpo_continuous/inverted_double_pendulum q_learning_gridworld/gridworld_8x12 q_learning_gridworld/cliff
        q_learning_gridworld/walls reppo/pendulum reppo/reacher""",
    16: """ppo_rnn/cartpole_masked apex_dqn/cartpole apex_dqn/acrobot apex_dqn/catch dqn/mountaincar
        sac/pendulum td3/pendulum rainbow/cartpole
        sac/mountaincar_continuous td3/mountaincar_continuous sac/reacher td3/reacher sac/pointrobot td3/pointrobot""",
    10: " ".join(
        f"ppo_continuous/mujoco_{robot}{steps}" for steps in ("", "@3e6") for robot in MUJOCO
    )
    + " reppo/mujoco_halfcheetah reppo/mujoco_walker2d reppo/inverted_double_pendulum mappo/simple_spread"
    + " ppo_continuous/cartpole_swingup reppo/cartpole_swingup"
    + " ppo_continuous/cheetah_run reppo/cheetah_run ppo_continuous/halfcheetah_spring reppo/halfcheetah_spring",
    8: """ppo/breakout ppo/asterix ppo/freeway ppo/spaceinvaders pqn/breakout pqn/asterix pqn/freeway
        pqn/spaceinvaders dqn/breakout dqn/asterix dqn/freeway dqn/spaceinvaders dqn/seaquest apex_dqn/breakout
        sac/hopper td3/hopper sac/inverted_double_pendulum td3/inverted_double_pendulum reppo/hopper
        rainbow/breakout rainbow/asterix rainbow/freeway rainbow/spaceinvaders rainbow/seaquest
        ppo/breakout@1e7 ppo/asterix@1e7 ppo/freeway@1e7 ppo/spaceinvaders@1e7 ppo/seaquest@1e7
        pqn/breakout@1e7 pqn/asterix@1e7 pqn/freeway@1e7 pqn/spaceinvaders@1e7 pqn/seaquest@1e7
        dqn/breakout@5e6 dqn/asterix@5e6 dqn/freeway@5e6 dqn/spaceinvaders@5e6 dqn/seaquest@5e6""",
    6: " ".join(f"{name}/mujoco_{robot}" for name in ("sac", "td3") for robot in MUJOCO[:4]),
    5: "mappo/cramped_room mappo/smax_3m@1e6 mappo/smax_2s3z@5e5",
    4: "sac/mujoco_halfcheetah@1e6 td3/mujoco_halfcheetah@1e6 ppo/craftax_classic@1e7",
    3: "pqn/atari_pong pqn/atari_breakout",
}


def config_of(row: str) -> Path:
    """The file of a row's config, from the root of the repository."""
    return Path("configs", row.partition("@")[0] + ".yaml")


ROWS = {  # a row whose config is not there yet is none
    row: seeds
    for seeds, rows in SEEDS.items()
    for row in rows.split()
    if (ROOT / config_of(row)).exists()
}
ALSO = {  # further flags of rows: of the script, and of onejit train if they begin with --eval
    **{
        f"pqn/{game}": ["--total-timesteps", "1e6"]
        for game in ("breakout", "asterix", "freeway", "spaceinvaders")
    },
    **{f"ppo_continuous/mujoco_{robot}": ["--eval-interval", "61"] for robot in MUJOCO},  # 8 times
    **{f"reppo/mujoco_{robot}": ["--eval-interval", "61"] for robot in ("halfcheetah", "walker2d")},
    **{f"ppo_continuous/mujoco_{robot}@3e6": ["--eval-interval", "183"] for robot in MUJOCO},
    **{f"sac/mujoco_{robot}": ["--eval-interval", "25000"] for robot in MUJOCO[:4]},
    **{f"{name}/mujoco_halfcheetah@1e6": ["--buffer-size", "1000000"] for name in ("sac", "td3")},
    **{f"td3/mujoco_{robot}": ["--eval-interval", "12500"] for robot in MUJOCO[:4]},
}
PLANNED = {  # rows for a GPU: seeds
    **{f"ppo_continuous/{robot}": 32 for robot in ("ant", "halfcheetah", "walker2d", "humanoid")},
    **{
        f"{name}/{robot}": 8
        for name in ("sac", "td3")
        for robot in ("ant", "halfcheetah", "walker2d")
    },
    "reppo/playground_cheetah_run": 8,
    **{
        f"ppo/{game}": 256
        for game in ("breakout", "asterix", "freeway", "spaceinvaders", "seaquest")
    },
    **{
        f"pqn/{game}": 64
        for game in ("breakout", "asterix", "freeway", "spaceinvaders", "seaquest")
    },
    "rainbow/breakout": 64,
    "alphazero/animal_shogi": 1,
    "alphazero/go_9x9": 1,
}
LONGER = {row: ["--total-timesteps", "1e7"] for row in PLANNED if row.startswith("ppo/")}
HOURS = {  # {pattern of rows: processor hours on an AMD EPYC, from rows that are shorter or have a similar task}
    "ppo_continuous/mujoco_[hsriw]*@3e6": "0.2 to 1",
    "ppo_continuous/mujoco_ant@3e6": "2",
    "ppo/craftax_classic@1e7": "2",
    "ppo/seaquest@1e7": "1.5",
    "ppo/*@1e7": "0.5",
    "pqn/*@1e7": "2",
    "dqn/*@5e6": "0.7",
    "dqn/*": "0.2",
    "rainbow/cartpole": "0.2",
    "rainbow/*": "0.3",
    "reppo/mujoco_*": "0.3",
    "*/halfcheetah_spring": "0.3",
    "*/cheetah_run": "0.3",
    "reppo/*": "0.2",
    "mappo/*": "0.7",
    "*/mujoco_halfcheetah@1e6": "5",
    "pqn/atari_*": "7",
    "sac/mujoco_*": "2",
    "td3/mujoco_*": "2",
    "*": "",
}
GYMNASIUM = {
    "CartPole-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
}

GITHUB = "https://github.com"
ZOO_TABLE = (
    f"{GITHUB}/DLR-RM/rl-baselines3-zoo/blob/22e3ff2450fd92033f7f032915e1f64894a09584/benchmark.md"
)
CLEANRL_DOCS = f"{GITHUB}/vwxyzjn/cleanrl/blob/fe8d8a03c41a7ef5b523e2e354bd01c363e786bb/docs"
BLINES_AGENTS = (
    f"{GITHUB}/RobertTLange/gymnax-blines/blob/3f029d6b98afb0d654d387b5bc0f7a592373ad66/agents"
)
TIANSHOU_TABLE = f"{GITHUB}/thu-ml/tianshou/blob/f240205/examples/mujoco/README.md"
SLM_TABLE = f"{GITHUB}/kengz/SLM-Lab/blob/96be393/docs/BENCHMARKS.md"
SIMBA_FILE = f"{GITHUB}/DAVIAN-Robotics/SimbaV2/blob/86899c277cdc697b2b02d827243de1ea93f20a1d/results/baseline/sac.csv"
TD3_CURVES = f"{GITHUB}/sfujim/TD3/tree/34770ccdcb51df6f6c7d85c1ba7e40d71b940d16/learning_curves"


def zoo(line: int) -> str:
    return f"[RL Zoo]({ZOO_TABLE}?plain=1#L{line})"


def cleanrl(file: str, line: int) -> str:
    return f"[CleanRL]({CLEANRL_DOCS}/{file}.md?plain=1#L{line})"


def blines(file: str) -> str:
    return f"[gymnax-blines]({BLINES_AGENTS}/{file}.pkl)"


def td3_curve(robot: str) -> str:
    return f"[TD3's authors]({TD3_CURVES}/{robot}), Gym v1"


OPEN = "[OPEN](https://arxiv.org/abs/2407.07082)"
SCORER = "[SCORER](https://arxiv.org/abs/2508.07452)"
YOUNG = "[Young and Tian](https://arxiv.org/abs/1903.03176)"
PGX = f"[pgx]({GITHUB}/sotetsuk/pgx/tree/079b2d7/examples/minatar-ppo)"
PPO2 = f"[Stable Baselines]({GITHUB}/HumanCompatibleAI/imitation/issues/56)"
TIANSHOU_PPO, TIANSHOU_SAC, TIANSHOU_TD3 = (
    f"[Tianshou]({TIANSHOU_TABLE}#{name}), Gym v3" for name in ("ppo", "sac", "td3")
)
SLM = f"[SLM-Lab]({SLM_TABLE})"
SIMBA = f"[SimbaV2's files]({SIMBA_FILE})"
STICKY = "with sticky actions"


class Public(NamedTuple):
    """A published score."""

    scripts: tuple  # the scripts here that it is compared with
    score: float
    steps: float  # environment steps at which it was reached
    algorithm: str
    source: str  # a link to the table or file
    rules: str = ""  # what is another task than here; then nothing is compared


PPO, DQN = ("ppo", "ppo_continuous", "dpo_continuous"), ("dqn", "apex_dqn", "rainbow")
SOURCES = {  # {what a cell names: what its figures are}
    "RL Zoo": "one agent, mean of its greedy episodes over 150,000 steps",
    "CleanRL": "mean of 3 seeds, return of the exploring policy at the end of training",
    "gymnax-blines": "one agent, mean of 164 episodes. Each file holds a curve. We take the last point, or the last "
    "point within the steps of a row, from the learning rate that is best there",
    "Stable Baselines": "mean of 3 seeds, return of the exploring policy at the end of training",
    "SLM-Lab": "mean of 4 seeds, moving average of the return of the exploring policy at the end of training",
    "Tianshou": "mean of 10 seeds, the highest point of the curve of greedy returns",
    "ikostrikov's code": "read off a plot by Tianshou, about 4000",
    "SimbaV2's files": "mean of 10 seeds, greedy return at that step, computed by us from the file",
    "TD3's authors": "mean of 10 seeds, greedy return at that step, computed by us from the files",
    "OPEN": "PPO with Adam, return at the end of training",
    "SCORER": "interquartile mean of 30 seeds at the end of training",
    "Young and Tian": "mean of 30 seeds, running mean of the return, read off a plot",
    "pgx": "return of the trained agent, read off a plot",
}
PUBLIC = {  # {environment: published scores}
    "CartPole-v1": [
        Public(("ppo",), 500, 1e5, "PPO", zoo(96)),
        Public(DQN, 500, 5e4, "DQN", zoo(77)),
        Public(("pqn",), 495.1, 5e5, "PQN", cleanrl("rl-algorithms/pqn", 86)),
        Public(("ppo_rnn",), 500, 1e5, "recurrent PPO, velocities masked", zoo(129)),
    ],
    "Acrobot-v1": [
        Public(("ppo",), -86.4, 5e5, "PPO", cleanrl("rl-algorithms/ppo", 112)),
        Public(("ppo",), -78.9, 4.96e5, "PPO", blines("Acrobot-v1/ppo")),
        Public(("ppo",), -73.5, 1e6, "PPO", zoo(87)),
        Public(("ppo",), -73.0, 1e6, "PPO", PPO2),
        Public(DQN, -76.6, 1e5, "DQN", zoo(73)),
        Public(("pqn",), -95.6, 5e5, "PQN", cleanrl("rl-algorithms/pqn", 87)),
    ],
    "MountainCar-v0": [
        Public(("ppo",), -118.3, 2.4e5, "PPO", blines("MountainCar-v0/ppo")),
        Public(("ppo",), -110.4, 1e6, "PPO", zoo(115)),
        Public(DQN, -100.8, 1.2e5, "DQN", zoo(80)),
        Public(("pqn",), -200, 5e5, "PQN", cleanrl("rl-algorithms/pqn", 88)),
    ],
    "Pendulum-v1": [
        Public(PPO, -172.2, 1e5, "PPO", zoo(118)),
        Public(PPO, -195.1, 9.92e5, "PPO", blines("Pendulum-v1/ppo0.001")),
        Public(("sac",), -157.0, 2e4, "SAC", zoo(157)),
        Public(("sac",), -151.0, 3e5, "SAC", SLM),
        Public(("td3",), -151.9, 2e4, "TD3", zoo(173)),
    ],
    "MountainCarContinuous-v0": [
        Public(PPO, 88.3, 2e4, "PPO", zoo(116)),
        Public(("sac",), 94.7, 5e4, "SAC", zoo(156)),
        Public(("td3",), 93.5, 3e5, "TD3", zoo(172)),
    ],
    "Catch-bsuite": [Public(("ppo", "pqn", *DQN), 1, 9.6e4, "PPO", blines("Catch-bsuite/ppo"))],
    "DeepSea-bsuite": [Public(("ppo",), 0, 1.44e5, "PPO", blines("DeepSea-bsuite/ppo"))],
    "FourRooms-misc": [
        Public(
            ("ppo", "pqn", *DQN),
            1,
            2e5,
            "PPO",
            blines("FourRooms-misc/ppo"),
            "with random starts and observed as a map",
        ),
    ],
    "UmbrellaChain-bsuite": [
        Public(
            ("ppo_rnn",),
            0.98,
            1.44e5,
            "PPO",
            blines("UmbrellaChain-bsuite/ppo"),
            "with a chain of 10 steps",
        ),
    ],
    "Breakout-MinAtar": [
        Public(("ppo", "pqn"), 20.3, 9.6e5, "PPO", blines("Breakout-MinAtar/ppo0.001")),
        Public(("ppo", "pqn"), 43.4, 9.92e6, "PPO", blines("Breakout-MinAtar/ppo0.001")),
        Public(("ppo", "pqn"), 50.1, 1e7, "PPO", OPEN),
        Public(DQN, 36.5, 1e8, "double DQN", SCORER),
        Public(DQN, 10, 5e6, "DQN", YOUNG, STICKY),
    ],
    "Asterix-MinAtar": [
        Public(("ppo", "pqn"), 2.46, 9.6e5, "PPO", blines("Asterix-MinAtar/ppo0.001")),
        Public(("ppo", "pqn"), 17.8, 9.92e6, "PPO", blines("Asterix-MinAtar/ppo0.001")),
        Public(DQN, 54.95, 1e8, "DQN", SCORER),
        Public(DQN, 17, 5e6, "DQN", YOUNG, STICKY),
    ],
    "Freeway-MinAtar": [
        Public(("ppo", "pqn"), 30.2, 9.6e5, "PPO", blines("Freeway-MinAtar/ppo0.0001")),
        Public(("ppo", "pqn"), 58.8, 9.92e6, "PPO", blines("Freeway-MinAtar/ppo")),
        Public(("ppo", "pqn"), 61.8, 1e7, "PPO", OPEN),
        Public(DQN, 62.7, 1e8, "DQN", SCORER),
        Public(DQN, 50, 5e6, "DQN", YOUNG, STICKY),
    ],
    "SpaceInvaders-MinAtar": [
        Public(("ppo", "pqn"), 58.1, 9.6e5, "PPO", blines("SpaceInvaders-MinAtar/ppo0.001")),
        Public(("ppo", "pqn"), 131.6, 9.92e6, "PPO", blines("SpaceInvaders-MinAtar/ppo")),
        Public(("ppo", "pqn"), 167.1, 1e7, "PPO", OPEN),
        Public(DQN, 127.8, 1e8, "DQN", SCORER),
        Public(DQN, 45, 5e6, "DQN", YOUNG, STICKY),
    ],
    "Seaquest-MinAtar": [
        Public(("ppo", "pqn"), 54, 2e7, "PPO", PGX, STICKY),
        Public(DQN, 20, 5e6, "DQN", YOUNG, STICKY),
    ],
    "HalfCheetah-v4": [
        Public(PPO, 1443, 1e6, "PPO", cleanrl("benchmark/ppo_continuous_action", 3)),
        Public(PPO, 5784, 1e6, "PPO", TIANSHOU_PPO),
        Public(PPO, 5819, 1e6, "PPO", f"{zoo(98)}, Gym v3"),
        Public(PPO, 7337, 3e6, "PPO", TIANSHOU_PPO),
        Public(("sac",), 8593, 3e5, "SAC", SIMBA),
        Public(("sac",), 12139, 1e6, "SAC", TIANSHOU_SAC),
        Public(("sac",), 14298, 3e6, "SAC", SIMBA),
        Public(("td3",), 7697, 3e5, "TD3", td3_curve("HalfCheetah")),
        Public(("td3",), 10201, 1e6, "TD3", TIANSHOU_TD3),
    ],
    "Hopper-v4": [
        Public(PPO, 2383, 1e6, "PPO", cleanrl("benchmark/ppo_continuous_action", 5)),
        Public(PPO, 2609, 1e6, "PPO", TIANSHOU_PPO),
        Public(PPO, 3128, 3e6, "PPO", TIANSHOU_PPO),
        Public(("sac",), 2160, 3e5, "SAC", SIMBA),
        Public(("sac",), 3542, 1e6, "SAC", TIANSHOU_SAC),
        Public(("td3",), 2410, 3e5, "TD3", td3_curve("Hopper")),
        Public(("td3",), 3606, 1e6, "TD3", f"{zoo(168)}, Gym v3"),
    ],
    "Walker2d-v4": [
        Public(PPO, 2288, 1e6, "PPO", cleanrl("benchmark/ppo_continuous_action", 4)),
        Public(PPO, 3589, 1e6, "PPO", TIANSHOU_PPO),
        Public(PPO, 4000, 1e6, "PPO", f"[ikostrikov's code]({TIANSHOU_TABLE}#ppo), Gym v2"),
        Public(PPO, 4896, 3e6, "PPO", TIANSHOU_PPO),
        Public(("sac",), 2470, 3e5, "SAC", SIMBA),
        Public(("sac",), 5007, 1e6, "SAC", TIANSHOU_SAC),
        Public(("sac",), 5234, 3e6, "SAC", SIMBA),
        Public(("td3",), 3335, 3e5, "TD3", td3_curve("Walker")),
        Public(("td3",), 4718, 1e6, "TD3", f"{zoo(177)}, Gym v3"),
    ],
    "Ant-v4": [
        Public(PPO, 3258, 1e6, "PPO", TIANSHOU_PPO),
        Public(PPO, 4079, 3e6, "PPO", TIANSHOU_PPO),
        Public(("sac",), 3532, 3e5, "SAC", SIMBA),
        Public(("sac",), 5850, 1e6, "SAC", TIANSHOU_SAC),
        Public(("td3",), 1953, 3e5, "TD3", td3_curve("Ant")),
        Public(("td3",), 5813, 1e6, "TD3", f"{zoo(162)}, Gym v3"),
    ],
    "Swimmer-v4": [
        Public(PPO, 66.7, 1e6, "PPO", TIANSHOU_PPO),
        Public(PPO, 281.6, 1e6, "PPO", f"{zoo(125)}, Gym v3"),
        Public(PPO, 282.4, 4e6, "PPO", f"{SLM}, Gymnasium v5"),
    ],
    "Reacher-v4": [
        Public(PPO, -4.1, 1e6, "PPO", TIANSHOU_PPO.replace("v3", "v2")),
        Public(PPO, -3.7, 3e6, "PPO", TIANSHOU_PPO.replace("v3", "v2")),
    ],
    "InvertedPendulum-v4": [
        Public(PPO, 963, 1e6, "PPO", cleanrl("benchmark/ppo_continuous_action", 6)),
        Public(PPO, 1000, 1e6, "PPO", TIANSHOU_PPO.replace("v3", "v2")),
    ],
    "InvertedDoublePendulum-v4": [Public(PPO, 9231, 1e6, "PPO", TIANSHOU_PPO.replace("v3", "v2"))],
}
GYMNASIUM_SAYS = "Gymnasium's reward threshold"
LONG = ", 5e6 steps or more"  # thresholds of longer trainings
HALF_SHORT = "half of PPO's return after 9.6e5 steps in gymnax-blines: {}"
HALF_LONG = "half of PPO's return after 9.92e6 steps in gymnax-blines: {}"
HALF_CLEANRL = "half of PPO's return after 1e6 steps in CleanRL: {}"
THRESHOLDS = {  # {environment: (an agent has failed below this return, where that comes from)}
    "CartPole-v1": (475, GYMNASIUM_SAYS),
    "Acrobot-v1": (-100, GYMNASIUM_SAYS),
    "MountainCar-v0": (-110, GYMNASIUM_SAYS),
    "MountainCarContinuous-v0": (90, GYMNASIUM_SAYS),
    "Pendulum-v1": (-200, "a fixed number; PPO ends at -195 after 9.92e5 steps in gymnax-blines"),
    "Catch-bsuite": (0.9, "19 of 20 balls are caught"),
    "DeepSea-bsuite": (0.5, "0.99 with the one reward, 0 or less without it"),
    "FourRooms-misc": (0.9, "9 of 10 episodes reach the goal"),
    "FrozenLake-misc": (
        0.7,
        "Gymnasium's reward threshold of FrozenLake-v1, which has the same map",
    ),
    "MemoryChain-bsuite": (0.9, "19 of 20 answers are right"),
    "UmbrellaChain-bsuite": (0.5, "three of four choices are right; the best expected return is 1"),
    "BernoulliBandit-misc": (80, "always pulling the better arm gives 90, a random arm 50"),
    "inverted_pendulum": (
        950,
        "Gymnasium's reward threshold of InvertedPendulum-v5, which has the same reward",
    ),
    "inverted_double_pendulum": (
        9100,
        "Gymnasium's reward threshold of InvertedDoublePendulum-v5, which has a similar reward",
    ),
    "GridWorld, gridworld_8x12": (0.9, "9 of 10 episodes reach the goal"),
    "GridWorld, cliff": (-17, "the return of the longest sensible path, along the upper edge"),
    "GridWorld, walls": (
        0.8,
        "20 steps to the goal, from a random cell; the farthest is 18 steps away",
    ),
    "Breakout-MinAtar": (10.2, HALF_SHORT.format(20.3)),
    "Asterix-MinAtar": (1.23, HALF_SHORT.format(2.46)),
    "Freeway-MinAtar": (15.1, HALF_SHORT.format(30.2)),
    "SpaceInvaders-MinAtar": (29, HALF_SHORT.format(58.1)),
    "Breakout-MinAtar" + LONG: (21.7, HALF_LONG.format(43.4)),
    "Asterix-MinAtar" + LONG: (8.9, HALF_LONG.format(17.8)),
    "Freeway-MinAtar" + LONG: (29.4, HALF_LONG.format(58.8)),
    "SpaceInvaders-MinAtar" + LONG: (65.8, HALF_LONG.format(131.6)),
    "HalfCheetah-v4": (721, HALF_CLEANRL.format(1443)),
    "Hopper-v4": (1191, HALF_CLEANRL.format(2383)),
    "Walker2d-v4": (1144, HALF_CLEANRL.format(2288)),
    "Ant-v4": (912, "half of PPO's return after 8e6 steps in CleanRL: 1824"),
    "Swimmer-v4": (62.4, "half of PPO's return after 8e6 steps in CleanRL: 124.9"),
    "Reacher-v4": (-9.3, "twice PPO's cost after 8e6 steps in CleanRL: -4.65"),
    "InvertedPendulum-v4": (950, GYMNASIUM_SAYS),
    "InvertedDoublePendulum-v4": (9100, GYMNASIUM_SAYS),
}
WHY = {  # {row: why it is below the public return, or that nobody has found out}
    "ppo_continuous/mujoco_inverted_double_pendulum": "the published score is the highest point of a curve of greedy "
    "returns. The highest point of our curve is an IQM of 9360 after 5e5 steps. After that the curve falls. At the "
    "end, seven of the ten agents let the poles fall in one of the 16 greedy episodes, after about ten steps, and "
    "return 8780. The row's command with `--eval-episodes 128` (Intel Xeon, ten agents) measures the decline more "
    "finely: the poles fall in 5 of 1280 greedy episodes after 5e5 steps, and in 60 after 1e6 steps. With episodes of "
    "100 steps (`--env-params max_steps_in_episode 100`) there is no decline: the poles fall in 3 of 1280 after 1e6 "
    "steps. Agents with long episodes therefore seem to forget how an episode starts: once the poles stay up, only "
    "one in 1000 steps of the training data is a start.",
    "ppo/acrobot": "the published score is of one agent. 11 of the 32 agents here have at least its greedy return.",
    "dqn/acrobot": "the published score is of one agent. 4 of the 32 agents here have at least its greedy return.",
    "apex_dqn/acrobot": "the published score is of one agent trained by DQN. The best of the 16 agents here has a "
    "greedy return of -78.06. The settings are the script's defaults, which were tuned for CartPole-v1.",
    "dqn/mountaincar": "the published score is of one agent. 4 of the 16 agents here have at least its greedy return, "
    "and two have greedy returns of -158 and -142.",
    "sac/mountaincar_continuous": "the public figure is of one agent. Discounts of 0.995, 0.999 and 0.9999, target "
    "entropies of -2 and -3 and a learning rate of 2e-3 ended at 92.7 to 94.2 (6 other seeds each). None came closer.",
}
NOTES = {  # {row: what has to be known to read it}
    "sac/inverted_double_pendulum": "none of the eight agents learns to keep both poles up. A possible cause is the "
    "short step of 0.02 s: a single action hardly changes the value. One agent (seed 7, 2e5 steps with the earlier "
    "settings below) ends with a root mean squared TD error of 15, and its poles fall after 140 steps. In the first "
    "45 of them its Q-values are between 640 and 680, and the Q-values of five actions between -1 and 1 differ by "
    "less than 18. Steps of 0.05 s, as in Gymnasium's task (`--env-params backend spring n_frames 10`), help but do "
    "not solve the task. With the earlier settings (discount 0.99, tau 0.005, white noise, 16 gradient steps), three "
    "agents (seed 7) return 4492 after 1e6 steps (95 % interval 1975 to 7009), and eight agents with steps of 0.02 s "
    "return 1564. "
    "Correlated noise, target critics that follow ten times as fast and twice as many gradient steps reach 2329 in "
    "half of the steps. Single agents of the trials had greedy returns of 7674 and 8334. Other networks, learning "
    "rates, batch sizes, target entropies and discounts, and observations that are not normalized, did not solve the "
    "task.",
    "td3/inverted_double_pendulum": "no agent learns to keep both poles up. Three agents return 1567 after 5e5 steps.",
    "ppo_continuous/mujoco_inverted_double_pendulum@3e6": "six of the ten agents have greedy returns of 9332 or more. "
    "The other four have 7031, 5898, 4148 and 487. The IQM is 9360 after 3.7e5 steps and falls after that, as in the "
    "row of 1e6 steps. Whether the cause is the same was not tested.",
    "ppo_rnn/umbrella_chain": "all 32 agents choose right in all 16 greedy episodes, and a greedy return of 0 is the "
    "best that these episodes allow. An episode pays 1 for the right choice and adds 19 random rewards of 1 or -1. All "
    "agents get the same 16 episodes, whose random rewards sum to -1 on average. An agent that chooses wrong gets -2 "
    "there. Over 1024 episodes an agent that chooses right gets 1.00.",
    "sac/mujoco_halfcheetah": "the learning rate of 1e-3 and the 5000 random steps come from "
    "[CrossQ's code](https://github.com/adityab/CrossQ). The published curve was probably made with that code, because "
    "both evaluate every 16,666 steps. The curve is of ten agents between 7103 and 9843, with a 95 % interval of 7866 "
    "to 9320. With learning rates of 3e-4, as in SAC's paper, and 10,000 random steps, six agents (seed 100) had a "
    "final return of 7032 (95 % interval 6318 to 7746).",
    "td3/mujoco_halfcheetah": "the config has the hyperparameters of the code that made the published curve. With "
    "those of the authors' later code (learning rates of 3e-4, batches of 256, two layers of 256 units and 25,000 "
    "random steps), six agents (seed 100) had a final return of 6113 (95 % interval 5520 to 6707) "
    "and a greedy return of 6524 (5798 to 7249).",
    "ppo_continuous/mujoco_ant": "the greedy return was measured with a bug that is now fixed: the first action of "
    "each greedy episode used the observation of a different start state, and the 16 episodes may have been "
    "identical. The greedy return may therefore be too low. The final return is not affected.",
}
OF_BREAKOUT = "none: the settings of Breakout"
OF_PPO = "none: PPO's settings"
OF_CHEETAH, CHEETAHS = "none: the settings of HalfCheetah-v4", ("halfcheetah_spring", "cheetah_run")
OF_AUTHORS = "none: the authors' settings"
TUNING = {  # {config: how many trials its settings took and with which seeds, where somebody wrote it down}
    **{
        f"{name}/{game}": OF_BREAKOUT
        for name in ("ppo", "dqn", "rainbow")
        for game in ("asterix", "freeway", "spaceinvaders", "seaquest")
    },
    "ppo/asterix": "8 settings, 2 or 4 agents each, 2e6 or 1e7 steps, seed 7",
    "ppo/seaquest": "none: the settings of Asterix",
    "ppo/freeway": "2 settings, 2 agents each, 1e7 steps, seed 7",
    **{
        f"pqn/{game}": OF_AUTHORS
        for game in ("breakout", "asterix", "freeway", "spaceinvaders", "seaquest")
    },
    **{
        f"dpo_continuous/{name}": OF_PPO
        for name in (
            "hopper",
            "pendulum",
            "reacher",
            "pointrobot",
            "inverted_pendulum",
            "inverted_double_pendulum",
        )
    },
    **{
        f"ppo_continuous/mujoco_{robot}": "8 settings on HalfCheetah-v4, 2 to 6 agents each, seed 7; none for this task"
        for robot in MUJOCO
    },
    "sac/inverted_double_pendulum": "about 30 settings, mostly one agent each, 1e5 to 5e5 steps, seed 7",
    "ppo_continuous/mujoco_inverted_double_pendulum": "3 settings, among them RL Zoo's; 4 agents each, seed 7",
    "ppo_continuous/mujoco_swimmer": "none: RL Zoo's rollout, learning rate, discount and lambda; 1 trial of 4 agents",
    **{f"sac/mujoco_{robot}": "none: the paper's settings" for robot in MUJOCO[:4]},
    **{f"td3/mujoco_{robot}": "none: the settings of the paper's code" for robot in MUJOCO[:4]},
    "sac/mujoco_halfcheetah": "none: the settings of CrossQ's SAC",
    "reppo/pendulum": "3 settings, 4 agents each, seed 7",
    "reppo/hopper": "11 settings, 2 or 4 agents each, seed 7",
    "reppo/reacher": "none: the settings of Pendulum-v1, a larger batch",
    "reppo/cartpole_swingup": "none: the settings of HalfCheetah-v4",
    **{f"{name}/{each}": OF_CHEETAH for name in ("ppo_continuous", "reppo") for each in CHEETAHS},
    "ppo_continuous/cartpole_swingup": "none: the settings of CartpoleBalance",
    "reppo/mujoco_halfcheetah": "8 settings, 3 agents each, 3e5 steps, seed 7",
    "reppo/mujoco_walker2d": "none: the settings of HalfCheetah-v4",
    "reppo/inverted_double_pendulum": "none: settings of Pendulum-v1 and hopper",
    "dqn/breakout": "none",
    "rainbow/breakout": "5 settings, 2 agents each, 3e5 steps, seed 7",
    "rainbow/cartpole": "3 settings, 4 agents each, 2e5 steps, seed 7",
    "apex_dqn/breakout": "none",
    "ppo/cartpole": "none: CleanRL's settings",
    "mappo/simple_spread": "none: JaxMARL's settings",
    "mappo/cramped_room": "none: JaxMARL's settings",
    "mappo/smax_3m": "none: JaxMARL's settings",
    "mappo/smax_2s3z": "none: JaxMARL's settings",
    "sac/mountaincar_continuous": "at least 6 settings, 6 seeds each",
    "ppo_rnn/cartpole_masked": "at least 12 settings, 2 seeds each",
}
LONGEST = {  # {environment: steps of the longest episode}
    **dict.fromkeys(("CartPole-v1", "Acrobot-v1", "FourRooms-misc"), 500),
    **dict.fromkeys(("MountainCar-v0", "Pendulum-v1"), 200),
    "MountainCarContinuous-v0": 999,
    **dict.fromkeys(
        ("FrozenLake-misc", "BernoulliBandit-misc", "Reacher-misc", "PointRobot-misc"), 100
    ),
    **dict.fromkeys(
        (f"{game}-MinAtar" for game in ("Breakout", "Asterix", "SpaceInvaders", "Seaquest")), 1000
    ),
    "Freeway-MinAtar": 2500,
    **dict.fromkeys(
        ("hopper", "halfcheetah", "inverted_pendulum", "inverted_double_pendulum"), 1000
    ),
}
REWARDS = {  # {environment: reward of each step}, from which a return tells the steps of its episode
    **dict.fromkeys(("CartPole-v1", "inverted_pendulum"), 1),
    **dict.fromkeys(("Acrobot-v1", "MountainCar-v0"), -1),
    "inverted_double_pendulum": 9.3,
}
DISCRETE = (
    "ppo",
    "ppo_rnn",
    "pqn",
    "dqn",
    "apex_dqn",
    "rainbow",
    "q_learning_gridworld",
)  # of the summary
CONTINUOUS = ("ppo_continuous", "dpo_continuous", "reppo", "sac", "td3")
TEAMS = ("mappo",)


# --- measuring ---


def load(row: str):
    """The script of a row, the flags of the script, and the flags of onejit train."""
    name, also = row.partition("/")[0], ALSO.get(row, [])
    pairs = [also[i : i + 2] for i in range(0, len(also), 2)]
    flags = ["--config", str(config_of(row))]
    if "@" in row:
        flags += ["--total-timesteps", row.partition("@")[2]]
    flags += [word for pair in pairs if not pair[0].startswith("--eval") for word in pair]
    options = [word for pair in pairs if pair[0].startswith("--eval") for word in pair]
    return runs.load_script(str(ROOT / f"{name}.py")), flags, options


def measure(row: str, num_seeds: int, seed: int) -> dict:
    """Train and play, from start to end. Raises CalledProcessError where training fails."""
    script, flags, options = load(row)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, name = Path(folder) / "run", row.partition("/")[0]
        words = [
            "-m",
            "onejit",
            "train",
            name,
            *flags,
            *options,
            "--num-seeds",
            str(num_seeds),
            "--seed",
            str(seed),
        ]
        more = ["--run-dir", str(run_dir), "--checkpoint-interval", "0"]
        begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *words, *more], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        _, config, agent = runs.load_run(run_dir)
        metrics, record = runs.load_metrics(run_dir), runs.read_record(run_dir)
        evaluations = (
            dict(np.load(run_dir / "evaluations.npz"))
            if (run_dir / "evaluations.npz").exists()
            else {}
        )
    lost = statistics.diverged(agent)
    returns = {
        "final_return": statistics.final_return(metrics),
        "greedy_return": metrics["evaluation"].mean(axis=1),
    }
    found = {
        "row": row,
        "script": name,
        "environment": environment_of(row, config),
        "total_timesteps": config.num_updates * config.num_envs * config.num_steps
        + getattr(config, "warmup_timesteps", 0),
        "command": " ".join(["onejit", *words[2:]]),
        **{name: stored(each, lost) for name, each in returns.items()},
        "diverged": int(lost.sum()),
        "episodes_at_end": episodes_at_end(config, metrics),
        "curve": learning_curve(script, config, metrics),
        "seconds": seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
    if evaluations:
        found["evaluation_curve"] = curve_over_seeds(
            evaluations["timesteps"], evaluations["returns"]
        )
    if "win_rate" in metrics:
        found["win_rate"] = stored(
            statistics.final_return(metrics | {"episodic_return": metrics["win_rate"]}), lost
        )
    if config.env_name in GYMNASIUM and found["environment"] == config.env_name:
        found["gymnasium_return"] = stored(play_in_gymnasium(script, config, agent), lost)
    found |= {
        name: record[name] for name in ("started", "device", "versions", "commit", "settings")
    }
    code = ["git", "status", "--porcelain", "--", "*.py", "configs"]  # other rows change the page
    if not subprocess.run(code, cwd=ROOT, capture_output=True).stdout:
        found["commit"] = found["commit"].removesuffix("-dirty")
    return found | {"processor": processor()}


def stored(returns, lost) -> list:
    """The returns of the seeds as JSON holds them, null for a seed that is `lost` or has none."""
    kept = np.isfinite(returns) & ~lost
    return [
        round(float(each), 6) if keep else None for each, keep in zip(returns, kept, strict=True)
    ]


def environment_of(row: str, config) -> str:
    """Its name and what makes it another: rows of the same one are compared."""
    name, params = config.env_name.rpartition(":")[2], dict(getattr(config, "env_params", {}))
    if row.startswith("q_learning_gridworld"):
        return f"{name}, {row.partition('/')[2]}"
    others = [str(value) for value in params.values() if isinstance(value, str)]
    if getattr(config, "observe", ()):
        others.append(f"entries {', '.join(map(str, config.observe))} observed")
    return ", ".join([name, *others])


def processor() -> str:
    """The model of the CPU, where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def episodes_at_end(config, metrics) -> float:
    """Episodes that end in an environment in the last tenth of the updates, mean over environments and seeds."""
    episodes = metrics["episodes"][:, metrics["episodes"].shape[1] * 9 // 10 :]
    return round(float(episodes.sum(axis=1).mean()) / getattr(config, "num_envs", 1), 4)


def learning_curve(script, config, metrics) -> dict:
    """The return of up to 100 stretches of the training, over seeds."""
    stretches = np.array_split(np.arange(config.num_updates), min(100, config.num_updates))
    returns = np.stack(
        [
            script.mean_return({k: v[:, s] for k, v in metrics.items() if k != "evaluation"})
            for s in stretches
        ],
        1,
    )
    steps = [
        (int(s[-1]) + 1) * config.num_envs * config.num_steps
        + getattr(config, "warmup_timesteps", 0)
        for s in stretches
    ]
    return curve_over_seeds(steps, carried_forward(returns))


def carried_forward(returns) -> np.ndarray:
    """Each seed's last return where it ended no episode, [num_seeds, n]: a curve reaches the end of the training."""
    last = np.maximum.accumulate(
        np.where(np.isnan(returns), 0, np.arange(returns.shape[1])), axis=1
    )
    return np.take_along_axis(returns, last, axis=1)


def curve_over_seeds(steps, returns) -> dict:
    """Interquartile mean over seeds and its 95 % interval, of returns [num_seeds, len(steps)].

    A point is over the seeds that have a return there, which `seeds` counts, and is left out if fewer than half have.
    """
    steps, finite = np.array(steps), np.isfinite(returns)
    kept = 2 * finite.sum(axis=0) >= len(returns)
    points = [
        statistics.interval(each[has])
        for each, has in zip(returns.T[kept], finite.T[kept], strict=True)
    ]
    curve = np.array(points, dtype=float).reshape(-1, 3).T
    curve = np.where(np.isnan(curve), curve[0], curve).round(4)  # one seed has no interval
    found = dict(zip(("return", "low", "high"), curve.tolist(), strict=True))
    return {"steps": steps[kept].tolist(), **found, "seeds": finite.sum(axis=0)[kept].tolist()}


def play_in_gymnasium(script, config, agents, episodes: int = 8, seed: int = SEED) -> np.ndarray:
    """Mean return of each agent's greedy episodes in Gymnasium's own environment of that name: [num_seeds].

    `agents` has leaves [num_seeds, ...], of a script whose policy has no memory.
    """
    num_seeds = len(jax.tree.leaves(agents)[0])
    start, act = script.make_policy(config)
    choose = jax.jit(jax.vmap(lambda agent, obs: act(agent, start(), obs)[0]))
    agents = jax.tree.map(lambda leaf: np.repeat(leaf, episodes, axis=0), agents)
    envs = gymnasium.make_vec(
        config.env_name, num_envs=num_seeds * episodes, vectorization_mode="sync"
    )
    space = envs.single_action_space
    obs, _ = envs.reset(seed=seed)
    returns, going = np.zeros(num_seeds * episodes), np.full(num_seeds * episodes, True)
    while going.any():
        action = np.asarray(choose(agents, obs))
        if isinstance(space, gymnasium.spaces.Box):  # policies act in [-1, 1]
            action = space.low + (action + 1) / 2 * (space.high - space.low)
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += np.where(going, reward, 0)
        going &= ~(terminated | truncated)
    envs.close()
    return returns.reshape(num_seeds, episodes).mean(axis=1)


def plan(row: str) -> dict:
    """What an H100 would take, from onejit plan, which needs the packages of requirements-gpu.txt."""
    words = [
        row.partition("/")[0],
        "--config",
        f"configs/{row}.yaml",
        *LONGER.get(row, []),
        "--num-seeds",
    ]
    words = ["plan", *words, str(PLANNED[row]), "--gpu", "h100", "--no-most-seeds"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        more = ["--json", str(file)]
        subprocess.run(
            [sys.executable, "-m", "onejit", *words, *more],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(file.read_text())
    kept = {name: found["loops"][0][name] for name in ("kernels", "bytes", "seconds")}
    return {"command": "onejit " + " ".join(words), "memory": found["memory"]["needed"], **kept}


# --- the page ---


def values_of(found: dict, kind: str) -> np.ndarray:
    """The return of each seed, -inf for one that diverged or ended no episode, which is stored as null: [num_seeds]."""
    values = np.array(found[kind], dtype=float)
    return np.where(np.isfinite(values), values, -np.inf)


def mean_of(values) -> list:
    """The mean over the seeds that have a return, and its 95 % interval."""
    finite = values[np.isfinite(values)]
    return statistics.mean_interval(finite) if len(finite) else [-np.inf, np.nan, np.nan]


def of_environment(table: dict, found: dict):
    """The entry of a row's environment, or None."""
    environment = found["environment"]
    return table.get(environment, table.get(environment.partition(",")[0]))


def threshold_of(found: dict):
    """The return below which an agent has failed, or None."""
    if found["total_timesteps"] >= 4.9e6 and (
        longer := THRESHOLDS.get(found["environment"] + LONG)
    ):
        return longer[0]
    return (of_environment(THRESHOLDS, found) or (None,))[0]


def episodes_of(found: dict) -> float:
    """How many whole episodes an environment ends in the last 10 % of training, or at least so many.

    Rows that do not count them say it by the steps of an environment and the length of an episode: the length that its
    return tells, or the longest. A curve says it too: it has a point where every seed has ended an episode.
    """
    if "episodes_at_end" in found:
        return found["episodes_at_end"]
    num_envs, longest = found.get("settings", {}).get("num_envs"), of_environment(LONGEST, found)
    if not num_envs or not longest:
        return np.inf
    if reward := of_environment(REWARDS, found):
        values = values_of(found, "final_return")
        length = mean_of(values)[0] / reward if np.isfinite(values).any() else longest
        longest = min(longest, max(length, 1))
    points = sum(step > 0.9 * found["total_timesteps"] for step in found["curve"]["steps"])
    return max(found["total_timesteps"] / 10 / num_envs / longest, points / num_envs)


def too_short(found: dict) -> bool:
    """Whether the final return means little, because few episodes begin and end in the last 10 % of training."""
    return episodes_of(found) < 1


def kinds(found: dict) -> tuple:
    """Which returns count, the one to quote first."""
    return ("greedy_return",) if too_short(found) else ("final_return", "greedy_return")


def count_failed(found: dict):
    """How many seeds reach the threshold with none of the returns that count; None without a threshold.

    A seed that diverged or ended no episode has failed.
    """
    threshold = threshold_of(found)
    if threshold is None:
        return None
    values = [values_of(found, kind) for kind in kinds(found)]
    return int((~np.isfinite(values[0]) | (np.max(values, axis=0) < threshold)).sum())


def number(steps) -> str:
    return f"{steps:.2g}".replace("e+0", "e")


def comparable(found: dict) -> tuple:
    """The best public score of at most 1.1 times a row's steps, and of more; None where there is none."""
    scores = [
        each
        for each in of_environment(PUBLIC, found) or []
        if found["script"] in each.scripts and not each.rules
    ]
    limit = 1.1 * found["total_timesteps"]
    within, beyond = (
        [each for each in scores if (each.steps <= limit) == inside] for inside in (True, False)
    )
    return tuple(max(some, key=lambda each: each.score, default=None) for some in (within, beyond))


def public(found: dict) -> str:
    """The cell of published scores: a comparable score, a better one at more steps, and scores under other rules."""
    within, beyond = comparable(found)
    others = [
        each
        for each in of_environment(PUBLIC, found) or []
        if found["script"] in each.scripts and each.rules
    ]
    said = [] if within is None else [quote(within)]
    if beyond and (within is None or beyond.score > within.score):
        said.append(f"{quote(beyond)}: more steps")
    return "; ".join(said + [f"{quote(each)}: {each.rules}, not comparable" for each in others])


def quote(each: Public) -> str:
    return f"{each.score:g} at {number(each.steps)}, {each.algorithm}, {each.source}"


def falls_short(found: dict) -> bool:
    """Whether the intervals of the means of all returns end below what is public at no more steps."""
    reference, _ = comparable(found)
    highs = [np.nanmax(mean_of(values_of(found, kind))) for kind in kinds(found)]
    return reference is not None and max(highs) < reference.score


def hardware(found: dict) -> str:
    """In a few words, which the section on machines says in full."""
    if " cpu" not in found["device"]:
        return found["device"].partition(",")[0]
    name = found["processor"].replace("(R)", "").replace("Processor", "").strip()
    return f"{name}, {found['device'].rpartition(', ')[2]}"


def table(rows: list[dict]) -> list[str]:
    head = [
        "row",
        "steps",
        "seeds",
        "failed",
        "final return",
        "IQM",
        "worst",
        "greedy return",
        "greedy IQM",
    ]
    head += ["greedy worst", "in Gymnasium", "public", "tuning", "hardware", "minutes"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for found in rows:
        final, greedy = (values_of(found, kind) for kind in ("final_return", "greedy_return"))
        failed, lost = (
            count_failed(found),
            int((~np.isfinite(values_of(found, kinds(found)[0]))).sum()),
        )
        shown = [
            statistics.show(*mean_of(final)),
            f"{statistics.interquartile_mean(final):.4g}",
            f"{final.min():.4g}",
        ]
        cells = [
            f"[{found['row']}](../{config_of(found['row'])})"
            + (" **below**" if falls_short(found) else ""),
            number(found["total_timesteps"]),
            f"{len(final)}" + (f", {lost} without a return" if lost else ""),
            "" if failed is None else str(failed),
            *(["too short", "", ""] if too_short(found) else shown),
            statistics.show(*mean_of(greedy)),
            f"{statistics.interquartile_mean(greedy):.4g}",
            f"{greedy.min():.4g}",
            statistics.show(*mean_of(values_of(found, "gymnasium_return")))
            if "gymnasium_return" in found
            else "",
            public(found),
            TUNING.get(found["row"].partition("@")[0], "not recorded"),
            hardware(found),
            f"{found['seconds'] / 60:.1f} ({found['processor_seconds'] / 60:.1f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(found: list[dict]) -> str:
    """Tables of environments and scripts, for discrete actions, for continuous actions and for teams: means."""
    tables, ran = [], {each["script"] for each in found}
    for scripts in (DISCRETE, CONTINUOUS, TEAMS):
        scripts = [name for name in scripts if name in ran]
        lines = [f"| environment | {' | '.join(scripts)} |", "|---" * (len(scripts) + 1) + "|"]
        for environment, rows in by_environment(found).items():
            cells = [
                ", ".join(mean_and_steps(row) for row in rows if row["script"] == name)
                for name in scripts
            ]
            if any(cells):
                lines.append(f"| {environment} | {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    return "\n\n".join(tables)


def mean_and_steps(found: dict) -> str:
    mean = f"{mean_of(values_of(found, kinds(found)[0]))[0]:.4g}"
    return f"{mean}{' greedy' if too_short(found) else ''} at {number(found['total_timesteps'])}"


COLORS = {  # of each script in all figures; scripts of one environment differ
    "ppo": "tab:blue", "ppo_continuous": "tab:blue", "ppo_rnn": "navy", "dpo_continuous": "tab:cyan",
    "reppo": "tab:brown", "pqn": "tab:orange", "dqn": "tab:green", "apex_dqn": "tab:olive", "rainbow": "tab:purple",
    "sac": "tab:red", "td3": "tab:pink", "q_learning_gridworld": "tab:gray", "mappo": "teal",
}  # fmt: skip


def draw(rows: list[dict], path: Path) -> None:
    """Curves of an environment with their names at the right, in the order of their last points."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    ends, drawn = [], set()  # (x, y, name, color) of a line's last point
    longest = max(found["total_timesteps"] for found in rows)
    for found in rows:
        color = COLORS[found["row"].partition("/")[0]]
        for kind, style, label in (("curve", "-", ""), ("evaluation_curve", "--", ", greedy")):
            if kind in found:
                curve = found[kind]
                axes.plot(
                    curve["steps"], curve["return"], style, color=color, label=found["row"] + label
                )
                axes.fill_between(
                    curve["steps"],
                    curve["low"],
                    curve["high"],
                    color=color,
                    alpha=0.15,
                    linewidth=0,
                )
                ends.append((curve["steps"][-1], curve["return"][-1], found["row"] + label, color))
        within, beyond = comparable(found)
        if (reference := within or beyond) and reference not in drawn:
            drawn.add(reference)
            label = f"published: {reference.algorithm}, {reference.score:g} at {number(reference.steps)}"
            axes.axhline(reference.score, color=color, linestyle=":", linewidth=1.2, label=label)
            ends.append((longest, reference.score, label, color))
    budgets = [found["total_timesteps"] for found in rows]
    axes.set(title=rows[0]["environment"], xlabel="environment steps of an agent", ylabel="return")
    axes.set_xscale(
        "log" if max(budgets) > 1.5 * min(budgets) else "linear"
    )  # 499,968 and 500,000 are one budget
    axes.margins(x=0)
    axes.autoscale(False)
    bottom, top = axes.get_ylim()
    places = apart(sorted((y - bottom) / (top - bottom) for _, y, *_ in ends))
    for place, (x, y, name, color) in zip(
        places, sorted(ends, key=lambda end: end[1]), strict=True
    ):
        how = dict(xycoords="data", textcoords=axes.transAxes, va="center", fontsize=9, color=color)
        line = dict(
            arrowstyle="-",
            color=color,
            alpha=0.4,
            linewidth=0.8,
            relpos=(0, 0.5),
            shrinkA=2,
            shrinkB=0,
        )
        axes.annotate(name, (x, y), (1.03, place), arrowprops=line, annotation_clip=False, **how)
    figure.savefig(path, dpi=100)


def apart(places: list[float], least: float = 0.055) -> list[float]:
    """Heights from 0 to 1 in ascending order, moved until they are `least` apart."""
    places = list(places)
    for _ in range(300):
        for i in range(len(places) - 1):
            if (overlap := least - (places[i + 1] - places[i])) > 0:
                places[i], places[i + 1] = places[i] - overlap / 2, places[i + 1] + overlap / 2
        places[0], places[-1] = max(0.0, places[0]), min(1.0, places[-1])
    return places


INTRO = """# Results

This page shows what each script reaches. A row is a config in `configs/SCRIPT/`, trained by `onejit train` from seed
100. Where the tuning of a config was recorded, it used other seeds. `python benchmarks/returns.py SCRIPT/NAME` measures
a row again and writes this page from the files in `benchmarks/results/`. Those files hold the command, the commit, the
versions, the learning curve and the returns of every seed.

## Summary

A cell is the mean final return over all seeds and the number of environment steps per agent. Budgets differ between
scripts, so compare cells only where the steps are equal. The sections below have intervals, worst agents, published
scores and learning curves."""

READING = """## How to read the tables

- **Row**: SCRIPT/NAME, or SCRIPT/NAME@STEPS for the config with another number of steps.
- **Environment**: HalfCheetah-v4 and other names with *-v4* are Gymnasium's MuJoCo tasks, stepped by EnvPool. A name
  with *spring* is a task of brax, whose returns cannot be compared with MuJoCo's. CartpoleSwingup and CheetahRun come
  from MuJoCo Playground. MinAtar is gymnax's: actions are not sticky, and an episode ends after 1000 steps at the
  latest (Freeway: 2500).
- **Final return**: the mean return of the exploring policy over the episodes that ended in the last 10 % of training.
  The cell is the mean over seeds with its 95 % interval by Student's t. Returns are not normally distributed, so an
  interval may reach beyond the best possible return. The cell says **too short** if an environment ends less than one
  episode in the last 10 % of training. The mean would favour short episodes, so only the greedy return counts.
- **IQM** and **worst**: the interquartile mean over seeds, which ignores the best and the worst quarter of the agents,
  and the final return of the worst agent.
- **Greedy return**: the mean return of 16 greedy episodes after training. All agents play the same 16 episodes, so the
  interval does not include the luck of their start states and random events.
- **Failed**: the number of agents whose final return and greedy return both lie below a
  [fixed threshold](#thresholds). The cell is empty if there is no threshold.
- **In Gymnasium**: the mean return of the same agents in Gymnasium's own environment of that name, in 8 greedy episodes
  per agent.
- **Public**: the best published score of the same algorithm at no more than 1.1 times our steps, and a better one at
  more steps if there is one. Where no score of the algorithm was found, the cell may name another algorithm. DQN
  includes double DQN, but neither distributional nor Rainbow agents. Scores under other rules are shown and never
  compared. A row is marked **below** if the intervals of its final return and of its greedy return both lie under the
  published score at no more steps. The published score is taken as exact. [Sources](#sources-of-published-scores)
  differ in what they measure.
- **Tuning**: how many settings were tried for the config, and with how many seeds. For many configs it was not
  recorded.
- **Minutes**: the time from the start of the command to its end on a machine that was also doing other work, and in
  brackets the processor time of all cores. [Machines](#machines-and-versions) lists the hardware.

A seed that diverged or ended no episode has no return, and the column *seeds* says so. It counts as failed, as the
worst agent and as -inf in the IQM. The mean is over the other seeds.

The figures show the IQM over seeds with its 95 % bootstrap interval. A script has the same color in all
figures. A dotted line is the published score that the row is compared with, or the one with more steps if there is no
other. A dashed curve is the greedy return during training. Where a seed ended no episode, its last return is carried
forward. A point of a curve is over the seeds that have a return, if they are at least half. Older curves leave out a
point if any seed has no return there."""


WITH_PEERS = """The scripts and their peers' code were trained with the hyperparameters of the [speed
comparison](performance.md#comparison-with-other-libraries). After training, each agent plays 64 greedy episodes,
which are the same for all agents. A cell is the mean over the seeds with its 95 % interval, and the worst agent. The
intervals overlap in all rows but sac. The peers treat the time limit as a terminal state, and the scripts [do
not](time_limits.md). All agents were trained on one core of an AMD EPYC with jax 0.10.2. To measure the table again,
run `benchmarks/returns_vs_peers.py` with `--seeds 32` for dqn and pqn, with `--seeds 16` for sac and td3, and with
its default of 8 seeds for the other rows. Its `--help` says what it needs."""

THRESHOLDS_INTRO = """An agent counts as failed if its final return and its greedy return both lie below the threshold
of its environment. An agent that reaches the threshold with one of the two returns has not failed, because a policy
that explores may score low although it has learned the task, and because 16 greedy episodes may be unlucky. If the
final return is too short, the greedy return alone counts. The thresholds do not depend on the results here. Thresholds
from published scores are half of a score that was reached under the same rules."""

SOURCES_INTRO = """Each link in the column *public* leads to the table, file or paper with the number. A score from a
curve is its value at that number of steps, not its highest, unless this table says otherwise. *Gym v1* to *v3* in a
cell is an older version of the same MuJoCo task. Until v3, Ant also observed contact forces."""

NOT_MEASURED = """These rows have a config, and the command at the top of the page measures them. The processor hours
are estimates for an AMD EPYC; two cores take about half as long. brax's ant, halfcheetah and walker2d at 1e7 steps and
more have no row for a CPU yet. They would take about 6 hours."""
PLANS = """These rows need a GPU. The table shows what one H100 would take, which [onejit plan](plan.md) computes from
the program that XLA compiles for it. The returns are not known yet. `python benchmarks/returns.py --plan` makes the
table again."""


def by_environment(found: list[dict]) -> dict:
    """`{environment: rows}`, in the order of ROWS."""
    grouped, order = {}, list(ROWS)
    for row in sorted(
        found, key=lambda each: order.index(each["row"]) if each["row"] in ROWS else len(order)
    ):
        grouped.setdefault(row["environment"], []).append(row)
    return grouped


def figure_name(environment: str) -> str:
    return (
        "results_"
        + "".join(letter if letter.isalnum() else "_" for letter in environment.lower())
        + ".png"
    )


def page(found: list[dict], plans: dict) -> str:
    """docs/results.md from what was measured and planned."""
    parts = [INTRO, summary(found), READING]
    for environment, rows in by_environment(found).items():
        parts += [f"## {environment}", "\n".join(table(rows))]
        for said in (NOTES, WHY):
            parts += [f"{row['row']}: {said[row['row']]}" for row in rows if row["row"] in said]
        parts.append(f"![return over steps on {environment}](figures/{figure_name(environment)})")
    parts += with_peers(json.loads(PEERS_FILE.read_text()) if PEERS_FILE.exists() else {})
    machines = {f"{each['processor']}, {each['device']}: {versions(each)}" for each in found}
    parts += [
        "## Thresholds",
        thresholds(found),
        "## Sources of published scores",
        SOURCES_INTRO,
        sources(found),
    ]
    parts += ["## Machines and versions", "\n".join(f"- {machine}" for machine in sorted(machines))]
    if plans:
        parts += planned(plans)
    if missing := not_measured({row["row"] for row in found}):
        lines = [
            f"| [{row}](../{config_of(row)}) | {ROWS[row]} | {hours_of(row)} |" for row in missing
        ]
        table_of = "\n".join(["| row | seeds | processor hours |", "|---|---|---|", *lines])
        parts += ["## Not measured yet", NOT_MEASURED, table_of]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def with_peers(found: dict) -> list[str]:
    """The section of the returns of the peers' own code. `found` is what returns_vs_peers.py wrote."""
    if not found:
        return []
    lines = [
        "| script | environment | steps | seeds | onejit | peer | peer's code |",
        "|---" * 7 + "|",
    ]
    for row, each in found.items():
        (_, ours), (peer, theirs) = each["returns"].items()
        cells = [
            f"{statistics.show(*statistics.mean_interval(those))}, {min(those):.4g}"
            for those in (ours, theirs)
        ]
        name = row.partition("_")[0]
        about = each["environment"], number(each["steps"]), len(ours)
        lines.append(f"| {name} | {' | '.join(map(str, about))} | {' | '.join(cells)} | {peer} |")
    return ["## The peers' own code", WITH_PEERS, "\n".join(lines)]


def not_measured(measured: set) -> list[str]:
    """Rows without a file. A row SCRIPT/NAME@STEPS that is measured stands for SCRIPT/NAME."""
    longer = {row.partition("@")[0] for row in measured if "@" in row}
    return [row for row in ROWS if row not in measured | longer]


def hours_of(row: str) -> str:
    """The estimated processor time of a row that is not measured yet."""
    return next(hours for pattern, hours in HOURS.items() if fnmatch.fnmatch(row, pattern))


def sources(found: list[dict]) -> str:
    """What the figures of each source are that the tables quote."""
    quoted = " ".join(public(each) for each in found)
    lines = [f"| {name} | {what} |" for name, what in SOURCES.items() if f"[{name}]" in quoted]
    return "\n".join(["| source | what its scores are |", "|---|---|", *lines])


def thresholds(found: list[dict]) -> str:
    """Below which return an agent counts as failed, for the environments that were measured."""
    lines = ["| environment | threshold | where it comes from |", "|---|---|---|"]
    measured = {each["environment"] for each in found}
    long = {each["environment"] + LONG for each in found if each["total_timesteps"] >= 4.9e6}
    for environment, (threshold, source) in THRESHOLDS.items():
        if environment in long or any(
            environment in (each, each.partition(",")[0]) for each in measured
        ):
            lines.append(f"| {environment} | {threshold:g} | {source} |")
    without = "; ".join(
        sorted({each["environment"] for each in found if threshold_of(each) is None})
    )
    said = f"No threshold is agreed on for these environments: {without}." if without else ""
    return "\n\n".join(filter(None, [THRESHOLDS_INTRO, "\n".join(lines), said]))


def planned(plans: dict) -> list[str]:
    """The section of what is sized for a GPU. `plans` {row: what `plan` gave}."""
    lines = [
        "| row | seeds | memory, GiB | kernels | bytes, TB | minutes at least |",
        "|---|---|---|---|---|---|",
    ]
    for row, each in plans.items():
        numbers = f"{each['memory'] / 2**30:.2g} | {each['kernels'] / 1e6:.3g} M | {each['bytes'] / 1e12:,.0f}"
        link = f"[{row}](../configs/{row}.yaml){', 1e7 steps' if row in LONGER else ''}"
        lines.append(f"| {link} | {PLANNED[row]} | {numbers} | {each['seconds'] / 60:.2g} |")
    return ["## Sized for a GPU: planned, not measured", PLANS, "\n".join(lines)]


def versions(found: dict) -> str:
    return ", ".join(f"{name} {found['versions'][name]}" for name in ("jax", "gymnax", "brax"))


def read_measured() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*_*.json"))]


def read_plans() -> dict:
    return json.loads(PLANS_FILE.read_text()) if PLANS_FILE.exists() else {}


def render() -> None:
    """Write docs/results.md and its figures."""
    found = read_measured()
    for environment, rows in by_environment(found).items():
        draw(rows, FIGURES / figure_name(environment))
    PAGE.write_text(page(found, read_plans()))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="ROW",
        help="SCRIPT/CONFIG or SCRIPT/CONFIG@STEPS; those not measured yet where none is given",
    )
    parser.add_argument(
        "--num-seeds", type=int, help="by default 32 to 6, the more the cheaper a row is"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="the rows for a GPU: plan those that are not planned yet",
    )
    options = parser.parse_args()
    files = {row: MEASURED / f"{row.replace('/', '_').replace('@', '_')}.json" for row in ROWS}
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"{unknown[0]}: is not a row{command_line.nearest(unknown[0], ROWS)}")
    for row in PLANNED if options.plan else ():
        plans = read_plans()
        if row not in plans:
            plans[row] = plan(row)
            runs.write(PLANS_FILE, json.dumps(plans, indent=1) + "\n")
    missing = not_measured({row for row, file in files.items() if file.exists()})
    for row in [] if options.render or options.plan else options.rows or missing:
        found = measure(row, options.num_seeds or ROWS[row], options.seed)
        lines = ",\n".join(
            f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()
        )
        runs.write(files[row], f"{{\n{lines}\n}}\n")
        final, greedy = (values_of(found, kind) for kind in ("final_return", "greedy_return"))
        said = f"final return {statistics.show(*mean_of(final))}, worst agent {final.min():.4g}"
        print(f"{row}: {said}, greedy return {statistics.show(*mean_of(greedy))}", flush=True)
    render()


if __name__ == "__main__":
    main()
