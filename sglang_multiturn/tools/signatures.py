"""How a dataset row's own arguments reach a tool's methods, whichever version the tool was written for.

| written for | `create` is called as |
|---|---|
| verl's PR #1037, 0.4, 0.5 | `create(instance_id, **create_kwargs)`: flat |
| verl 0.6 to 0.9 | `create(create_kwargs={...})`: nested |

What a method gets follows from what it says it takes, for all verbs alike:

* names in its signature get the row's keys of these names; `**kwargs` gets all of them;
* `create_kwargs` (`execute_kwargs`, ...) gets the whole row part, when the signature names it, or when the method
  takes `**kwargs` and some method of its class says that word: `kwargs.get("create_kwargs")`;
* `agent_data` likewise, though by its word alone only in `execute`, which is where verl passes it.

So a tool that forwards `**kwargs` to something else never finds in it what neither the row nor its own class names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

from sglang_multiturn.config import closest
from sglang_multiturn.errors import ToolContractError

__all__ = ["Verb", "call_kwargs", "create_args", "takes_agent_data"]

Verb = Literal["create", "execute", "calc_reward", "snapshot", "restore", "release"]

_OURS: Mapping[Verb, int] = {
    "create": 1,
    "execute": 2,
    "calc_reward": 1,
    "snapshot": 1,
    "restore": 2,
    "release": 1,
}
"""How many arguments the caller gives by position: the instance id, and the model's for `execute`, the state for
`restore`."""
_AGENT_DATA = "agent_data"
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a method takes beside the arguments that its caller gives by position."""

    shown: str
    names: frozenset[str]
    required: tuple[str, ...]
    taken: frozenset[str]
    """Names of the arguments that the caller gives by position: a row cannot give them too."""
    is_open: bool
    """It has `**kwargs`."""
    takes_id: bool
    said: frozenset[str]
    """Of the words `<verb>_kwargs` and `agent_data` those that its class says."""

    def takes(self, key: str, nested: str | None = None) -> bool:
        """Whether a row's key can be an argument of its own; `nested` is the name under which all of them go."""
        if key in self.taken:
            return False
        return key in self.names or (self.is_open and nested not in self.names)


def call_kwargs(
    method: Callable[..., Any], verb: Verb, row_kwargs: Mapping[str, Any], agent_data: object | None = None
) -> dict[str, Any]:
    """Keyword arguments to call a tool's method with, beside those that stand by position.

    Args:
        method: A bound method of a tool.
        verb: Which it is.
        row_kwargs: The row's `<verb>_kwargs` for this tool; rows have none for `snapshot` and `restore`.
        agent_data: The conversation as verl's tools see it; None where there is none.

    Raises:
        ToolContractError: a key of the row fits nowhere, or an argument without a default has no key.
    """
    signature = _signature_of(method, verb)
    nested = f"{verb}_kwargs"
    if nested in signature.names or (signature.is_open and nested in signature.said):
        flat = {key: value for key, value in row_kwargs.items() if signature.takes(key, nested)}
        given = flat | {nested: dict(row_kwargs)}
    else:
        if unfit := [key for key in row_kwargs if not signature.takes(key)]:
            raise ToolContractError(_unfit(method, verb, signature, unfit[0]))
        given = dict(row_kwargs)
    if _takes_agent_data(signature, verb, agent_data):
        given.setdefault(_AGENT_DATA, agent_data)
    if missing := [name for name in signature.required if name not in given]:
        raise ToolContractError(
            f"{_name_of(method, verb)} needs {missing[0]!r}, which the row's {nested} do not bring: they have "
            f"{', '.join(map(repr, row_kwargs)) or 'nothing'}. It is {signature.shown}"
        )
    return given


def takes_agent_data(execute: Callable[..., Any]) -> bool:
    """Whether a tool's `execute` wants to be shown the conversation."""
    signature = _signature_of(execute, "execute")
    return _AGENT_DATA in signature.names or (signature.is_open and _AGENT_DATA in signature.said)


def create_args(create: Callable[..., Any], instance_id: str) -> tuple[str, ...]:
    """`(instance_id,)`, or nothing for a `create` that takes none: verl 0.7 and later let tools name instances."""
    return (instance_id,) if _signature_of(create, "create").takes_id else ()


def _takes_agent_data(signature: _Signature, verb: Verb, agent_data: object | None) -> bool:
    if _AGENT_DATA in signature.names:
        return agent_data is not None or _AGENT_DATA in signature.required
    by_word = verb == "execute" and signature.is_open and _AGENT_DATA in signature.said
    return by_word and agent_data is not None


def _unfit(method: Callable[..., Any], verb: Verb, signature: _Signature, key: str) -> str:
    said = f"{_name_of(method, verb)} takes no {key!r}, which the row's {verb}_kwargs bring"
    if key in signature.taken:
        return f"{said}: the rollout gives it. Leave the key out of the rows"
    guess = closest(key, signature.names) if signature.names else ""
    end = "" if guess.endswith("?") else "."
    return f"{said}{guess}{end} It is {signature.shown}: correct the key, or add **kwargs to the method"


def _name_of(method: Callable[..., Any], verb: Verb) -> str:
    tool = getattr(method, "__self__", None)
    name = getattr(tool, "name", None)
    return f"tool {name!r}: {type(tool).__name__}.{verb}" if isinstance(name, str) else verb


def _signature_of(method: Callable[..., Any], verb: Verb) -> _Signature:
    owner: type = type(getattr(method, "__self__", None))
    return _inspected(getattr(method, "__func__", method), owner, verb)


@functools.lru_cache(maxsize=1024)
def _inspected(function: Callable[..., Any], owner: type, verb: Verb) -> _Signature:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: nothing can be told, so everything is passed
        return _Signature("(...)", frozenset(), (), frozenset(), is_open=True, takes_id=True, said=frozenset())
    if owner is not type(None) and parameters and parameters[0].kind in _BY_POSITION:
        del parameters[0]  # self
    shown = f"{verb}({', '.join(_shown(parameter) for parameter in parameters)})"
    takes_id = _takes_id(parameters)
    positional = [parameter for parameter in parameters if parameter.kind in _BY_POSITION]
    ours = positional[: _OURS[verb]] if takes_id else []
    others = [parameter for parameter in parameters if parameter.kind in _BY_NAME and parameter not in ours]
    return _Signature(
        shown=shown,
        names=frozenset(parameter.name for parameter in others),
        required=tuple(parameter.name for parameter in others if parameter.default is inspect.Parameter.empty),
        taken=frozenset(parameter.name for parameter in ours if parameter.kind in _BY_NAME),
        is_open=any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        takes_id=takes_id,
        said=_words_of(function, owner) & {f"{verb}_kwargs", _AGENT_DATA},
    )


def _takes_id(parameters: list[inspect.Parameter]) -> bool:
    """Whether the first argument by position can be an instance id."""
    first = parameters[0] if parameters else None
    if first is None or first.name == "create_kwargs":
        return False
    return first.kind in (*_BY_POSITION, inspect.Parameter.VAR_POSITIONAL)


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}=..."


def _words_of(function: Callable[..., Any], owner: type) -> frozenset[str]:
    """Every text that stands as a constant in the code of a method, its class and the classes it inherits from."""
    members = [value for cls in owner.__mro__ for value in vars(cls).values()]
    words: set[str] = set()
    for member in (function, *members):
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        code = getattr(inspect.unwrap(member), "__code__", None) if inspect.isfunction(member) else None
        words.update(() if code is None else _words_in(code))
    return frozenset(words)


def _words_in(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words_in(constant)
        elif isinstance(constant, str):
            yield constant
