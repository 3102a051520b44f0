"""Host and accelerator memory: bounded histories, detached metrics, budgets."""
