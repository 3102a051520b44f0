"""Small runs of PPO (see tests/helpers/algorithms.py)."""

from algorithms import Small, on_off

SMALL = Small(
    quick=(
        "agent.hidden=[4]", "agent.rollout_steps=4", "agent.minibatches=1", "agent.epochs=1",
    ),
    short=(
        "agent.hidden=[16]", "agent.rollout_steps=32", "agent.minibatches=3", "agent.epochs=2",
    ),
    stateful=("agent.normalize_obs=true", "agent.normalize_reward=true"),
    # Observations alone are 168 MB; an update needs more temporarily.
    large=(
        "total_steps=10240", "agent.rollout_steps=2560", "agent.epochs=1", "agent.hidden=[64]",
    ),
    switches={
        **on_off("popart", "normalize_obs", "normalize_reward", "clip_value", "clip_reward"),
        "recurrent": {
            kind: (f"agent.recurrent.cell={kind}", "agent.recurrent.sequence_length=5")
            for kind in ("none", "gru", "lstm")
        },
        "rnd": {"off": (), "on": ("agent.rnd.coef=1",)},
        "target_kl": {"off": ("agent.target_kl=null",), "on": ("agent.target_kl=0.001",)},
        "rate": {"scheduled": (), "kl": ("agent.adapt_learning_rate=kl", "agent.target_kl=0.01")},
        "entropy": {"constant": (), "falls": (
            "agent.entropy_coef=0.01", "agent.anneal_entropy_coef=linear",
        )},
        "minibatches": {"parts": (), "rows": ("agent.batch_size=20",)},
        "trunks": {"any": (), "shared": ("agent.shared_trunk=true",)},
        "env": {"continuous": ("env=pendulum",)},
    },
    scheduled=("clip", "entropy_coef"),
    refused=(
        *((("env", env), ("normalize_obs", "on")) for env in ("pixels", "masked pixels")),
        (("clip_reward", "on"), ("normalize_reward", "on")),
        (("learning_rate", "cosine"), ("rate", "kl")),
    ),
)  # fmt: skip
