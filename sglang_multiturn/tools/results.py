"""Whatever a tool returned, in the shape of any version, as text, numbers and plain JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from sglang_multiturn.errors import ToolContractError
from sglang_multiturn.schemas import plain_json, plain_text
from sglang_multiturn.tools.base import ToolResponse
from sglang_multiturn.tools.host import MAX_SNAPSHOT_CHARS, ToolReply

__all__ = ["snapshot_as_json", "unpack_instance_id", "unpack_number", "unpack_reply"]

_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


def unpack_reply(result: Any, what: str) -> ToolReply:
    """Response, step reward and metrics of whatever `execute` returned; `what` names it in errors.

    Raises:
        ToolContractError: it is neither a response nor a tuple of (response, reward, metrics), the response is no text
            (media included), or the reward is no finite number.
    """
    if not isinstance(result, tuple):
        return ToolReply(text=_text_of(result, what), stop=_stops(result))
    if not 1 <= len(result) <= 3:
        raise ToolContractError(f"{what} must return (response, reward, metrics), got {len(result)} values")
    response = result[0]
    return ToolReply(
        text=_text_of(response, what),
        reward=unpack_number(result[1], what) if len(result) > 1 else 0.0,
        metrics=_metrics(result[2], what) if len(result) > 2 else {},
        stop=_stops(response),
    )


def unpack_number(value: Any, what: str) -> float:
    """A reward; None is 0. Raises ToolContractError unless it is a finite number."""
    if value is None:
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ToolContractError(f"{what} returned {_shown(value)} as a reward; a number is needed") from error
    if not math.isfinite(number):
        raise ToolContractError(f"{what} returned {number} as a reward; a finite number is needed")
    return number


def unpack_instance_id(created: Any, what: str) -> str:
    """The instance id of what `create` returned: `str`, or `(str, ToolResponse)` from verl 0.5 on.

    Raises:
        ToolContractError: it is no text.
    """
    instance_id = created[0] if isinstance(created, tuple) and created else created
    if not isinstance(instance_id, str):
        raise ToolContractError(f"{what} must return an instance id, got {type(instance_id).__name__}")
    return instance_id


def snapshot_as_json(state: Any, what: str) -> str:
    """What `snapshot` returned, as ASCII JSON from which the very same value can be read again.

    Raises:
        ToolContractError: it is not plain JSON, which a tuple, a key that is no text and NaN are not; or it is longer than
            `MAX_SNAPSHOT_CHARS`.
    """
    try:
        written = json.dumps(_JSON.validate_python(state), allow_nan=False, separators=(",", ":"))
    except ValidationError as error:
        said = error.errors(include_input=False, include_context=False, include_url=False)[0]["msg"]
        raise ToolContractError(
            f"{what} returned what is no JSON ({said}); make it of dicts with text as keys, lists, text, numbers, True, "
            "False and None"
        ) from None
    except ValueError as error:
        raise ToolContractError(f"{what} returned what is no JSON: {error}") from None
    if len(written) > MAX_SNAPSHOT_CHARS:
        raise ToolContractError(
            f"{what} returned {len(written)} bytes of JSON; at most {MAX_SNAPSHOT_CHARS} are allowed"
        )
    return written


def _text_of(response: Any, what: str) -> str:
    """Text of a str, our ToolResponse or verl's."""
    if isinstance(response, str):
        return plain_text(response)
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise ToolContractError(f"{what} returned an image or video; only text is supported in this version")
    text = getattr(response, "text", response)
    if text is None and (isinstance(response, ToolResponse) or hasattr(response, "text")):
        return ""
    if not isinstance(text, str):
        raise ToolContractError(f"{what} must return text or a ToolResponse, got {type(response).__name__}")
    return plain_text(text)


def _metrics(metrics: Any, what: str) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ToolContractError(f"{what} must return its metrics as a dict, got {type(metrics).__name__}")
    kept = plain_json(dict(metrics))
    return kept if isinstance(kept, dict) else {"unreadable": kept}


def _stops(response: Any) -> bool:
    return bool(getattr(response, "stop", False))


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:  # noqa: BLE001 - a tool's object may have any __repr__
        return f"a {type(value).__name__}"
