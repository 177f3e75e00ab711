"""The one seam for users and environments: an assistant turn goes in, words or an end come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sglang_multiturn.request import StopReason
from sglang_multiturn.schemas import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the user or environment says next."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The conversation is over."""

    reason: Literal[StopReason.USER_STOP, StopReason.ENVIRONMENT_DONE]


class Interaction(Protocol):
    """Answers assistant turns; one object serves all conversations, told apart by `request_id`."""

    async def respond(self, request_id: str, messages: Sequence[Message]) -> Observation | Done:
        """Answer the last message, which is the assistant's. Anything raised ends the rollout as FAILED."""
        ...
