"""Small runs of DQN (see tests/helpers/algorithms.py)."""

from algorithms import Small, on_off

SMALL = Small(
    quick=(
        "agent.hidden=[4]", "agent.replay.capacity=64", "agent.batch_size=4",
        "agent.learning_starts=4", "agent.train_every=4", "agent.updates_per_train=1",
    ),
    short=(
        "agent.hidden=[16]", "agent.replay.capacity=700", "agent.batch_size=16",
        "agent.learning_starts=60", "agent.train_every=8", "agent.updates_per_train=1",
        "agent.target_every=100",
    ),
    stateful=("agent.replay.prioritized=true", "agent.n_step=3"),
    small_buffers=("agent.replay.capacity=2048",),
    large=(
        "total_steps=600", "agent.learning_starts=500", "agent.updates_per_train=2",
        "agent.replay.capacity=8192", "agent.hidden=[1024]",
    ),
    switches={
        **on_off("double", "dueling", "munchausen.enabled", "clip_reward"),
        "noisy": {
            "off": (), "on": ("agent.noisy.enabled=true",),
            "and epsilon": ("agent.noisy.enabled=true", "agent.noisy.epsilon_greedy=true"),
        },
        "prioritized": {
            "off": ("agent.replay.prioritized=false",),
            "on": ("agent.replay.prioritized=true",),
            "by batch": (
                "agent.replay.prioritized=true", "agent.replay.normalize_weights=batch",
            ),
        },
        "n_step": {"1": ("agent.n_step=1",), "3": ("agent.n_step=3",)},
        "distribution": {
            "none": (),
            "c51": (
                "agent.distribution.kind=c51", "agent.distribution.atoms=11",
                "agent.distribution.v_min=0", "agent.distribution.v_max=20",
            ),
            "quantile": ("agent.distribution.kind=quantile", "agent.distribution.atoms=7"),
        },
        "loss": {"huber": (), "squared": ("agent.loss=squared",)},
        "augmentation": {"none": (), "shift": ("agent.augmentation=shift",)},
        "target": {"whole": (), "in part": ("agent.target_tau=0.1",)},
    },
    scheduled=("epsilon", "replay.beta"),
    refused=(
        *((("loss", "squared"), ("distribution", kind)) for kind in ("c51", "quantile")),
        *((("augmentation", "shift"), ("env", env)) for env in ("vectors", "masked")),
    ),
)  # fmt: skip
