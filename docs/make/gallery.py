"""The pictures of docs/gallery.md: an agent of each script, an environment of each family.

    pip install -c constraints.txt -e ".[tools,envs]"
    python docs/make/animation.py       # trains the agents on Walker2d-v4 and Breakout
    python alphazero.py --num-seeds 1 --run-dir runs/gallery/alphazero
    python mappo.py --num-seeds 1 --total-timesteps 5e5 --run-dir runs/gallery/mappo
    python rainbow.py --config configs/rainbow/breakout.yaml --num-seeds 1 --total-timesteps 5e4 \
        --run-dir runs/gallery/rainbow
    python evolve_objective.py --num-generations 4 --num-seeds 1 \
        --run-dir runs/gallery/evolve_objective
    python docs/make/gallery.py

The agents come from agents/, runs/gallery/ and runs/animation/. An untrained agent plays the other
environments.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from onejit import render, run_directory, scripts

FIGURES = ROOT / "docs" / "figures"
TRAINED = {
    f"{Path(script).name.removesuffix('_' + task)}\non {shown}": f"agents/{script}"
    for script, task, shown in (
        ("q_learning_gridworld_8x12", "8x12", "a GridWorld"),
        ("dqn_acrobot", "acrobot", "Acrobot-v1"),
        ("apex_dqn_catch", "catch", "Catch-bsuite"),
        ("pqn_cartpole", "cartpole", "CartPole-v1"),
        ("ppo_cartpole", "cartpole", "CartPole-v1"),
        (
            "ppo_continuous_mountaincar_continuous",
            "mountaincar_continuous",
            "MountainCarContinuous-v0",
        ),
        ("dpo_continuous_pendulum", "pendulum", "Pendulum-v1"),
        ("ppo_rnn_memory_chain", "memory_chain", "MemoryChain-bsuite"),
        ("reppo_pendulum", "pendulum", "Pendulum-v1"),
        ("sac_pendulum", "pendulum", "Pendulum-v1"),
        ("td3_pendulum", "pendulum", "Pendulum-v1"),
    )
}
TRAINED_BRIEFLY = {
    "alphazero\non tic_tac_toe": "runs/gallery/alphazero",
    "mappo\non MPE simple_spread": "runs/gallery/mappo",
    "rainbow\non MinAtar Breakout": "runs/gallery/rainbow",
    "evolve_objective\non Catch-bsuite": "runs/gallery/evolve_objective",
}
FAMILIES = {  # title: script, environment, parameters, and a run whose agent plays it
    "gymnax: MinAtar Breakout": ("ppo", "Breakout-MinAtar", {}, "runs/animation/breakout"),
    "gymnax: FourRooms": ("ppo", "FourRooms-misc", {}, None),
    "brax: ant": ("ppo_continuous", "ant", {"max_steps_in_episode": 40}, None),
    "Gymnasium: Walker2d-v4": (
        "ppo_continuous",
        "onejit.envs.gymnasium:Walker2d-v4",
        {},
        "runs/animation/mujoco_walker2d",
    ),
    "Craftax": (
        "ppo",
        "onejit.envs.craftax:Craftax-Classic-Symbolic-v1",
        {"max_steps_in_episode": 30},
        None,
    ),
    "Navix: KeyCorridor": ("ppo", "onejit.envs.navix:Navix-KeyCorridorS3R3-v0", {}, None),
    "Jumanji: Snake": ("ppo", "onejit.envs.jumanji:Snake-v1", {}, None),
    "MuJoCo Playground: CheetahRun": (
        "ppo_continuous",
        "onejit.envs.playground:CheetahRun",
        {"max_steps_in_episode": 30},
        None,
    ),
}


def trained(run_dir: str):
    return run_directory.load_run(ROOT / run_dir)


def untrained(script: str, env_name: str, params: dict):
    script = scripts.load_script(script)
    config = script.Config(
        env_name=env_name, env_params=params, num_envs=4, num_steps=4, num_minibatches=2
    )
    init, _ = script.make_learner(config)
    return (
        script,
        config,
        jax.vmap(lambda key: init(key).agent)(jax.random.split(jax.random.key(0), 1)),
    )


def best_agent(run_dir, agents):
    """The one with the best final return."""
    order, _ = render.rank(ROOT / run_dir, agents, False)
    return render.state_at(agents, slice(order[-1], order[-1] + 1))


def picture(script, config, agents, share: float = 0.6):
    """A frame of a greedy episode, at this share of its length."""
    env, env_params = script.make_env(config)
    ((states, rewards),) = render.play(script, config, agents, jax.random.key(1))
    frames, _ = render.frames_of(config, render.unwrap(env), env_params, states, rewards)
    shown = list(frames())
    return shown[min(int(share * len(shown)), len(shown) - 1)]


def draw(pictures: dict, path: Path, columns: int) -> None:
    lines = -(-len(pictures) // columns)
    figure = Figure(figsize=(11, 11 / columns * 1.12 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels:
        panel.axis("off")
    for panel, (title, image) in zip(panels, pictures.items(), strict=False):
        panel.imshow(image)
        panel.set_title(title, fontsize=10)
    figure.savefig(path, dpi=100)
    print(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FIGURES)
    options = parser.parse_args()
    for name, agents in (("gallery_agents", TRAINED), ("gallery_more_agents", TRAINED_BRIEFLY)):
        draw(
            {title: picture(*trained(path)) for title, path in agents.items()},
            options.out / f"{name}.png",
            4,
        )
    pictures = {}
    for title, (script, env_name, params, run_dir) in FAMILIES.items():
        try:
            made = untrained(script, env_name, params)
            if run_dir:
                script, config, agents = trained(run_dir)
                made = (
                    script,
                    dataclasses.replace(config, env_name=env_name),
                    best_agent(run_dir, agents),
                )
            pictures[title + ("" if run_dir else ", untrained")] = np.asarray(picture(*made))
        except Exception as error:  # a library that is missing, in whatever way it says so
            print(f"{title}: left out ({error})", file=sys.stderr)
    draw(pictures, options.out / "gallery_environments.png", 3)


if __name__ == "__main__":
    main()
