"""The parent's hold on SGLang's process: starts it, says how it ended, and leaves nothing of it behind.

The child leads a session and process group of its own, so that Ctrl-C in a terminal does not reach it and its whole tree
can be ended at once. Everything it prints goes to a log file, whose end is part of every message about its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 16_384
_PACKAGE_ROOT = Path(__file__).parents[2]


class SGLangProcess:
    """One started child, with the socket to talk to it."""

    def __init__(self) -> None:
        self.sock, child_sock = socket.socketpair()
        self.log_path = Path(tempfile.mkdtemp(prefix="sglang_multiturn_")) / "sglang.log"
        # -P: a file in the user's working directory must not stand in for a module of ours or of SGLang's.
        command = [sys.executable, "-P", "-m", "sglang_multiturn.engine.sglang_child.main"]
        try:
            with child_sock, self.log_path.open("wb") as log:
                self._popen = subprocess.Popen(
                    [*command, str(child_sock.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    pass_fds=[child_sock.fileno()],
                    start_new_session=True,
                )
        except OSError:
            self.sock.close()
            raise

    @property
    def pid(self) -> int:
        """The child's process id, which is also that of its group."""
        return self._popen.pid

    async def end(self, *, patience_s: float) -> None:
        """Wait that long for the child to end by itself, kill what is left of its tree, and reap it."""
        # A thread, since waiting for a process in asyncio needs a child watcher that the caller's loop may not have.
        await asyncio.to_thread(self._end, patience_s)

    def _end(self, patience_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(patience_s)
        self.kill()
        self._popen.wait()

    def kill(self) -> None:
        """Kill the tree at once, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        """How it ended and the last lines of its log."""
        code = self._popen.poll()
        if code is None:
            how = "is still running"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        tail = self._log_tail()
        said = f"the last lines of its log {self.log_path}:\n{tail}" if tail else f"its log {self.log_path} is empty"
        return f"SGLang's process {self.pid} {how}; {said}"

    def remove_log(self) -> None:
        """After a clean end nobody needs it."""
        self.log_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.log_path.parent.rmdir()

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        return "\n".join([line for line in lines if line.strip()][-_LOG_TAIL_LINES:])


def _environment() -> dict[str, str]:
    """Ours, with this package importable however the parent came to import it."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{_PACKAGE_ROOT}" if path else str(_PACKAGE_ROOT)}
