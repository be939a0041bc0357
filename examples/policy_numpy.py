"""An agent of ppo.py plays CartPole with NumPy alone: no JAX, no onejit.

    pip install numpy safetensors gymnasium
    python examples/policy_numpy.py

If `normalize_obs` is on, which is the default in ppo_continuous, dpo_continuous, ppo_rnn and reppo,
the network takes `(obs - mean) / sqrt(var + 1e-8)`, clipped to [-10, 10], with
`obs_statistics.mean` and `obs_statistics.var`. Four other scripts have plain layers, too:

    script          prefix of the arrays           activation  action
    dqn             params.params.                 relu        argmax
    ppo_continuous  params.actor.params.Mlp_0.     tanh        clip to [-1, 1], then rescale
    td3             params.actor.params.Mlp_0.     relu        tanh, then rescale
    sac             params.actor.params.Mlp_0.     relu        tanh of the first half, then rescale

To rescale, compute `low + (high - low) * (action + 1) / 2` with the bounds of `env.action_space`.
"""

import gymnasium
import numpy as np
from safetensors.numpy import load_file

agent = 0  # the first axis of each array is the seed
agents = load_file("agents/ppo_cartpole/agent.safetensors")  # arrays [num_seeds, ...]
weights = {name.removeprefix("params.actor.params."): x[agent] for name, x in agents.items()}


def act(obs):
    x = obs
    for layer in ("Dense_0", "Dense_1"):
        x = np.tanh(x @ weights[f"{layer}.kernel"] + weights[f"{layer}.bias"])
    return np.argmax(x @ weights["Dense_2.kernel"] + weights["Dense_2.bias"])


env = gymnasium.make("CartPole-v1")
obs, _ = env.reset(seed=0)
total = 0.0
ended = False
while not ended:
    obs, reward, terminated, truncated, _ = env.step(act(obs))
    total += reward
    ended = terminated or truncated
print(total)
