"""What holds for the whole suite."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let children hear Ctrl-C: a shell has what it starts in the background ignore it, and that is inherited."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
