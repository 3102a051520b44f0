"""The charts of a run's metrics, for TensorBoard and the report: returns first, memory last."""

from __future__ import annotations

REPORTED = "reported by the environment"  # only with env.info_metrics
# By category and title, most important first; tags are regular expressions.
CHARTS: dict[str, dict[str, list[str]]] = {
    "score": {
        "return": ["rollout/return_mean", "eval/return_mean"],
        "return of single episodes": ["rollout/return"],
        "reward per step": ["rollout/reward_mean"],
        "episode length": ["rollout/length_mean"],
        REPORTED: ["rollout/info/.*"],
    },
    "learning": {
        "loss": ["train/loss", "train/policy_loss", "train/value_loss"],
        "gradient norm": ["train/grad_norm"],
        "schedules": ["train/learning_rate", "train/epsilon", "train/beta"],
        "schedules of PPO's loss": ["train/clip", "train/entropy_coef"],
        "values": ["train/q_mean", "train/td_error", "train/explained_variance"],
        "policy": ["train/entropy", "train/approx_kl", "train/clip_fraction"],
    },
    "speed": {
        "environment steps per second": ["time/steps_per_second"],
        "updates per second": ["time/updates_per_second"],
        "milliseconds per step": [
            "time/environment_ms",
            "time/act_ms",
            "time/update_ms",
            "time/other_ms",
        ],
    },
    "memory": {
        "host, MB": ["memory/rss_mb", "memory/tree_pss_mb"],
        "GPU, MB": ["memory/cuda_allocated_mb", "memory/cuda_reserved_mb"],
        "growth, MB per million steps": ["memory/growth_mb_per_million_steps"],
    },
}
