"""What CleanRL, PureJaxRL and Stable-Baselines3 call the fields of our configs.

docs/from_cleanrl_purejaxrl.md has the same names as a table.
"""

from onejit.base.text import nearest

# {their name: our fields, of which a script has some or none}
OTHER_NAMES = {
    "alpha": ["ent_coef"],
    "autotune": ["learn_ent_coef"],
    "buffer_batch_size": ["batch_size"],
    "batch_size": ["num_minibatches"],
    "clip_coef": ["clip_eps"],
    "clip_range": ["clip_eps"],
    "clip_range_vf": ["vf_clip_eps"],
    "clip_vloss": ["vf_clip_eps"],
    "end_e": ["epsilon_finish"],
    "env": ["env_name"],
    "env_id": ["env_name"],
    "env_kwargs": ["env_params"],
    "epsilon_anneal_time": ["exploration_fraction"],
    "exp_name": ["run_dir"],
    "exploration_final_eps": ["epsilon_finish"],
    "exploration_initial_eps": ["epsilon_start"],
    "learning_rate": ["lr", "policy_lr", "q_lr"],
    "lr": ["policy_lr", "q_lr"],
    "lr_linear_decay": ["anneal_lr"],
    "minibatch_size": ["num_minibatches"],
    "n_atoms": ["num_atoms"],
    "n_envs": ["num_envs"],
    "n_epochs": ["update_epochs"],
    "n_quantiles": ["num_atoms"],
    "n_steps": ["num_steps"],
    "n_timesteps": ["total_timesteps"],
    "net_arch": ["hidden_sizes"],
    "normalize_env": ["normalize_obs"],
    "normalize_observation": ["normalize_obs"],
    "num_epochs": ["update_epochs"],
    "num_iterations": ["total_timesteps"],
    "policy_frequency": ["policy_delay"],
    "policy_kwargs": ["hidden_sizes", "activation"],
    "policy_noise": ["target_noise"],
    "save_path": ["run_dir"],
    "start_e": ["epsilon_start"],
    "target_network_frequency": ["target_update_interval"],
    "target_noise_clip": ["noise_clip"],
    "target_policy_noise": ["target_noise"],
    "tensorboard_log": ["track"],
    "train_freq": ["num_steps", "gradient_steps"],
    "train_frequency": ["num_steps", "gradient_steps"],
    "training_interval": ["num_steps", "gradient_steps"],
}

# {their name: what to use instead, where onejit has no such field}
ADVICE = {
    "capture_video": "onejit render RUN_DIR draws an episode after training",
    "cuda": "JAX_PLATFORMS=cpu selects the CPU, and else JAX takes the GPU",
    "device": "JAX_PLATFORMS=cpu selects the CPU, and else JAX takes the GPU",
    "entity": "set WANDB_ENTITY",
    "norm_adv": "advantages are always normalized, in each minibatch",
    "normalize_advantage": "advantages are always normalized, in each minibatch",
    "project": "set WANDB_PROJECT",
    "save_model": "agents are always saved, as agent.safetensors",
    "target_kl": "there is none",
    "verbose": "there is none",
    "wandb_entity": "set WANDB_ENTITY",
    "wandb_mode": "set WANDB_MODE",
    "wandb_project_name": "set WANDB_PROJECT",
}


def suggest(name: str, known, prefix: str = "") -> str:
    """'; use FIELD' for another project's name, '; did you mean FIELD?' for a misspelt one.

    `known` are the fields. With the prefix "--" they are named as flags. Empty if none is close.
    """

    def shown(field):
        return f"--{field.replace('_', '-')}" if prefix else field

    known = list(known)
    name = name.lower()
    positive = name.removeprefix("no_")  # CleanRL has --no-anneal-lr
    if positive != name and positive in known:
        return f"; use {shown(positive)} False"
    ours = [field for field in OTHER_NAMES.get(positive, []) if field in known]
    if ours:
        return f"; use {' and '.join(map(shown, ours))}"
    if positive in ADVICE:
        return f"; {ADVICE[positive]}"
    return nearest(shown(name), [shown(field) for field in known])
