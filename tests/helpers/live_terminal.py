"""A program on a real terminal of 80 columns, and what it shows there."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time

LIMIT = 120  # seconds until a text counts as missing; the line is drawn twice a second


class Terminal:
    """Starts a program on a pseudo-terminal."""

    def __init__(self, start):
        """Start it by `start(terminal)`, which returns the process."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = start(theirs)
        os.close(theirs)
        self.text = ""

    @classmethod
    def of_command(cls, command, folder, env, stdout=None):
        """Start a command there; stdout may go elsewhere, as in a pipe."""
        plain = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        return cls(
            lambda terminal: subprocess.Popen(
                command, stdin=terminal, stdout=stdout or terminal, stderr=terminal, cwd=folder,
                env=plain | {"TERM": "xterm"}, text=True,
            )
        )  # fmt: skip

    def _read(self):
        """Read more; return whether somebody still writes."""
        try:
            found = os.read(self._ours, 1 << 16).decode()
        except OSError:
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found)
        return True

    def until(self, text):
        """Read until `text` comes, and forget what came before; return its line."""
        end = time.monotonic() + LIMIT
        while text not in self.text:
            assert self._read() and time.monotonic() < end, self.text[-2000:]
        before, _, after = self.text.rpartition(text)
        start = re.split(r"[\r\n]", before)[-1]
        self.text = after
        return start + text + re.split(r"[\r\n]", after)[0]

    def rest(self):
        """Read to the end; return what came, and the exit code."""
        while self._read():
            pass
        return self.text, self.process.wait()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
