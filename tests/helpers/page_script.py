"""Import the scripts of docs/, which is no package."""

import importlib.util

from command import ROOT


def page_script(name):
    """Return the module of docs/<name>.py."""
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
