"""The conversation as tools of verl 0.7 to 0.9 see it: `execute(instance_id, parameters, agent_data=...)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sglang_multiturn.schemas import plain_json

__all__ = ["AgentData"]


@dataclass(kw_only=True)  # no slots: as on verl's, tools may set attributes of their own
class AgentData:
    """One a conversation, shared by its tools. They read it; only `extra_fields` is theirs to write.

    The attributes are those of verl's class of this name (tool_agent_loop.py:60). What this package keeps elsewhere
    (tokens, masks, log-probabilities) is empty here, and so are media.
    """

    request_id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation so far in OpenAI's shape, the turn with this very call included."""
    tools_kwargs: dict[str, Any] = field(default_factory=dict)
    """The row's own: `{tool: {"create_kwargs": {...}, ...}}`."""
    interaction_kwargs: dict[str, Any] = field(default_factory=dict)
    """The row's `extra_info.interaction_kwargs`, which verl had here up to 0.7."""
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Whatever tools keep for each other. Lives as long as the conversation."""

    assistant_turns: int = 0
    user_turns: int = 0
    """Turns that something answered, tools included: verl counts those too."""
    tool_rewards: list[float] = field(default_factory=list)
    """Step rewards so far."""
    turn_scores: list[float] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)

    image_data: list[Any] | None = None
    video_data: list[Any] | None = None
    audio_data: list[Any] | None = None
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    mm_processor_output: list[Any] | None = None
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    routed_experts: Any = None

    def to_json(self) -> dict[str, Any]:
        """What another process is sent: plain JSON of what is set, without `extra_fields`, which never leave theirs."""
        sent = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra_fields"}
        plain = plain_json({name: value for name, value in sent.items() if value not in (None, [], {}, 0)})
        # Something in it that JSON has no way to write (a circle): without the tools' own words rather than not at all.
        return plain if isinstance(plain, dict) else {"request_id": self.request_id}

    @classmethod
    def from_json(cls, sent: Mapping[str, Any], extra_fields: dict[str, Any]) -> Self:
        """In the other process, with the `extra_fields` that its instance keeps from call to call."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in sent.items() if name in known} | {"extra_fields": extra_fields})
