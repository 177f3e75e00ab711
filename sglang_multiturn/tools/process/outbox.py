"""Packets on their way to a process that may be slow to take them: sending never blocks and never fails."""

from __future__ import annotations

import collections
import socket


class Outbox:
    """The sending half of a packet socket that does not block. Once the other side is gone, what is sent is dropped."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: collections.deque[tuple[bytes, socket.socket | None]] = collections.deque()

    def send(self, packet: bytes, attached: socket.socket | None = None) -> bool:
        """Send a packet, now or with a later `flush`; `attached` goes with it and is closed here.

        Returns:
            Whether nothing waits.
        """
        self._waiting.append((packet, attached))
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as possible; whether nothing waits any more."""
        while self._waiting:
            packet, attached = self._waiting[0]
            try:
                self._send_now(packet, attached)
            except BlockingIOError:
                return False
            except OSError:  # the other side is gone, which the receiving half finds out by itself
                self.drop()
                return True
            self._waiting.popleft()
            if attached is not None:
                attached.close()
        return True

    def drop(self) -> None:
        """Forget what waits."""
        while self._waiting:
            _, attached = self._waiting.popleft()
            if attached is not None:
                attached.close()

    def _send_now(self, packet: bytes, attached: socket.socket | None) -> None:
        if attached is None:
            self._sock.send(packet)
        else:
            socket.send_fds(self._sock, [packet], [attached.fileno()])
