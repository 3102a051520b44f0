"""Programs that write policies and their episodes to files of other programs."""
