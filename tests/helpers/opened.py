"""Jobs for runs inside the test process, which a test can inspect."""

import hydra
from command import QUICK
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.run.job import accept


def job(folder, *overrides, quick=True):
    """Return the job of a run with these overrides in `folder`/run."""
    GlobalHydra.instance().clear()
    chosen = [*(QUICK if quick else ()), f"run_dir={folder / 'run'}", *overrides]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = hydra.compose("config", chosen, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    del config.hydra
    return accept(config)
