"""The compiler takes more memory than a small run: where that does not fit, updates run eagerly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from steadyrl.core.gates.gate import Unsupported
from steadyrl.memory.bounds import Bound, margin_of
from steadyrl.memory.budget import tightest_bound
from steadyrl.memory.process import readable

# At most, in this process and the C++ compiler's: 470 MB for DQN's update, 440 for PPO's.
COMPILER_BYTES = 500_000_000
_POLL_SECONDS = 0.1  # in which a C++ compiler takes some 30 MB


@contextmanager
def compiler_within_memory(bound: Callable[[], Bound] = tightest_bound) -> Iterator[None]:
    """Compile inside; raise Unsupported if that does not fit, or memory ends meanwhile.

    Then the processes that were started inside are ended before the kernel ends this one.
    """
    now = bound()
    left = now.free - margin_of(now.limit)
    if left < COMPILER_BYTES:
        raise Unsupported(
            f"compiling takes {readable(COMPILER_BYTES)} and {readable(max(0, left))} are left "
            f"({now.name}): updates run eagerly. A run with more memory compiles them once for all"
        )
    over, ended = threading.Event(), threading.Event()
    before = set(psutil.Process().children(recursive=True))

    def watch() -> None:
        while not over.wait(_POLL_SECONDS):
            now = bound()
            if now.free < margin_of(now.limit) // 2:
                ended.set()
                _kill(set(psutil.Process().children(recursive=True)) - before)

    thread = threading.Thread(target=watch, name="compiler-memory", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if ended.is_set():
            raise Unsupported(
                f"memory ran out while compiling ({now.name}): updates run eagerly"
            ) from error
        raise
    finally:
        over.set()
        thread.join()


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
