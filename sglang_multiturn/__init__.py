"""Multi-turn, tool-using rollouts on SGLang, handed to verl as tokens that can be trusted.

Importing this package is light: no torch, transformers, sglang, ray, verl or aiohttp. A name is imported from its
module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AsyncRolloutRequest": "sglang_multiturn.request",
    "BaseTool": "sglang_multiturn.tools.base",
    "ByteChatML": "sglang_multiturn.chat.byte_chatml",
    "Disposition": "sglang_multiturn.request",
    "Engine": "sglang_multiturn.engine.base",
    "FinishReason": "sglang_multiturn.engine.base",
    "Generation": "sglang_multiturn.engine.base",
    "GenerationId": "sglang_multiturn.engine.base",
    "GroupConfig": "sglang_multiturn.config",
    "GroupSampler": "sglang_multiturn.groups.sampler",
    "HFChatTemplate": "sglang_multiturn.chat.hf_template",
    "Message": "sglang_multiturn.schemas",
    "RequestSpec": "sglang_multiturn.request",
    "RequestState": "sglang_multiturn.request",
    "RolloutConfig": "sglang_multiturn.config",
    "RolloutContext": "sglang_multiturn.conversation.context",
    "RolloutEngine": "sglang_multiturn.runner",
    "SGLangEngine": "sglang_multiturn.engine.sglang_engine",
    "SamplingParams": "sglang_multiturn.engine.base",
    "ScriptedEngine": "sglang_multiturn.engine.scripted",
    "ScriptedTurn": "sglang_multiturn.engine.scripted",
    "SglangMultiturnError": "sglang_multiturn.errors",
    "StopReason": "sglang_multiturn.request",
    "TokenLedger": "sglang_multiturn.tokens",
    "ToolError": "sglang_multiturn.errors",
    "ToolRegistry": "sglang_multiturn.tools.registry",
    "ToolResponse": "sglang_multiturn.tools.base",
    "Trajectory": "sglang_multiturn.trajectory",
    "read_run": "sglang_multiturn.journal",
    "read_trajectories": "sglang_multiturn.trajectory",
    "run_one": "sglang_multiturn.rollout",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from sglang_multiturn.chat.byte_chatml import ByteChatML
    from sglang_multiturn.chat.hf_template import HFChatTemplate
    from sglang_multiturn.config import GroupConfig, RolloutConfig
    from sglang_multiturn.conversation.context import RolloutContext
    from sglang_multiturn.engine.base import Engine, FinishReason, Generation, GenerationId, SamplingParams
    from sglang_multiturn.engine.scripted import ScriptedEngine, ScriptedTurn
    from sglang_multiturn.engine.sglang_engine import SGLangEngine
    from sglang_multiturn.errors import SglangMultiturnError, ToolError
    from sglang_multiturn.groups.sampler import GroupSampler
    from sglang_multiturn.journal import read_run
    from sglang_multiturn.request import AsyncRolloutRequest, Disposition, RequestSpec, RequestState, StopReason
    from sglang_multiturn.rollout import run_one
    from sglang_multiturn.runner import RolloutEngine
    from sglang_multiturn.schemas import Message
    from sglang_multiturn.tokens import TokenLedger
    from sglang_multiturn.tools.base import BaseTool, ToolResponse
    from sglang_multiturn.tools.registry import ToolRegistry
    from sglang_multiturn.trajectory import Trajectory, read_trajectories


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
