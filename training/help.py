"""The help text: what to type first, and what there is to choose from, on one screen."""

from __future__ import annotations

import textwrap
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

TEXT = """Train DQN or PPO on a Gymnasium environment.

  python train.py                            DQN on CartPole, about a minute
  python train.py agent=ppo env=acrobot      another algorithm, another environment
  python train.py experiment=cartpole_ppo    a tuned preset
  python train.py env.id=Blackjack-v1        any Gymnasium id
  python train.py agent.learning_rate=1e-3   any key of the configuration
  python train.py -m seed=0,1,2              one run for each value
  python train.py --cfg job                  print every key and its value

{groups}

Runs go to outputs/; watch them with: tensorboard --logdir outputs
"""


def help_text(configs: Path) -> str:
    """Return the help with the choices found in `configs`."""
    groups = []
    for folder in sorted(path for path in configs.iterdir() if path.is_dir()):
        names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        indent = " " * (len(folder.name) + 1)
        groups.append(textwrap.fill(f"{folder.name}={names}", 96, subsequent_indent=indent))
    return TEXT.format(groups="\n".join(groups))


def version() -> str:
    """Return the name and version of what is installed."""
    try:
        return f"steadyrl {installed_version('steadyrl')}"
    except PackageNotFoundError:
        return "steadyrl, from a checkout that is not installed"
