"""The seam to whoever writes down which tool instances there are, so that it is known after the process was killed."""

from __future__ import annotations

from typing import Protocol

__all__ = ["InstanceMarks"]


class InstanceMarks(Protocol):
    """Told on the event loop, at once; raises nothing. `asked_id` is the instance id that `create` is asked for."""

    def making(self, request_id: str, tool: str, asked_id: str) -> None:
        """`create` is about to be called: from now on there may be an instance."""
        ...

    def made(self, request_id: str, tool: str, asked_id: str, instance_id: str) -> None:
        """`create` chose another id than the one it was asked for."""
        ...

    def gone(self, request_id: str, tool: str, asked_id: str) -> None:
        """There is none: it was released or lost with its process, or `create` failed."""
        ...
