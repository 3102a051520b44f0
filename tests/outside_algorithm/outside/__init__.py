"""An algorithm that is not part of the tree."""
