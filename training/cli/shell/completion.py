"""Complete programs, keys and presets in a shell.

eval "$(steadyrl completion bash)"     in ~/.bashrc
eval "$(steadyrl completion zsh)"      in ~/.zshrc, below compinit
source (steadyrl completion fish | psub)   in ~/.config/fish/config.fish

`query` prints what a line may go on with; the shell asks for it. For clones: docs/commands.md.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from typing import NoReturn

from omegaconf import DictConfig

from steadyrl.core.errors import ExpectedError, exit_on_error
from steadyrl.training.cli.programs import PROGRAMS, documented_parser
from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.logging.terminal import safe_stdout

# Bash breaks words at `=` and `:`, and replaces only what follows the last one.
BASH = """\
_steadyrl() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    local before=""
    [[ $COMP_WORDBREAKS == *=* ]] && before="${word%"${word##*[=:]}"}"
    mapfile -t COMPREPLY < <(steadyrl completion query "$line" 2>/dev/null)
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o nospace -o default -F _steadyrl steadyrl
"""
ZSH = """\
_steadyrl() {
    local line="${words[1,CURRENT-1]} $PREFIX"
    local -a found=("${(@f)$(steadyrl completion query "$line" 2>/dev/null)}")
    [[ -n "$found[1]" ]] && compadd -Q -S '' -- "$found[@]" || _files
}
compdef _steadyrl steadyrl
"""
FISH = """\
function __steadyrl
    steadyrl completion query (commandline -cp) 2>/dev/null | string trim
end
complete -c steadyrl -a '(__steadyrl)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
# Options of training that take a value which changes the choices.
FOLDERS = ("--config-dir", "-cd")
WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-name", "-cn")  # others


def choices(line: str) -> list[str]:
    """Return what the last word of a command line may be; [] leaves files to the shell."""
    earlier, word = line.rsplit(" ", 1) if " " in line else (line, "")
    try:
        before = shlex.split(earlier)[1:]
    except ValueError:  # a quote that is not closed
        return []
    if before[:2] == ["envs", "check"] and len(before) == 2:
        names = sorted(path.stem for path in (CONFIGS / "env").glob("*.yaml"))
        return [f"{name} " for name in names if name.startswith(word)]
    if before and before[0] in PROGRAMS:
        return []
    programs = [] if before else ["train", *PROGRAMS]
    found = [f"{name} " for name in programs if name.startswith(word)]
    return found + _overrides(before[before[:1] == ["train"] :], word)


def _overrides(before: Sequence[str], word: str) -> list[str]:
    """Return the keys and values that Hydra offers."""
    from steadyrl.training.cli.arguments import read
    from steadyrl.training.cli.main import run_hydra

    options, typed, words = [], [], iter(before)
    for each in words:
        if each in FOLDERS:
            options += [each, next(words, "")]
        elif each.startswith(FOLDERS):
            options.append(each)
        elif each in WITH_VALUE:
            next(words, "")
        elif not each.startswith("-"):
            typed.append(each)
    if word.startswith("-"):
        return []
    os.environ["COMP_LINE"] = " ".join(["train.py", *typed, word])  # where Hydra reads it
    printed = io.StringIO()
    # Whatever is wrong with the line is said once it is run.
    with suppress(ExpectedError, SystemExit), redirect_stdout(printed):
        run_hydra(_never, read([*options, "--shell-completion", "query=bash"]))
    return [each for each in printed.getvalue().split() if each.startswith(word)]


def _never(config: DictConfig) -> NoReturn:
    raise AssertionError("completion trains nothing")


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the script of a shell, or the choices for a line."""
    parser = documented_parser(__doc__)
    programs = parser.add_subparsers(required=True, metavar="bash|zsh|fish|query", dest="what")
    for shell in SCRIPTS:
        programs.add_parser(shell, help=f"print the script for {shell}")
    query = programs.add_parser("query", help="print the choices for a line")
    query.add_argument("line")
    with safe_stdout():
        args = parser.parse_args(arguments)
        print(SCRIPTS.get(args.what) or "\n".join(choices(args.line)), end="")
