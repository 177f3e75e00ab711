"""How grave each kind is, and what to do about it."""

from __future__ import annotations

from sglang_multiturn.chat.traits.kinds import Severity, TraitKind

_OK, _NOTE, _PROBLEM = Severity.OK, Severity.NOTE, Severity.PROBLEM
_SPLIT = (
    "with `history: keep` the model goes on seeing what it wrote, "
    "with `history: split` the row ends here and the next one is rendered anew"
)

ADVICE: dict[TraitKind, tuple[Severity, str]] = {
    TraitKind.DEFAULT_SYSTEM: (
        _NOTE,
        "write a system message into every row, or serve the model with none either, so that both see the same",
    ),
    TraitKind.SYSTEM_ADDED: (_OK, "nothing to do; look at the prompt once, and serve the model with the same template"),
    TraitKind.SYSTEM_REFUSED: (
        _NOTE,
        "leave system messages out of your rows, or put their text before the first user message",
    ),
    TraitKind.SYSTEM_DROPPED: (_NOTE, "put the text of system messages into the first user message: here it is lost"),
    TraitKind.SYSTEM_IN_USER_TURN: (_OK, "nothing to do; the model was trained so"),
    TraitKind.SYSTEM_MOVES: (_NOTE, f"put its text into the first user message, or choose: {_SPLIT}"),
    TraitKind.LATER_SYSTEM: (_OK, "keep to one system message, at the start"),
    TraitKind.DEVELOPER_REFUSED: (_OK, "write the role `system` in your rows"),
    TraitKind.DEVELOPER_DROPPED: (_NOTE, "write the role `system` in your rows: a developer message is lost"),
    TraitKind.DATE_IN_PROMPT: (
        _NOTE,
        "fix it, so that a run that crosses midnight and a rerun see one prompt: `date_string` in "
        "`chat_template_kwargs` where the template reads it, else a system message of your own or an edited template",
    ),
    TraitKind.THINKING_STRIPPED_BY_USER: (_NOTE, f"matters when users speak after the model thought: {_SPLIT}"),
    TraitKind.THINKING_STRIPPED_BY_TOOL: (_NOTE, f"matters at every tool call: {_SPLIT}"),
    TraitKind.GENERATION_OPENS_THINKING: (
        _OK,
        "nothing to do: what is sampled is read as thoughts up to the closing marker; leave room for it in the budget",
    ),
    TraitKind.GENERATION_SKIPS_THINKING: (
        _OK,
        "nothing to do: thinking is off; `enable_thinking` turns it on where there is a switch",
    ),
    TraitKind.EMPTY_THINKING_ADDED: (
        _NOTE,
        f"answers the model gave without thoughts are rendered with a block it did not write: {_SPLIT}",
    ),
    TraitKind.INLINE_THINKING_DOUBLED: (
        _OK,
        "give thoughts of earlier turns as `reasoning_content`, not inside the content",
    ),
    TraitKind.TOOLS_NOT_SHOWN: (
        _PROBLEM,
        "take a template that shows tools, or describe them, and how to call them, in the system message",
    ),
    TraitKind.TOOLS_IN_USER_TURN: (
        _OK,
        "nothing to do; `tools_in_user_message: false` in `chat_template_kwargs` moves them where it is read",
    ),
    TraitKind.TOOLS_MOVE: (_NOTE, f"matters when users speak again: {_SPLIT}"),
    TraitKind.TOOL_REFUSED: (_PROBLEM, "take a template with a tool role: results cannot be said with this one"),
    TraitKind.TOOL_DROPPED: (_PROBLEM, "take a template with a tool role: with this one the model never sees a result"),
    TraitKind.TOOL_NEEDS_CALL: (
        _OK,
        "nothing to do: results always follow a call here; check rows that begin with a tool message",
    ),
    TraitKind.TOOL_MERGED: (_OK, "nothing to do: results are appended together, in the order of the calls"),
    TraitKind.TOOL_TEXT_CHANGED: (
        _OK,
        "nothing to do: results are appended as the template writes them; budgets count the changed text",
    ),
    TraitKind.TOOL_TEXT_UNQUOTED: (
        _NOTE,
        "let tools answer JSON (a number, or a quoted text): only then is the object one",
    ),
    TraitKind.TOOL_NAME_FROM_CALL: (_OK, "nothing to do: results are appended under the name that was called"),
    TraitKind.TOOL_NAME_FROM_MESSAGE: (_OK, "nothing to do here; tool messages in your rows need a `name`"),
    TraitKind.TOOL_NAME_WRONG: (_NOTE, "allow one call a turn (`max_parallel_calls: 1`), as the template assumes"),
    TraitKind.TOOL_ID_SHOWN: (
        _OK,
        "nothing to do here; tool messages in your rows need the `tool_call_id` of their call",
    ),
    TraitKind.TOOL_BY_POSITION: (_OK, "nothing to do: results come in the order of the calls"),
    TraitKind.TOOLS_REORDERED: (_NOTE, "give results in the order of the calls"),
    TraitKind.LATER_ROUNDS_DIFFER: (
        _NOTE,
        "every round is appended as the first is written; a rendering of the whole conversation differs from the "
        "second round on, and the drift check counts that",
    ),
    TraitKind.CALLS_DROPPED: (
        _NOTE,
        "what is sampled stays in the row all the same; rows with calls in their prompt, and `history: split`, "
        "lose them",
    ),
    TraitKind.CALLS_NEED_NULL_CONTENT: (
        _OK,
        "nothing to do: messages are given to this template with null; do so where you serve it",
    ),
    TraitKind.ARGUMENTS_DROPPED: (_NOTE, "give arguments as an object where you render conversations yourself"),
    TraitKind.ARGUMENTS_REORDERED: (
        _OK,
        "nothing to do: sampled calls keep their order; a rendering of the whole conversation differs",
    ),
    TraitKind.STRING_ARGUMENTS_ESCAPED: (
        _OK,
        "nothing to do: arguments are given to this template as an object; do so where you serve it",
    ),
    TraitKind.STRING_ARGUMENTS_REFUSED: (
        _OK,
        "nothing to do: arguments are given to this template as an object; do so where you serve it",
    ),
    TraitKind.OBJECT_ARGUMENTS_REFUSED: (
        _OK,
        "nothing to do: arguments are given to this template as text; do so where you serve it",
    ),
    TraitKind.WORDS_DROPPED_BESIDE_CALLS: (
        _NOTE,
        "what is sampled stays in the row; in rows with calls in their prompt do not mix words and calls",
    ),
    TraitKind.TWO_CALLS_REFUSED: (_NOTE, "set `max_parallel_calls: 1`; the model was trained on one call a turn"),
    TraitKind.SECOND_CALL_DROPPED: (_NOTE, "set `max_parallel_calls: 1`; the model was trained on one call a turn"),
    TraitKind.NO_END_AFTER_ANSWER: (
        _NOTE,
        "a turn ends with the token that opens the next one; sampled, it is kept and trained, and not written twice",
    ),
    TraitKind.END_DIFFERS: (_OK, "nothing to do: all of them end a turn; a sampled one is kept as it is"),
    TraitKind.GENERATION_PROMPT_ALWAYS: (
        _OK,
        "nothing to do here; renderings for supervised training end in an open turn",
    ),
    TraitKind.TURN_GOES_ON_AFTER_TOOL: (_OK, "nothing to do: what is appended ends as the template ends it"),
    TraitKind.CONTENT_TRIMMED: (
        _OK,
        "nothing to do: what is appended is trimmed as the template does; what is sampled is not",
    ),
    TraitKind.WHITE_SPACE_SWALLOWED: (_OK, "nothing to do: what is appended is tokenised in the same way"),
    TraitKind.ROLES_MUST_ALTERNATE: (_OK, "let a user or environment speak once between two answers"),
    TraitKind.NEEDS_USER: (_OK, "every row needs a user message"),
    TraitKind.PARTS_REFUSED: (_NOTE, "give content as text"),
    TraitKind.PARTS_CHANGED: (_NOTE, "give content as text: a list of parts is not shown as it was meant"),
    TraitKind.BOS_MISSING: (
        _NOTE,
        "prompts are made as the template writes them, without it; look whether your model was trained so",
    ),
    TraitKind.BOS_DOUBLED: (_PROBLEM, "take one of them out of the template"),
}
