"""Names that other trainers give our keys, agents and values: one table, for hints and docs."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from steadyrl.core.command.typed import command_of


class Name(NamedTuple):
    """A name that is no key, and the key it stands for."""

    name: str
    key: str
    of: str  # who calls it so
    agent: str | None = None  # whose key it is, for the docs; hints go by an agent's own keys


class Absent(NamedTuple):
    """A name of another trainer for what has no key here, and why, or what to write instead."""

    name: str
    of: str
    why: str  # {value}: the value that was typed

    def reason(self, value: str) -> str:
        """Return why there is no key, for the value that was typed."""
        return self.why.format(value=value)


# The key that a value for a whole block is meant for: agent.noisy=true.
MAIN_KEYS = {
    "agent.teacher": "agent.teacher.policy",
    "agent.munchausen": "agent.munchausen.enabled",
    "agent.noisy": "agent.noisy.enabled",
    "agent.distribution": "agent.distribution.kind",
    "agent.recurrent": "agent.recurrent.cell",
    "agent.network": "agent.network.encoder",
    "agent.optimizer": "agent.optimizer.name",
    "log.wandb": "log.wandb.enabled",
}

# Keys with a schedule, which RL Zoo writes as a value: learning_rate=lin_0.001.
SCHEDULES = {
    "agent.learning_rate": "agent.anneal_learning_rate",
    "agent.clip": "agent.anneal_clip",
}

# Schedules for the switch of other trainers: CleanRL's anneal_lr.
ANNEALED = {"true": "linear", "false": "constant"}

SB3, ZOO, CLEANRL, TIANSHOU = "Stable-Baselines3", "RL Zoo", "CleanRL", "Tianshou"

# Last parts of keys, also as options (`--total-timesteps`); an agent's own keys come first.
OTHERS = (
    Name("lr", "agent.learning_rate", f"{TIANSHOU} and others"),
    Name("steps", "total_steps", "others"),
    Name("timesteps", "total_steps", "others"),
    Name("discount", "agent.gamma", "others"),
    Name("entropy_bonus", "agent.entropy_coef", "others", "ppo"),
    Name("discount_factor", "agent.gamma", TIANSHOU),
    Name("print_every", "log.every", "others"),
    Name("save_every", "checkpoint.every", "others"),
    Name("checkpoint_freq", "checkpoint.every", "RLlib"),
    # Runs and environments
    Name("algo", "agent", ZOO),
    Name("env", "env.id", f"{ZOO}, as `--env`"),
    Name("n_timesteps", "total_steps", ZOO),
    Name("max_steps", "total_steps", "others"),
    Name("env_kwargs", "env.kwargs", f"{SB3}, {ZOO}"),
    Name("env_wrapper", "env.wrappers", ZOO),
    Name("vec_env", "env.backend", ZOO),
    Name("vec_env_cls", "env.backend", SB3),
    Name("frames_stack", "env.frame_stack", TIANSHOU),
    Name("num_threads", "threads", ZOO),
    Name("eval_episodes", "eval.episodes", ZOO),
    Name("step_per_epoch", "eval.every", TIANSHOU),
    Name("log_folder", "run_dir", ZOO),
    Name("exp_name", "run_name", CLEANRL),
    Name("wandb_project_name", "log.wandb.project", CLEANRL),
    Name("wandb_entity", "log.wandb.entity", CLEANRL),
    Name("wandb_tags", "log.wandb.tags", ZOO),
    Name("trained_agent", "init_from", ZOO),
    Name("resume_path", "init_from", TIANSHOU),
    Name("total_timesteps", "total_steps", f"{SB3}, {CLEANRL}"),
    Name("n_envs", "env.num_envs", SB3),
    Name("num_envs", "env.num_envs", CLEANRL),  # training's, not those of evaluations
    Name("training_num", "env.num_envs", TIANSHOU),
    Name("test_num", "eval.num_envs", TIANSHOU),
    Name("env_id", "env.id", CLEANRL),
    Name("task", "env.id", TIANSHOU),
    Name("eval_freq", "eval.every", SB3),
    Name("stats_window_size", "memory.mean_window", SB3),
    Name("n_eval_episodes", "eval.episodes", SB3),
    Name("n_eval_envs", "eval.num_envs", ZOO),
    Name("save_freq", "checkpoint.every", SB3),
    Name("log_interval", "log.every", SB3),
    Name("logdir", "run_dir", TIANSHOU),
    Name("torch_deterministic", "deterministic", CLEANRL),
    Name("cuda", "device", CLEANRL),
    Name("track", "log.wandb.enabled", CLEANRL),
    Name("capture_video", "eval.video_every", CLEANRL),
    # Networks
    Name("net_arch", "agent.hidden", SB3),
    Name("hidden_sizes", "agent.hidden", TIANSHOU),
    Name("activation_fn", "agent.network.activation", SB3),
    Name("ortho_init", "agent.network.init", SB3),
    Name("features_extractor_class", "agent.network.encoder", SB3),
    # Schedules
    Name("anneal_lr", "agent.anneal_learning_rate", CLEANRL),
    Name("lr_schedule", "agent.anneal_learning_rate", "others"),
    Name("lr_scheduler", "agent.anneal_learning_rate", TIANSHOU),
    Name("lr_decay", "agent.anneal_learning_rate", TIANSHOU),
    # Optimisers
    Name("optimizer_class", "agent.optimizer.name", SB3),
    Name("optim", "agent.optimizer.name", TIANSHOU),
    Name("adam_eps", "agent.optimizer.eps", "others"),
    Name("optimizer_epsilon", "agent.optimizer.eps", "dqn_zoo"),
    # PPO
    Name("desired_kl", "agent.target_kl", "rsl_rl", "ppo"),
    Name("kl_threshold", "agent.target_kl", "skrl", "ppo"),
    Name("n_steps", "agent.rollout_steps", SB3, "ppo"),
    Name("num_steps", "agent.rollout_steps", CLEANRL, "ppo"),
    Name("step_per_collect", "agent.rollout_steps", TIANSHOU, "ppo"),
    Name("n_epochs", "agent.epochs", SB3, "ppo"),
    Name("update_epochs", "agent.epochs", CLEANRL, "ppo"),
    Name("repeat_per_collect", "agent.epochs", TIANSHOU, "ppo"),
    Name("num_minibatches", "agent.minibatches", CLEANRL, "ppo"),
    Name("clip_range", "agent.clip", SB3, "ppo"),
    Name("clip_coef", "agent.clip", CLEANRL, "ppo"),
    Name("eps_clip", "agent.clip", TIANSHOU, "ppo"),
    Name("clip_range_vf", "agent.clip_value", SB3, "ppo"),
    Name("clip_vloss", "agent.clip_value", CLEANRL, "ppo"),
    Name("value_clip", "agent.clip_value", TIANSHOU, "ppo"),
    Name("ent_coef", "agent.entropy_coef", f"{SB3}, {CLEANRL}, {TIANSHOU}", "ppo"),
    Name("vf_coef", "agent.value_coef", f"{SB3}, {CLEANRL}, {TIANSHOU}", "ppo"),
    Name("VecNormalize", "agent.normalize_obs", SB3, "ppo"),
    Name("norm_obs", "agent.normalize_obs", SB3, "ppo"),
    Name("norm_reward", "agent.normalize_reward", SB3, "ppo"),
    Name("rew_norm", "agent.normalize_reward", TIANSHOU, "ppo"),
    Name("normalize", "agent.normalize_obs", ZOO, "ppo"),
    Name("int_coef", "agent.rnd.coef", CLEANRL, "ppo"),
    Name("int_gamma", "agent.rnd.gamma", CLEANRL, "ppo"),
    # DQN
    Name("n_steps", "agent.n_step", SB3, "dqn"),
    Name("estimation_step", "agent.n_step", TIANSHOU, "dqn"),
    Name("replay_buffer_class", "agent.replay.prioritized", SB3, "dqn"),
    Name("replay_size", "agent.replay.capacity", "Spinning Up", "dqn"),
    Name("buffer_size", "agent.replay.capacity", f"{SB3}, {CLEANRL}, {TIANSHOU}", "dqn"),
    Name("train_freq", "agent.train_every", SB3, "dqn"),
    Name("train_frequency", "agent.train_every", CLEANRL, "dqn"),
    Name("step_per_collect", "agent.train_every", TIANSHOU, "dqn"),
    Name("gradient_steps", "agent.updates_per_train", SB3, "dqn"),
    Name("update_per_step", "agent.updates_per_train", TIANSHOU, "dqn"),
    Name("learning_starts", "agent.learning_starts", f"{SB3}, {CLEANRL}", "dqn"),
    Name("target_update_interval", "agent.target_every", SB3, "dqn"),
    Name("target_network_frequency", "agent.target_every", CLEANRL, "dqn"),
    Name("target_update_freq", "agent.target_every", TIANSHOU, "dqn"),
    Name("tau", "agent.target_tau", f"{SB3}, {CLEANRL}", "dqn"),
    Name("exploration_fraction", "agent.epsilon_fraction", f"{SB3}, {CLEANRL}", "dqn"),
    Name("exploration_initial_eps", "agent.epsilon_start", SB3, "dqn"),
    Name("exploration_final_eps", "agent.epsilon_end", SB3, "dqn"),
    Name("epsilon", "agent.epsilon_start", "others", "dqn"),
    Name("start_e", "agent.epsilon_start", CLEANRL, "dqn"),
    Name("end_e", "agent.epsilon_end", CLEANRL, "dqn"),
    Name("eps_train", "agent.epsilon_start", TIANSHOU, "dqn"),
    Name("eps_train_final", "agent.epsilon_end", TIANSHOU, "dqn"),
    Name("n_atoms", "agent.distribution.atoms", CLEANRL, "dqn"),
    Name("num_atoms", "agent.distribution.atoms", TIANSHOU, "dqn"),
    Name("num_quantiles", "agent.distribution.atoms", TIANSHOU, "dqn"),
    Name("is_double", "agent.double", TIANSHOU, "dqn"),
    Name("is_dueling", "agent.dueling", "others", "dqn"),
    Name("noisy_std", "agent.noisy.sigma", TIANSHOU, "dqn"),
    Name("dist", "agent.distribution.kind", "others", "dqn"),
    Name("per", "agent.replay.prioritized", "others", "dqn"),
    Name("prioritized_replay", "agent.replay.prioritized", "others", "dqn"),
    Name("prioritized_replay_alpha", "agent.replay.alpha", CLEANRL, "dqn"),
    Name("prioritized_replay_beta", "agent.replay.beta_start", CLEANRL, "dqn"),
)

# Keys that other trainers count in something else: calls, iterations, episodes.
IN_STEPS = re.compile(r"(eval|log|checkpoint)\.every|eval\.video_every|agent\.(train|target)_every")

ADVANTAGES = "PPO always normalises advantages, over each minibatch"
NOT_HERE = "is of SAC and TD3, which are not here"
SHOWN = "a terminal has a progress bar, a file or pipe has lines every log.every environment steps"

# Names that stand for no key.
ABSENT = (
    Absent("policy", SB3, "not needed: agent.network.encoder and agent.hidden choose the network"),
    Absent(
        "policy_kwargs", SB3, "its parts are keys: agent.hidden, agent.network, agent.optimizer"
    ),
    Absent(
        "max_episode_steps",
        "Gymnasium",
        "write 'env.wrappers=[{{TimeLimit: {{max_episode_steps: {value}}}}}]'",
    ),
    Absent(
        "tensorboard_log",
        SB3,
        "each run has its event files in its directory: run_dir={value}/NAME",
    ),
    Absent(
        "eval_env",
        SB3,
        "evaluations build environments of their own; eval.num_envs sets how many at once",
    ),
    Absent("policy_frequency", CLEANRL, NOT_HERE),
    Absent("policy_delay", SB3, NOT_HERE),
    Absent("target_entropy", SB3, NOT_HERE),
    Absent("autotune", CLEANRL, NOT_HERE),
    Absent("optimize_memory_usage", SB3, "a replay always stores each observation once"),
    Absent("normalize_advantage", SB3, ADVANTAGES),
    Absent("norm_adv", CLEANRL, ADVANTAGES),
    Absent("use_sde", SB3, "there is no state-dependent exploration"),
    Absent("clip_obs", SB3, "normalised observations are clipped to ±10"),
    Absent("save_model", CLEANRL, "every run writes policy/ and policy-best/ in its directory"),
    Absent("verbose", SB3, SHOWN),
    Absent("progress_bar", SB3, SHOWN),
    Absent("progress", ZOO, SHOWN),
    Absent(
        "reward_threshold",
        SB3,
        "a callback can stop a run: callbacks=[module:Class] (docs/python.md)",
    ),
    Absent("best_model_save_path", SB3, "every run writes policy-best/ in its directory"),
    Absent(
        "reset_num_timesteps", SB3, "resume=RUN goes on counting steps, init_from=RUN begins at 0"
    ),
)

# What is an agent elsewhere, and an agent with these keys here.
VARIANTS = {
    "recurrent_ppo": "agent=ppo agent.recurrent.cell=gru",
    "recurrentppo": "agent=ppo agent.recurrent.cell=gru",
    "ppo_lstm": "agent=ppo agent.recurrent.cell=lstm",
    "maskable_ppo": "agent=ppo env.action_masks=true",
    "ppo_rnd": "agent=ppo agent.rnd.coef=1",
    "double_dqn": "agent=dqn agent.double=true",
    "ddqn": "agent=dqn agent.double=true",
    "qrdqn": "agent=dqn agent.distribution.kind=quantile",
    "c51": (
        "agent=dqn agent.distribution.kind=c51 agent.distribution.v_min=0 "
        "agent.distribution.v_max=100"
    ),
}

# What to know of them besides.
VARIANT_NOTES = {"c51": ", with the range of your discounted returns"}

# What yes and no of a name are here, as typed (EVALUATE: the command). Names of options may begin
# with `no-`.
SWITCHES = {
    "cuda": ("device=cuda", "device=cpu"),
    "track": ("log.wandb.enabled=true", "log.wandb.enabled=false"),
    "capture_video": ("EVALUATE RUN --video film.mp4", "eval.video_every=0"),
    "torch_deterministic": ("deterministic=true", "deterministic=false"),
    **dict.fromkeys(
        ("anneal_lr", "lr_decay"),
        ("agent.anneal_learning_rate=linear", "agent.anneal_learning_rate=constant"),
    ),
}

WORDS = {"true": True, "yes": True, "1": True, "": True, "false": False, "no": False, "0": False}


def switch_override(name: str, value: str) -> str | None:
    """Return what to write for a switch of another trainer with this value; None: it is none."""
    plain = name.rpartition(".")[2].replace("-", "_")
    negated = plain.startswith("no_") and plain.removeprefix("no_") in SWITCHES
    choice = WORDS.get(value.lower())
    found = SWITCHES.get(plain.removeprefix("no_") if negated else plain)
    if found is None or choice is None:
        return None
    return found[choice is negated].replace("EVALUATE", command_of("evaluate"))


def our_key(key: str, own: Collection[str]) -> str | None:
    """Return our key for the name that another trainer gives it, first of an agent's `own` keys."""
    fitting = sorted(_named(key), key=lambda each: each.key not in own)
    return fitting[0].key if fitting else None


def unit_hint(name: str, key: str | None) -> str:
    """Return a hint with the unit of our key for another trainer's name; "": the same, or none."""
    theirs = key is not None and any(each.key == key for each in _named(name))
    return " (in environment steps)" if theirs and IN_STEPS.fullmatch(str(key)) else ""


def other_agents_hint(key: str, own: Collection[str]) -> str:
    """Return a hint with what a name means for other agents, if an agent's `own` keys have it."""
    others = [each for each in _named(key) if each.key not in own]
    if len(others) == len(_named(key)):
        return ""
    return "".join(f" (agent={each.agent} has {each.key})" for each in others)


def why_absent(key: str, value: str = "") -> str | None:
    """Return why there is no key for a name of another trainer; None: it is not known to be one."""
    last = _last(key)
    found = next((each for each in ABSENT if each.name == last), None)
    return found and found.reason(value or "…")


def _named(key: str) -> list[Name]:
    last = _last(key)
    return [each for each in OTHERS if each.name == last]


def _last(key: str) -> str:
    return key.rpartition(".")[2].replace("-", "_")


def schedule_hint(key: str, value: object) -> str:
    """Return a hint to the schedule that a value of another trainer names; "": it names none."""
    if key in SCHEDULES.values() and str(value) in ANNEALED:
        return f"; write {key}={ANNEALED[str(value)]}"
    falling = re.fullmatch(r"lin(?:ear)?(?:_([\d.]+(?:e-?\d+)?))?", str(value))
    if falling is None or key not in SCHEDULES:
        return ""
    start = f"{key}={falling[1]} " if falling[1] else ""
    return f"; write {start}{SCHEDULES[key]}=linear"


def block_reason(block: str, value: object) -> str:
    """Return why a whole block takes no value, and the key that does, if known."""
    key = MAIN_KEYS.get(block)
    return f"is a group of keys: write {key}={value}" if key else "is a group of keys, not a value"
