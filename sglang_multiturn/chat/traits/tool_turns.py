"""What becomes of the list of tools, of calls and of results."""

from __future__ import annotations

import json
import re

from sglang_multiturn.chat.traits.kinds import TraitKind
from sglang_multiturn.chat.traits.probe import (
    ANSWER,
    ARGUMENT,
    IDS,
    MORE,
    OTHER_TOOL,
    QUESTION,
    RESULT,
    SECOND_ARGUMENT,
    SECOND_RESULT,
    TOOL,
    Found,
    Probe,
    Rendering,
    answer,
    call,
    calling,
    more,
    quote,
    result,
    schema,
    system,
    user,
    user_opening,
)

_WORDS = "Let me look."
_HOSTILE = '\n a "quoted" word, é, <b>\n'


def tools_list(probe: Probe) -> Found:
    """Where the tools are shown."""
    shown = probe.show(user, tools=[schema()])
    if TOOL not in shown:
        reason = f"raises {shown.refusal!r}" if shown.refused else f"gives {quote(shown.text)}"
        yield TraitKind.TOOLS_NOT_SHOWN, f"a prompt with a tool {reason}"
        return
    later = probe.show(user, answer, more, tools=[schema()])
    if ANSWER in later.before(TOOL):
        yield TraitKind.TOOLS_MOVE, f"once a user speaks again the tools stand behind the answer: {later.around(TOOL)}"
    elif TOOL in probe.show(system, user, tools=[schema()]).after(system["content"]):
        opening = user_opening(probe)
        if opening and opening in shown.before(TOOL):
            yield TraitKind.TOOLS_IN_USER_TURN, f"tools stand in the first user's turn: {shown.around(TOOL)}"


def tool_messages(probe: Probe) -> Found:
    """Whether a result can be said at all, and what becomes of its text."""
    shown = probe.show(user, calling(), result())
    if shown.refused:
        yield TraitKind.TOOL_REFUSED, f"a tool message raises {shown.refusal!r}"
        return
    if RESULT not in shown:
        yield TraitKind.TOOL_DROPPED, f"a tool message is not shown: {quote(shown.after(QUESTION))}"
        return
    changed = probe.show(user, calling(), result(_HOSTILE))
    if _HOSTILE not in changed:
        said = changed.text.removeprefix(shown.before(RESULT)).removesuffix(shown.after(RESULT))
        yield TraitKind.TOOL_TEXT_CHANGED, f"{_how(said)}: {_HOSTILE!r} becomes {quote(said)}"
    elif re.search(r'"\w+": ?$', shown.before(RESULT)):
        yield TraitKind.TOOL_TEXT_UNQUOTED, f"a result stands unquoted in {shown.around(RESULT)}"
    uncalled = probe.show(user, answer, result())
    if RESULT not in uncalled:
        reason = f"raises {uncalled.refusal!r}" if uncalled.refused else f"is not shown: {uncalled.around(ANSWER)}"
        yield TraitKind.TOOL_NEEDS_CALL, f"a tool message that answers no call {reason}"
    later = probe.show(user, calling(), result(), calling(call(number=1)), result(SECOND_RESULT, 1))
    if not later.refused and ARGUMENT in later:
        first, second = shown.between(ARGUMENT, RESULT), later.between(ARGUMENT, SECOND_RESULT)
        if first != second.replace(IDS[1], IDS[0]):
            rounds = f"{quote(first[-60:])} in the first round, {quote(second[-60:])} in the second"
            yield TraitKind.LATER_ROUNDS_DIFFER, f"between call and result stands {rounds}"


def _how(said: str) -> str:
    quoted = json.dumps(_HOSTILE, ensure_ascii=False)
    if said in (quoted, quoted[1:-1]):
        return "it is quoted as JSON"
    return "it is trimmed" if said == _HOSTILE.strip() else "it is changed"


def parallel_results(probe: Probe) -> Found:
    """Results of two calls: one turn or two, in which order, under which names."""
    calls = calling(call(), call(OTHER_TOOL, number=1))
    both = probe.show(user, calls, result(), result(SECOND_RESULT, 1, OTHER_TOOL))
    if both.refused or SECOND_RESULT not in both or RESULT not in both:
        return
    between = both.between(RESULT, SECOND_RESULT)
    if not any(token in between for token in _turn_tokens(probe)):
        yield TraitKind.TOOL_MERGED, f"between two results stands only {quote(between)}"
    turned = probe.show(user, calls, result(SECOND_RESULT, 1, OTHER_TOOL), result())
    if RESULT in turned.before(SECOND_RESULT):
        yield TraitKind.TOOLS_REORDERED, f"results given second, first come out as {turned.around(SECOND_RESULT)}"
    if TOOL in between and OTHER_TOOL not in between:
        yield TraitKind.TOOL_NAME_WRONG, f"what {OTHER_TOOL} said is shown under {TOOL}: {quote(between)}"


def names_and_ids(probe: Probe) -> Found:
    """What tells which call a result answers."""
    shown = _result_head(probe, probe.show(user, calling(), result(name="name_of_message")))
    unnamed = _result_head(probe, probe.show(user, calling(), result(name=None)))
    if shown is None:
        return
    if "name_of_message" in shown:
        yield TraitKind.TOOL_NAME_FROM_MESSAGE, f"the message's name is shown: {quote(shown)}"
    elif TOOL in (unnamed or ""):
        yield TraitKind.TOOL_NAME_FROM_CALL, f"the call's name is shown whatever the message's: {quote(shown)}"
    whole = probe.show(user, calling(), result())
    if IDS[0] in whole.after(RESULT) or IDS[0] in shown:
        yield TraitKind.TOOL_ID_SHOWN, f"the id is shown: {whole.around(IDS[0])}"
    elif "name_of_message" not in shown and TOOL not in (unnamed or ""):
        yield TraitKind.TOOL_BY_POSITION, f"before a result stands only {quote(shown[-45:])}"


def _result_head(probe: Probe, shown: Rendering) -> str | None:
    """The text between the call, or the question where calls are not shown, and the result."""
    if shown.refused or RESULT not in shown:
        return None
    return shown.between(ARGUMENT if ARGUMENT in shown.before(RESULT) else QUESTION, RESULT)


def calls(probe: Probe) -> Found:
    """How calls in earlier messages are written."""
    spelt = probe.show(user, calling(), prompt=False)
    plain = probe.raw(user, calling(), prompt=False)
    empty = probe.raw(user, calling(call(arguments=json.dumps({"z": ARGUMENT}))), prompt=False)
    if TOOL not in spelt:
        reason = f"raises {spelt.refusal!r}" if spelt.refused else f"gives {quote(spelt.after(QUESTION))}"
        yield TraitKind.CALLS_DROPPED, f"a turn with a call {reason}"
        return
    if ARGUMENT not in spelt:
        yield TraitKind.ARGUMENTS_DROPPED, f"a call is shown as {quote(spelt.after(QUESTION))}"
    elif SECOND_ARGUMENT in spelt.before(ARGUMENT):
        yield TraitKind.ARGUMENTS_REORDERED, f'{{"z": …, "a": …}} becomes {spelt.around(ARGUMENT)}'
    if probe.template.dialect.null_content and TOOL not in empty:
        yield TraitKind.CALLS_NEED_NULL_CONTENT, f'beside content "" a call becomes {quote(empty.after(QUESTION))}'
    if plain.refused and not probe.raw(user, answer, prompt=False).refused:
        yield TraitKind.OBJECT_ARGUMENTS_REFUSED, f"arguments as an object raise {plain.refusal!r}"
    yield from _string_arguments(probe)
    words = probe.show(user, calling(content=_WORDS), prompt=False)
    if _WORDS not in words:
        reason = f"raise {words.refusal!r}" if words.refused else f"are gone: {quote(words.after(QUESTION))}"
        yield TraitKind.WORDS_DROPPED_BESIDE_CALLS, f"words beside a call {reason}"


def _string_arguments(probe: Probe) -> Found:
    content = None if probe.template.dialect.null_content else ""
    text = probe.raw(user, calling(call(arguments=json.dumps({"z": ARGUMENT})), content=content), prompt=False)
    if text.refused:
        yield TraitKind.STRING_ARGUMENTS_REFUSED, f"arguments as JSON text raise {text.refusal!r}"
    elif f'\\"{ARGUMENT}\\"' in text:
        yield TraitKind.STRING_ARGUMENTS_ESCAPED, f"arguments as JSON text become {text.around(ARGUMENT, before=20)}"
    elif ARGUMENT not in text and TOOL in text:
        yield TraitKind.ARGUMENTS_DROPPED, f"arguments as JSON text are gone: {text.around(TOOL)}"


def two_calls(probe: Probe) -> Found:
    """Two calls in a turn."""
    if TOOL not in probe.show(user, calling(), prompt=False):
        return
    both = probe.show(user, calling(call(), call(OTHER_TOOL, number=1)), prompt=False)
    if both.refused:
        yield TraitKind.TWO_CALLS_REFUSED, f"two calls in a turn raise {both.refusal!r}"
    elif OTHER_TOOL not in both:
        yield TraitKind.SECOND_CALL_DROPPED, f"of two calls only the first is shown: {quote(both.after(QUESTION))}"


def _turn_tokens(probe: Probe) -> set[str]:
    """The control tokens between an answer and what a user says next."""
    between = probe.show(user, answer, more).between(ANSWER, MORE)
    return {token for token in probe.template.encoder.controls if token in between}
