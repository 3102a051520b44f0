"""From the command line to an accepted job; every refusal is one clear line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envs.factory import probe
from memory.errors import ExpectedError, SettingError
from training.hardware import refuse_missing_device
from training.help import help_text
from training.job import Job
from training.run_directory import absolute, default_path
from training.settings import Settings, load_settings
from training.typed import nearest

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
INTERRUPTED = 130
# Mappings whose keys nobody can list: they go to the environment as they are.
FREE_FORM = ("env.kwargs.", "env.kwargs=")


def main(train: Callable[[Job], float | None]) -> None:
    """Compose the configuration, check it, train, and exit with the code that says how it went."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(CONFIGS), end="")
        return
    sys.argv[1:] = arranged(sys.argv[1:])
    # Otherwise Hydra prints its own errors over several lines and exits with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    def task(config: DictConfig) -> float | None:
        try:
            return train(accept(config))
        except Exception as error:
            # A sweep goes on with its other jobs, and raises this one's error at its end.
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise
            fail(error)

    application = hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
    try:
        application(task)()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        fail(error)


def arranged(arguments: list[str]) -> list[str]:
    """Let people write `-m` anywhere, and `env.kwargs.x=…` as for keys that exist already."""
    flags = [a for a in arguments if a in ("-m", "--multirun")]
    rest = [a for a in arguments if a not in flags]
    return flags + [f"++{a}" if a.startswith(FREE_FORM) else a for a in rest]


def fail(error: Exception) -> NoReturn:
    """Print one line and exit with the code of the failure."""
    if isinstance(error, ExpectedError):
        reason, code = str(error), error.exit_code
    elif isinstance(error, HydraException | OmegaConfBaseException):
        reason, code = explain(error), SettingError.exit_code
    else:
        reason = f"{type(error).__name__}: {error} (the traceback is in the run's train.log)"
        code = ExpectedError.exit_code
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(code)


def accept(config: DictConfig) -> Job:
    """Check a composed configuration before anything slow is imported or written."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    settings = load_settings(values)  # type: ignore[arg-type]
    refuse_missing_device(settings.run.device)
    # Before any code of an environment runs, which may change the working directory.
    directory = absolute(_directory(settings))
    try:
        spec = probe(settings.run.env)
    except SettingError as error:
        raise SettingError(f"env.{error.field}", error.value, error.reason) from None
    settings.agent.refuse_unfit(spec)
    return Job(settings, spec, values, _hydra_files(config), directory)  # type: ignore[arg-type]


def _hydra_files(config: DictConfig) -> dict[str, Any]:
    h = HydraConfig.get()
    return {
        "config": config,
        "hydra": OmegaConf.create({"hydra": OmegaConf.to_container(h, resolve=False)}),
        "overrides": h.overrides.task,
    }


def _directory(settings: Settings) -> Path:
    h, run = HydraConfig.get(), settings.run
    if run.run_dir:
        return Path(run.run_dir)
    if h.mode == RunMode.MULTIRUN:
        return Path(h.runtime.output_dir)
    return default_path(run.env.id, settings.agent.name, run.seed)


def explain(error: Exception) -> str:
    """Say in one line what Hydra refused, with the nearest name there is."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        choices = sorted(error.options or [])
        if group and choices:
            return f"{group}={name}: no such {group}; {nearest(name, choices)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; overrides look like agent.gamma=0.99"
    text = str(error)
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return _unknown_key(key.group(1))
    cause = error.__cause__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else repr(error)
    return (
        first if cause is None or str(cause) in first else f"{first} ({str(cause).splitlines()[0]})"
    )


def _unknown_key(key: str) -> str:
    value = next((a.partition("=")[2] for a in sys.argv if a.startswith(f"{key}=")), "")
    return f"{key}={value}: no such key; {nearest(key, known_keys())}"


def known_keys() -> list[str]:
    """Return every full key of the default configuration, and the groups."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = OmegaConf.to_container(compose("config"), resolve=False)
    keys: list[str] = []

    def walk(node: Any, path: str) -> None:
        for name, value in node.items():
            keys.append(path + name)
            if isinstance(value, dict):
                walk(value, path + name + ".")

    walk(config, "")
    return keys
