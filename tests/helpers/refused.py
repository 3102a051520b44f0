"""Commands that are refused before anything is trained."""

import pytest

from steadyrl.training.cli.main import main


def refusal(capsys):
    """Run `sys.argv`, which must be refused with exit code 2 in one line; return the line."""
    with pytest.raises(SystemExit) as ended:
        main(lambda _: pytest.fail("the command was accepted"))
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line
