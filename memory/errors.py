"""Expected failures: each is one clear line for the person at the keyboard and an exit code."""


class ExpectedError(Exception):
    """A failure that is explained in one line; its traceback goes to the log only."""

    exit_code = 1


class SettingError(ExpectedError):
    """Refuse a setting: which one, its value, and what is wrong with it."""

    exit_code = 2

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={value}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class NonFiniteError(ExpectedError):
    """Stop a run whose rewards, observations or losses are no longer numbers."""

    exit_code = 5


class MemoryBudgetError(ExpectedError):
    """Refuse an allocation, or stop a run, that does not fit in the memory there is."""

    exit_code = 7
