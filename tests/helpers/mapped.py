"""Modules that unmap start-up code, which a test process needs again."""

import sys


def unmapping():
    """Return the modules that have imported `unmap_clean_pages`."""
    ours = [module for name, module in sys.modules.items() if name.startswith("steadyrl.")]
    return [module for module in ours if "unmap_clean_pages" in vars(module)]
