"""What each method of a tool is called with, whatever it says it takes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from sglang_multiturn.errors import ToolContractError
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.signatures import Verb, call_kwargs, create_args

ROW = {"truth": 42, "low": 1}
DATA = AgentData(request_id="r")


def traced(function: Any) -> Any:
    @functools.wraps(function)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await function(self, *args, **kwargs)

    return wrapper


class Tool:
    name = "guess"


class Flat(Tool):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any: ...
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any: ...
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any: ...
    async def release(self, instance_id: str, **kwargs: Any) -> Any: ...


class ReadsNested(Flat):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return kwargs.get("create_kwargs", {})

    @traced
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return [key for key in kwargs if key == "agent_data"]


class InheritsNested(ReadsNested):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return await super().create(instance_id, **kwargs)


class NamesNested(Tool):
    async def create(self, instance_id: str, truth: int = 0, create_kwargs: Any = None, **kwargs: Any) -> Any: ...
    async def execute(self, instance_id: str, parameters: Any, agent_data: Any, execute_kwargs: Any = None) -> Any: ...
    async def calc_reward(self, instance_id: str, *, agent_data: Any = None) -> Any: ...
    async def release(self, instance_id: str) -> Any: ...


class NamesItself(Tool):
    async def create(self, create_kwargs: Any = None) -> Any: ...


class NamesItselfOpenly(Tool):
    async def create(self, **kwargs: Any) -> Any: ...


class Untold(Tool):
    async def create(self, *args: Any, **kwargs: Any) -> Any: ...


class Exact(Tool):
    async def create(self, instance_id: str, truth: int, low: int = 0) -> Any: ...


@pytest.mark.parametrize(
    ("tool", "verb", "given"),
    [
        (Flat(), "create", ROW),
        (Flat(), "execute", ROW),
        (Flat(), "calc_reward", ROW),
        (Flat(), "release", ROW),
        (ReadsNested(), "create", {**ROW, "create_kwargs": ROW}),
        (ReadsNested(), "execute", {**ROW, "agent_data": DATA}),
        (ReadsNested(), "calc_reward", ROW),
        (InheritsNested(), "create", {**ROW, "create_kwargs": ROW}),
        (NamesNested(), "create", {"truth": 42, "create_kwargs": ROW}),
        (NamesNested(), "execute", {"execute_kwargs": ROW, "agent_data": DATA}),
        (NamesItself(), "create", {"create_kwargs": ROW}),
        (NamesItselfOpenly(), "create", ROW),
        (Untold(), "create", ROW),
        (Exact(), "create", ROW),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_a_method_gets(tool: Any, verb: Verb, given: dict[str, Any]) -> None:
    assert call_kwargs(getattr(tool, verb), verb, ROW, DATA) == given


def test_agent_data_goes_where_it_is_named_and_no_further() -> None:
    assert call_kwargs(NamesNested().calc_reward, "calc_reward", {}, DATA) == {"agent_data": DATA}
    assert call_kwargs(NamesNested().calc_reward, "calc_reward", {}) == {}
    assert call_kwargs(NamesNested().execute, "execute", {}) == {"agent_data": None, "execute_kwargs": {}}
    assert call_kwargs(Flat().execute, "execute", {}, DATA) == {}
    assert call_kwargs(ReadsNested().create, "create", {}, DATA) == {"create_kwargs": {}}
    assert call_kwargs(ReadsNested().execute, "execute", {"agent_data": "the row's"}, DATA) == {
        "agent_data": "the row's"
    }


def test_a_create_that_takes_no_id_gets_none() -> None:
    assert create_args(NamesItself().create, "r") == ()
    assert create_args(NamesItselfOpenly().create, "r") == ()
    assert create_args(Untold().create, "r") == ("r",)
    assert create_args(Exact().create, "r") == ("r",)
    assert create_args(ReadsNested().create, "r") == ("r",)


@pytest.mark.parametrize(
    ("method", "row", "said"),
    [
        (
            Exact().create,
            {"truht": 42},
            "tool 'guess': Exact.create takes no 'truht', which the row's create_kwargs bring; did you mean 'truth'? It is "
            "create(instance_id, truth, low=...): correct the key, or add **kwargs to the method",
        ),
        (
            Exact().create,
            {"low": 1},
            "tool 'guess': Exact.create needs 'truth', which the row's create_kwargs do not bring: they have 'low'. It is "
            "create(instance_id, truth, low=...)",
        ),
        (
            Flat().create,
            {"instance_id": "mine"},
            "tool 'guess': Flat.create takes no 'instance_id', which the row's create_kwargs bring: the rollout gives it. "
            "Leave the key out of the rows",
        ),
    ],
)
def test_a_key_that_fits_nowhere_is_told(method: Any, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolContractError) as caught:
        call_kwargs(method, "create", row, DATA)
    assert str(caught.value) == said


def test_a_release_that_takes_nothing_refuses_what_a_row_brings() -> None:
    with pytest.raises(
        ToolContractError, match=r"NamesNested.release takes no 'why', which the row's release_kwargs bring"
    ):
        call_kwargs(NamesNested().release, "release", {"why": 1})


def test_what_cannot_be_looked_into_gets_everything() -> None:
    assert call_kwargs(dict.update, "create", ROW) == ROW
    assert create_args(dict.update, "r") == ("r",)


def test_agent_data_crosses_to_another_process_without_what_is_its_owns() -> None:
    data = AgentData(request_id="r", messages=[{"role": "user", "content": "hi"}], extra_fields={"lock": object()})
    data.assistant_turns, data.tool_rewards = 2, [0.0]
    sent = data.to_json()
    assert sent == {
        "request_id": "r",
        "messages": [{"role": "user", "content": "hi"}],
        "assistant_turns": 2,
        "tool_rewards": [0.0],
    }
    kept: dict[str, Any] = {"tried": [7]}
    there = AgentData.from_json({**sent, "of a later version": 1}, kept)
    assert there.extra_fields is kept
    assert (there.request_id, there.messages, there.image_data) == ("r", data.messages, None)


def test_agent_data_takes_attributes_of_a_tools_own() -> None:
    data = AgentData(request_id="r")
    data.session = "mine"  # type: ignore[attr-defined]
    assert data.session == "mine"  # type: ignore[attr-defined]
