"""The pictures that explain the ideas of the algorithms, by the functions of the scripts.

python tools/pages/ideas.py            # all of them: docs/figures/idea_SCRIPT.png
python tools/pages/ideas.py ppo pqn    # some
"""

import argparse
import sys
from pathlib import Path

import distrax
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import apex_dqn
import dpo_continuous
import dqn
import ppo
import ppo_continuous
import ppo_rnn
import pqn
import rainbow
import reppo
import sac
import td3

RATIOS = jnp.linspace(0.1, 2.7, 261)
TICKS = (-1, -0.5, 0, 0.5, 1)  # of actions


def panels(count: int):
    figure = Figure(figsize=(8, 3.4), layout="constrained")  # the width of a page
    axes = figure.subplots(1, count)
    for panel in np.atleast_1d(axes):
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def objective(loss, *settings):
    """What steps with advantages 1 and -1 add to the objective, over the ratio: [2, ratios].

    Losses normalize the advantages of a batch. A batch of 1 and -1 is normalized, and the other
    step has a ratio of 1.
    """
    advantages = jnp.array([1.0, -1.0])

    def at(log_ratio, which):
        log_prob = jnp.zeros(2).at[which].set(log_ratio)
        return -2.0 * loss(log_prob, jnp.zeros(2), advantages, *settings)[0] + advantages[which]

    return jax.vmap(jax.vmap(at, (0, None)), (None, 0))(jnp.log(RATIOS), jnp.arange(2))


def draw_objectives(losses: dict):
    """One panel for each sign of the advantage, one line for each of `losses`."""
    figure, axes = panels(2)
    for i, (axis, title) in enumerate(zip(axes, ("advantage 1", "advantage -1"), strict=True)):
        axis.plot(RATIOS, RATIOS * (1 - 2 * i), color="0.7", label="ratio times advantage")
        for name, lines in losses.items():
            axis.plot(RATIOS, lines[i], label=name)
        axis.axvline(1, color="0.85", zorder=0)
        axis.set(title=title, xlabel="probability ratio, new to old policy")
        axis.legend(frameon=False)
    axes[0].set_ylabel("objective")
    return figure


def draw_ppo():
    return draw_objectives({"PPO, clip_eps 0.2": objective(ppo.policy_loss, 0.2)})


def draw_dpo_continuous():
    config = dpo_continuous.Config()
    dpo = objective(dpo_continuous.policy_loss, config.dpo_alpha, config.dpo_beta)
    return draw_objectives({"PPO, clip_eps 0.2": objective(ppo.policy_loss, 0.2), "DPO": dpo})


def ends(length: int, **at):
    """`terminated, truncated` [T, 1] with one step each set."""
    names = ("terminated", "truncated")
    return [
        jnp.zeros((length, 1), bool).at[at[name], 0].set(True)
        if name in at
        else jnp.zeros((length, 1), bool)
        for name in names
    ]


def draw_ppo_continuous():
    """How much the rewards, and the values after the steps, count in the first advantage."""
    figure, axes = panels(2)
    zeros, length = jnp.zeros((30, 1)), 30
    for lam in (0.0, 0.8, 0.95, 1.0):

        def first(rewards, after, lam=lam):
            values = (
                jnp.concatenate([zeros[:1], after[:-1]]).at[20].set(0.0)
            )  # a new episode begins there
            return ppo_continuous.gae(
                rewards, values, after, *ends(length, truncated=19), 0.99, lam
            )[0][0, 0]

        for axis, argument in zip(axes, (0, 1), strict=True):
            weight = jax.grad(first, argument)(zeros, zeros)[:, 0]
            axis.plot(weight, ".-", markersize=4, linewidth=1, label=f"gae_lambda {lam:g}")
    axes[0].set(title="weight of each reward", xlabel="step", ylabel="in the advantage of step 0")
    axes[1].set(title="weight of the value after each step", xlabel="step")
    for axis in axes:
        axis.axvline(19.5, color="0.7", linestyle="--")
        axis.text(20, 0.9, "time limit")
    axes[1].legend(frameon=False, loc="upper center", bbox_to_anchor=(0.35, 1.0))
    return figure


def draw_pqn():
    """How much the best value after each step counts in the target of the first step."""
    figure, axes = panels(2)
    zeros, length = jnp.zeros((24, 1)), 24
    for axis, kind in zip(axes, ("truncated", "terminated"), strict=True):
        for lam in (0.0, 0.65, 0.9, 1.0):

            def first(next_values, lam=lam, kind=kind):
                return pqn.q_lambda_target(
                    zeros, next_values, *ends(length, **{kind: 15}), 0.99, lam
                )[0, 0]

            axis.plot(
                jax.grad(first)(zeros)[:, 0],
                ".-",
                markersize=4,
                linewidth=1,
                label=f"q_lambda {lam:g}",
            )
        axis.axvline(15.5, color="0.7", linestyle="--")
        axis.text(15.7, 0.9, kind)
        axis.set(xlabel="step", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("weight of the largest Q")
    axes[1].legend(frameon=False, loc="center right")
    return figure


def draw_dqn():
    """The overestimation that double Q-learning removes, and the epsilon schedule."""
    figure, axes = panels(2)
    steps = jnp.linspace(0, 500_000, 200)
    for fraction in (0.1, 0.5):
        epsilon = dqn.linear_epsilon(steps, fraction * 500_000, 1.0, 0.05)
        axes[0].plot(steps, epsilon, label=f"exploration_fraction {fraction:g}")
    axes[0].set(
        title="share of random actions",
        xlabel="environment steps",
        xticks=(0, 250_000, 500_000),
        ylabel="epsilon",
    )
    noise, other = jax.random.normal(
        jax.random.key(0), (2, 20_000, 18)
    )  # errors of two networks; true values are 0
    counts = range(1, 19)

    def double_q(next_q, next_q_online):
        """The target of a reward of 0 with a discount of 1."""
        zeros = jnp.zeros(len(next_q))
        return dqn.q_target(zeros, zeros > 0, next_q, next_q_online, gamma=1.0)

    axes[1].plot(
        counts,
        [noise[:, :n].max(axis=1).mean() for n in counts],
        label="largest value of one network",
    )
    axes[1].plot(
        counts,
        [double_q(other[:, :n], noise[:, :n]).mean() for n in counts],
        label="double Q-learning",
    )
    axes[1].set(title="estimate of 0 from errors with std 1", xlabel="number of actions")
    for axis in axes:
        axis.legend(frameon=False)
    return figure


def draw_apex_dqn():
    figure, axes = panels(3)
    axes[0].axis("off")
    boxes = {
        "actors\n(one epsilon each)": (0.5, 0.88),
        "replay with a sum tree\nof priorities": (0.5, 0.5),
        "learner": (0.5, 0.12),
    }
    for text, place in boxes.items():
        axes[0].text(
            *place,
            text,
            ha="center",
            va="center",
            bbox={"boxstyle": "round", "fc": "#eef3fb", "ec": "tab:blue"},
        )
    arrows = [
        ((0.5, 0.77), (0.5, 0.62), "transitions,\nfirst priorities", 0.54),
        ((0.42, 0.38), (0.42, 0.2), "batch", 0.26),
        ((0.58, 0.2), (0.58, 0.38), "new\npriorities", 0.61),
    ]
    for start, stop, text, x in arrows:
        axes[0].annotate("", stop, start, arrowprops={"arrowstyle": "->"})
        axes[0].text(x, (start[1] + stop[1]) / 2, text, va="center")
    axes[0].annotate(
        "",
        (0.22, 0.88),
        (0.4, 0.12),
        arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.6"},
    )
    axes[0].text(-0.02, 0.5, "parameters", rotation=90, va="center")
    config = apex_dqn.Config()
    epsilons = apex_dqn.actor_epsilons(
        config.num_envs, config.epsilon_base, config.epsilon_exponent
    )
    axes[1].semilogy(epsilons, ".")
    axes[1].set(title="epsilon of each actor", xlabel="actor")
    errors = jnp.linspace(0.0, 2.0, 100)
    for exponent in (0.0, 0.6, 1.0):
        tree = apex_dqn.set_priorities(
            apex_dqn.init_sum_tree(100), jnp.arange(100), apex_dqn.priority_of(errors, exponent)
        )
        mass = (jnp.arange(100_000) + 0.5) / 100_000 * apex_dqn.total_priority(tree)
        drawn = jnp.bincount(apex_dqn.sample_sum_tree(tree, mass)[0], length=100)
        axes[2].plot(errors, drawn / 1000, label=f"exponent {exponent:g}")
    axes[2].set(title="share of the draws, %", xlabel="TD error of a transition, of 100")
    axes[2].legend(frameon=False)
    return figure


def draw_rainbow():
    """A distribution of returns, after a reward and a discount, and projected on the atoms."""
    figure, axes = panels(3)
    support = jnp.linspace(-2.0, 6.0, 17)
    logits = -jnp.square(support - 2.0) / 2.0
    target = rainbow.bellman_target(
        jnp.array([1.7]), jnp.array([0.7]), logits[None], support, "categorical"
    )[0]
    shown = {
        "of the next state": (support, jax.nn.softmax(logits)),
        "times 0.7, plus 1.7": (1.7 + 0.7 * support, jax.nn.softmax(logits)),
        "projected: the target": (support, target),
    }
    for axis, (title, (places, heights)) in zip(axes, shown.items(), strict=True):
        axis.bar(places, heights, width=0.25)
        mean = (places * heights).sum()
        axis.axvline(mean, color="tab:orange")
        axis.text(mean + 0.15, 0.27, f"mean {mean:.2f}", color="tab:orange")
        axis.set(title=title, xlabel="return", ylim=(0, 0.3), xlim=(-2.5, 6.5), xticks=support[::4])
        axis.vlines(support, 0, -0.006, color="0.3", clip_on=False)
    axes[0].set_ylabel("probability")
    return figure


def draw_ppo_rnn():
    """How memories depend on earlier observations, with episodes of different length."""
    figure, axes = panels(2)
    length, size = 36, 16
    first = jnp.isin(jnp.arange(length), jnp.array([0, 14, 25]))
    x = jax.random.normal(jax.random.key(1), (length, 4))
    for axis, cell in zip(axes, (ppo_rnn.Gru, ppo_rnn.MinGru), strict=True):
        network = cell(size)
        params = network.init(jax.random.key(0), jnp.zeros(size), x, first)
        jacobian = jax.jacobian(
            lambda x, n=network, p=params: n.apply(p, jnp.zeros(size), x, first)
        )(x)
        influence = jnp.linalg.norm(jacobian, axis=(1, 3))  # [T, size, T, features] -> [T, T]
        axis.imshow(
            jnp.where(influence > 0, jnp.log10(influence + 1e-12), jnp.nan),
            vmin=-4,
            vmax=0,
            cmap="viridis",
        )
        for begin in (14, 25):
            axis.axhline(begin - 0.5, color="tab:red", linewidth=0.8)
        title = f"{'GRU' if cell is ppo_rnn.Gru else 'minGRU'}, untrained"
        axis.set(title=title, xlabel="observation of step", ylabel="memory after step")
    return figure


def draw_reppo():
    figure, axes = panels(2)
    centers = jnp.linspace(-5.0, 5.0, 21)
    for target in (-2.0, 1.3):
        probability = reppo.hl_gauss(jnp.array(target), -5.0, 5.0, 21)
        axes[0].bar(
            centers,
            probability,
            width=0.4,
            alpha=0.7,
            label=f"target {target:g}, mean {(centers * probability).sum():.3f}",
        )
    axes[0].set(title="the critic's label: a Gaussian over bins", ylim=(0, 0.65))
    axes[0].set(xlabel="Q", ylabel="probability")
    kl = jnp.linspace(0.0, 0.3, 301)
    for coef in (0.5, 2.0):
        loss = jax.vmap(
            lambda kl, coef=coef: reppo.policy_loss(1.0 + 2.0 * kl, 0.0, kl, 0.0, coef, 0.1)
        )(kl)
        axes[1].plot(kl, loss, label=f"KL coefficient {coef:g}")
    axes[1].axvline(0.1, color="0.7", linestyle="--")
    axes[1].text(0.105, -1.1, "bound")
    axes[1].set(
        title="policy loss where Q grows with the KL",
        xlabel="KL divergence from the old policy",
    )
    for axis in axes:
        axis.legend(frameon=False)
    return figure


def draw_sac():
    figure, axes = panels(2)
    noise = jnp.linspace(-5.0, 5.0, 2001)[:, None]
    for std in (0.3, 0.9, 2.0):
        gaussian = distrax.MultivariateNormalDiag(jnp.array([0.5]), jnp.array([std]))
        action = jnp.tanh(0.5 + std * noise)
        density = jnp.exp(sac.squash(gaussian).log_prob(jnp.clip(action, -0.9999, 0.9999)))
        axes[0].plot(action, density, label=f"std {std:g} before tanh")
    axes[0].set(title="density of actions", xlabel="action", xticks=TICKS)
    axes[0].set(ylabel="density", ylim=(0, 3))
    actions = jnp.linspace(-1.0, 1.0, 401)
    q = jnp.exp(-jnp.square((actions - 0.5) / 0.25)) + 0.8 * jnp.exp(
        -jnp.square((actions + 0.5) / 0.25)
    )
    axes[1].plot(actions, q, color="0.6", label="Q")
    for alpha in (
        0.1,
        0.3,
        1.0,
    ):  # of all densities, exp(Q / alpha) over its integral has the smallest loss
        axes[1].plot(actions, 200 * jax.nn.softmax(q / alpha), label=f"ent_coef {alpha:g}")
    axes[1].set(title="the best policy for a Q with two hills", xlabel="action", xticks=TICKS)
    for axis in axes:
        axis.legend(frameon=False)
    return figure


def draw_td3():
    figure, axes = panels(2)
    actions, noise = (
        jnp.linspace(-1.0, 1.0, 401),
        0.2 * jax.random.normal(jax.random.key(0), (4000, 1)),
    )

    def critic(action):  # a broad hill, and a narrow peak of errors
        return jnp.exp(-jnp.square((action + 0.3) / 0.4)) + 1.3 * jnp.exp(
            -jnp.square((action - 0.5) / 0.03)
        )

    smooth = critic(td3.smoothed_action(actions[None], noise, 0.5)).mean(axis=0)
    axes[0].plot(actions, critic(actions), color="0.6", label="target critic with a narrow error")
    axes[0].plot(actions, smooth, label="its mean over smoothed actions")
    axes[0].set(title="target policy smoothing", xlabel="action", xticks=TICKS)
    axes[0].set(ylabel="Q", ylim=(None, 1.8))
    errors = 0.5 * jax.random.normal(jax.random.key(1), (2, 50_000))
    targets = td3.q_target(1.0, False, errors, 0.99)
    axes[1].hist(
        1.0 + 0.99 * errors[0], 80, density=True, alpha=0.5, color="0.6", label="one critic"
    )
    axes[1].hist(targets, 80, density=True, alpha=0.6, label="the smaller of two")
    axes[1].axvline(1.0, color="tab:orange")
    axes[1].set(title="targets with errors; the truth is 1", xlabel="target", ylabel="density")
    for axis in axes:
        axis.legend(frameon=False)
    return figure


PICTURES = {
    name.removeprefix("draw_"): function
    for name, function in dict(globals()).items()
    if name.startswith("draw_")
}
PICTURES.pop("objectives")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    for name in options.names or PICTURES:
        path = options.out / f"idea_{name}.png"
        PICTURES[name]().savefig(path, dpi=140)
        print(path)


if __name__ == "__main__":
    main()
