"""Where runs unmap the programs they needed only to start: a test process needs them again."""

import sys


def unmapping():
    """Return the modules that have `let_go_of_code` by its name."""
    ours = [module for name, module in sys.modules.items() if name.startswith("steadyrl.")]
    return [module for module in ours if "let_go_of_code" in vars(module)]
