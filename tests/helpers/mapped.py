"""Where runs unmap the programs they needed only to start: a test process needs them again."""

import sys


def unmapping():
    """Return the modules that have `unmap_clean_pages` by its name."""
    ours = [module for name, module in sys.modules.items() if name.startswith("steadyrl.")]
    return [module for module in ours if "unmap_clean_pages" in vars(module)]
