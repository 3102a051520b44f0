"""How the programs are called: the command that the reader typed."""
