"""A random conversation, planned before it is had: what everyone says, how the engine behaves, what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from conversations.choices import Choices
from conversations.speakers import Answer, Manner, call_text
from conversations.worlds import WORDS, World

from sglang_multiturn import FinishReason, Message
from sglang_multiturn.schemas import Role

MOST_TURNS = 4


class Mishap(StrEnum):
    """What goes wrong in a generation."""

    NONE = "none"
    ABORT = "abort"
    """Someone aborts the conversation in the middle of it."""
    ENGINE_ABORT = "engine_abort"
    """The engine aborts it by itself."""
    SUSPEND = "suspend"
    """Someone suspends the conversation about then, and resumes it, several times."""
    ERROR = "error"
    """The engine raises an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the engine samples."""

    ids: tuple[int, ...]
    end_id: int | None = None
    finish_reason: FinishReason | None = None
    """Forced."""
    mishap: Mishap = Mishap.NONE
    attempts: int = 1
    """So many attempts go wrong before one does not."""
    after: int = 0
    """So many tokens are sampled before an abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """An assistant's turn of a well-behaved conversation: words, or calls (each with the answer it asks for)."""

    words: str = ""
    thoughts: str = ""
    calls: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One conversation."""

    prompt: tuple[Message, ...]
    turns: tuple[Turn, ...] = ()
    """Of an engine that says anything; beyond the last one it says a word and ends."""
    spoken: tuple[Spoken, ...] = ()
    """Of a model that says what the template itself would render; then there are no `turns`."""
    answers: tuple[Answer, ...]
    users: tuple[str, ...] | None = None
    """None: nobody speaks after the model."""
    aborted_before: bool = False
    suspended_before: bool = False
    keeps_logprobs: bool = True
    max_model_len: int = 32_768
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the `RolloutConfig`."""
    cut: int = 0
    """Where its ledger is cut afterwards."""


def plan_of(data: bytes, world: World) -> Plan:
    """The conversation that bytes stand for in a family."""
    choices = Choices(data)
    return _well_behaved(choices, world) if choices.chance(16) else _wild(choices, world)


# A model that says what its template would render


def _well_behaved(choices: Choices, world: World) -> Plan:
    roles = choices.pick(world.patterns)
    answers = tuple(Answer(text=_words(choices)) for _ in range(4))
    spoken = tuple(_spoken(choices, world) for _ in range(1 + choices.below(3)))
    return Plan(
        prompt=tuple(world.conversation(roles, [_words(choices) for _ in roles])),
        spoken=spoken,
        answers=answers,
        users=tuple(_words(choices) for _ in range(3)),
        settings={"drift_check": choices.pick(("off", "off", "count"))},
    )


def _spoken(choices: Choices, world: World) -> Spoken:
    dialect = world.template.dialect
    thoughts = _words(choices) if dialect.reasoning_key is not None and choices.chance(60) else ""
    if not (world.takes_tools and dialect.shows_calls and choices.chance(60)):
        return Spoken(words=_words(choices), thoughts=thoughts)
    calls = tuple(choices.below(4) for _ in range(1 + choices.below(world.max_calls)))
    return Spoken(calls=calls, thoughts=thoughts)


def _words(choices: Choices) -> str:
    return "w" + "".join(choices.pick(WORDS) for _ in range(choices.below(4)))


# A model, an engine, tools and users that may do anything


def _wild(choices: Choices, world: World) -> Plan:
    prompt = _asked(choices, world)
    users = None if choices.chance(40) else tuple(_text(choices, world) for _ in range(choices.below(3)))
    return Plan(
        prompt=prompt,
        turns=tuple(_turn(choices, world) for _ in range(1 + choices.below(MOST_TURNS))),
        answers=tuple(_answer(choices, world) for _ in range(3)),
        users=users,
        aborted_before=choices.chance(2),
        suspended_before=choices.chance(4),
        keeps_logprobs=not choices.chance(5),
        max_model_len=choices.pick((32_768, 32_768, 32_768, 20 + _estimate(world, prompt) + choices.below(200))),
        settings=_settings(choices, world, prompt),
        cut=choices.below(256),
    )


def _asked(choices: Choices, world: World) -> tuple[Message, ...]:
    """Most prompts are examples, whose ids are known: anything else takes longer than the rest of the conversation."""
    roles = choices.pick(world.patterns)
    if choices.chance(60):
        return world.examples[roles][0]
    texts = [_words(choices) if role in ("system", "assistant") else _text(choices, world) for role in roles]
    return tuple(world.conversation(roles, texts))


def _text(choices: Choices, world: World) -> str:
    """Anything a tool or user may say: nothing, odd characters, control tokens, a forged turn, a lot of text."""
    if choices.chance(5):
        return choices.pick(WORDS) * (40 + choices.below(200))
    count = choices.pick((1, 0, 1, 2, 3, 4))
    return "".join(choices.pick(WORDS if choices.chance(40) else world.hostile) for _ in range(count))


def _answer(choices: Choices, world: World) -> Answer:
    manner = choices.pick(
        (*[Manner.SAYS] * 40, *[Manner.REFUSES] * 8, Manner.STOPS, Manner.ABORTS, Manner.SUSPENDS, Manner.CRASHES)
    )
    text = _text(choices, world)
    return Answer(text=text + "\ud83d" if choices.chance(3) else text, manner=manner)


def _turn(choices: Choices, world: World) -> Turn:
    calling = world.takes_tools and choices.chance(65)
    ids = _sampled(choices, world, calling)
    role: Role = "tool" if calling else "user"
    end_id, finish_reason = _ending(choices, world, world.ends[role])
    mishap = choices.pick(
        (*[Mishap.NONE] * 16, Mishap.ABORT, Mishap.ENGINE_ABORT, Mishap.SUSPEND, Mishap.SUSPEND, Mishap.ERROR)
    )
    return Turn(
        ids=ids,
        end_id=end_id,
        finish_reason=finish_reason,
        mishap=mishap,
        attempts=1 + choices.below(3),
        after=choices.below(len(ids) + 2) if mishap is not Mishap.NONE else 0,
    )


def _sampled(choices: Choices, world: World, calling: bool) -> tuple[int, ...]:
    if choices.chance(8):
        return ()
    ids = _noise(choices, world) if choices.chance(10) else _spelt(choices, world, _said(choices, world, calling))
    if choices.chance(15):
        at = choices.below(min(256, len(ids) + 1))
        ids = (*ids[:at], *_noise(choices, world), *ids[at:])
    return ids


def _said(choices: Choices, world: World, calling: bool) -> str:
    words = "".join(choices.pick(WORDS) for _ in range(choices.below(4)))
    if not calling:
        return words + choices.pick(world.hostile) if choices.chance(20) else words
    return words + " ".join(_call(choices, world) for _ in range(choices.pick((1, 1, 1, 2, 3))))


def _call(choices: Choices, world: World) -> str:
    good = call_text("echo", f'{{"i": {choices.below(3)}}}')
    if not choices.chance(25):
        return good
    unknown = choices.pick(world.hostile).replace(" ", "").replace("\n", "") or "no"
    return choices.pick(
        (call_text("echo", '{"i": 0'), call_text("echo", '{"i": "one"}'), call_text(unknown, "{}"), good[:-3], good[3:])
    )


def _spelt(choices: Choices, world: World, text: str) -> tuple[int, ...]:
    """A text's ids: as the tokenizer has them, or divided otherwise."""
    how = choices.below(4)
    if how == 0 or not text:
        return world.spelt(text) if text else ()
    if how == 1:
        return tuple(world.encode(text))
    if how == 2:
        return tuple(i for character in text for i in world.spelt(character))
    cuts = sorted(choices.below(len(text)) for _ in range(1 + choices.below(4))) if len(text) <= 256 else [1]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return tuple(i for piece in pieces if piece for i in world.spelt(piece))


def _noise(choices: Choices, world: World) -> tuple[int, ...]:
    """Ids that no text has."""
    known = world.template.vocab_size
    return tuple(
        world.control_ids[choices.wide(len(world.control_ids))] if choices.chance(40) else choices.wide(known)
        for _ in range(1 + choices.below(5))
    )


def _ending(choices: Choices, world: World, own: int) -> tuple[int | None, FinishReason | None]:
    kind = choices.pick(("own",) * 10 + ("other",) * 4 + ("length", "length", "stop", "control"))
    if kind == "other":
        return choices.pick(world.template.stop_token_ids), None
    if kind == "control":
        return world.control_ids[choices.wide(len(world.control_ids))], None
    if kind in ("length", "stop"):
        return None, FinishReason(kind)
    return own, None


def _settings(choices: Choices, world: World, prompt: tuple[Message, ...]) -> dict[str, Any]:
    long = _estimate(world, prompt)
    return {
        "max_response_tokens": choices.pick((4096, 4096, 1 + choices.below(200))),
        "max_turn_tokens": choices.pick((None, None, None, 1 + choices.below(40))),
        "max_prompt_tokens": choices.pick((None,) * 14 + (long + 50, max(1, long - choices.below(40)))),
        "max_model_len": choices.pick((None, None, None, None, 2 + long + choices.below(200))),
        "max_assistant_turns": choices.pick((16, 16, None, 1, 2, 3)),
        "max_tool_turns": choices.pick((None, None, None, 1)),
        "max_user_turns": choices.pick((None, None, None, 1)),
        "max_tool_result_tokens": choices.pick((1024, 1024, 8, 16, 40)),
        "tool_result_cut": choices.pick(("middle", "left", "right")),
        "max_parallel_calls": choices.pick((16, 16, 1, 2)),
        "max_errors_in_a_row": choices.pick((5, 5, 1)),
        "engine_retries": choices.pick((1, 0, 2)),
        "overlong": choices.pick(("train", "train", "mask")),
        "failed": choices.pick(("drop", "mask")),
        "history": choices.pick(("keep", "keep", "split")),
        "drift_check": choices.pick(("off",) * 9 + ("count",)),
    }


def _estimate(world: World, prompt: tuple[Message, ...]) -> int:
    """About how many tokens a prompt has."""
    return len(world.examples[tuple(message.role for message in prompt)][1]) + sum(len(m.text) for m in prompt) // 2
