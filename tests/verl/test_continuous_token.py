"""Our ids beside verl's: `verl/utils/tokenizer/continuous_token.py`, its Continuous Token builders.

Both are given the same random conversations and the same sampled ids. Prompts and every delta are the same id for id,
but for these differences, each of which is computed here from our ids and has to come out exactly:

* END: a turn that did not end with the template's own end token (cut by length, or ended by another stop id). We add
  that token, mask 0; verl's builders append the next turn to it as it stands.
* SEPARATOR: what the template puts between that token and the next turn, a line break. verl's Qwen builder adds it
  where the turn ended with `<|im_end|>`; its default builder never does, nor does Gemma-4's before a user's turn. So
  with verl every ChatML model but Qwen (SmolLM2, LFM2, Nemotron), and EXAONE, goes on without the line break it was
  trained with.
* CONTROL: text of tools and users that holds the text of a control token. verl's becomes that token (a tool that prints
  `<|im_end|>` ends its turn), ours never does.
* STOP: GLM's turns end with the token that opens the next turn. verl takes a sampled one off and writes it again as
  context, mask 0; we keep it, mask 1, as it was sampled. The ids are the same where it was the right one; a wrong one
  stays in ours.
* NAME: gpt-oss shows results of parallel calls under the first call's name, and so do we; verl's builder writes the
  names itself, each its own.
* REFUSED: verl renders an appended user message behind another user's, and two results behind two calls. Templates that
  insist on alternating roles, on one call a turn, or that write another end behind the last turn, refuse; ours do not.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.schemas import Message, ToolSchema

from families import FAMILIES
from make_golden import DAY, template

CONVERSATIONS = 100


class Difference(StrEnum):
    """Why ids differ; the module's docstring says more."""

    END = "end"
    SEPARATOR = "separator"
    CONTROL = "control"
    STOP = "stop"
    NAME = "name"
    REFUSED = "refused"


END, SEPARATOR, CONTROL = Difference.END, Difference.SEPARATOR, Difference.CONTROL
STOP, NAME, REFUSED = Difference.STOP, Difference.NAME, Difference.REFUSED

BUILDERS = {
    "qwen2_5": "qwen25",
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_5_think": "qwen35",
    "qwen3_5_nothink": "qwen35",
    "qwen3_6": "qwen35",
    "glm4moe": "glm47",
    "gemma4": "gemma4",
    "gemma4_v5": "gemma4",
    "gptoss": "gptoss",
    "deepseekv3": "deepseek",
    "llama3_1": "default",
    "llama3_2": "default",
    "llama4": "default",
    "nemotron_3_nano": "default",
    "lfm2_v2": "default",
    "smollm2": "default",
    "exaone4": "default",
    "gemma3": "default",
    "phi3": "default",
    "mistral_v3_tekken": "default",
}
EXPECTED: dict[str, set[Difference]] = {
    "glm4moe": {CONTROL, STOP},
    "gptoss": {END, CONTROL, NAME},
    "deepseekv3": {END, CONTROL},
    "llama3_1": {END, CONTROL, REFUSED},
    "llama3_2": {END, CONTROL, REFUSED},
    "llama4": {END, CONTROL},
    "gemma3": {CONTROL, REFUSED},
    "phi3": {CONTROL, REFUSED},
    "mistral_v3_tekken": {END, CONTROL, REFUSED},
}
"""What shows in a hundred conversations; END, SEPARATOR and CONTROL for the others."""

_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}, "required": ["x"]}
_TOOLS = [
    ToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "description": "d", "parameters": _PARAMETERS}}
    )
    for name in ("search", "calculator")
]
_WORDS = (
    "42",
    "\n",
    "  two  spaces ",
    'a "quoted" word',
    "é 東京 👩🏽‍🚀",
    "<b>\\n</b>",
    '{"json": [1, null]}',
    "end.",
    "'",
    "\t",
)


@dataclass(frozen=True, slots=True)
class Round:
    """An assistant turn and what follows it."""

    assistant: Message
    sampled: list[int]
    appended: list[Message]


class Speaker:
    """Invents what a conversation says, from a seed."""

    def __init__(self, chat: HFChatTemplate, seed: int) -> None:
        self.chat, self.random = chat, random.Random(seed)
        self.controls = [chat.tokenizer.decode([token]) for token in sorted(chat.control_ids)][:400]

    def text(self) -> str:
        """Words, now and then with the text of a control token among them."""
        words = self.random.choices(_WORDS, k=self.random.randint(1, 6))
        if self.random.random() < 0.2:
            words.insert(self.random.randrange(len(words) + 1), self.random.choice(self.controls))
        return "said" + "".join(words)

    def opening(self) -> list[Message]:
        """What a row asks."""
        system = [Message(role="system", content="Be brief.")] if self.random.random() < 0.5 else []
        return [*system, Message(role="user", content=self.text())]

    def round(self) -> Round:
        """Calls and their results, or an answer and what a user says next; the turn ends well, or otherwise."""
        calls = self.random.choice([1, 1, 2]) if self.chat.refusal("tool") is None and self.random.random() < 0.6 else 0
        names = self.random.choices([tool.name for tool in _TOOLS], k=calls)
        ids = [f"call{self.random.randrange(10**5):05}" for _ in names]
        appended = [
            Message(role="tool", content=self.text(), name=name, tool_call_id=i)
            for name, i in zip(names, ids, strict=True)
        ] or [Message(role="user", content=self.text())]
        functions = [{"name": name, "arguments": {"x": "1"}} for name in names]
        calling = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]
        said = {
            "role": "assistant",
            "content": "" if calls else "An answer",
            **({"tool_calls": calling} if calls else {}),
        }
        sampled = [*self.chat.encode_text("whatever was sampled"), *self._ending(appended)]
        return Round(Message.model_validate(said), sampled, appended)

    def _ending(self, appended: list[Message]) -> list[int]:
        own = own_end(self.chat, appended)
        return self.random.choice([[own], [own], [], [self.random.choice(self.chat.stop_token_ids)]])


@pytest.mark.parametrize("family", BUILDERS)
def test_ids_are_verls_but_for_what_is_explained(family: str, caplog: pytest.LogCaptureFixture) -> None:
    if missing := FAMILIES[family].missing():
        pytest.skip(missing)
    caplog.set_level("ERROR")
    chat = template(family)
    builder = create_continuous_token_builder(
        chat.tokenizer, model_family=BUILDERS[family], chat_template_kwargs={"strftime_now": DAY.strftime}
    )
    seen: Counter[Difference] = Counter()
    for seed in range(CONVERSATIONS):
        seen += converse(chat, builder, BUILDERS[family], Speaker(chat, seed))
    assert set(seen) == EXPECTED.get(family, {END, SEPARATOR, CONTROL}), seen


def converse(chat: HFChatTemplate, builder: Any, kind: str, speaker: Speaker) -> Counter[Difference]:
    """One conversation through both; the differences it showed."""
    shown = [tool.for_template() for tool in _TOOLS]
    messages = speaker.opening()
    spelt = [chat.dialect.spell(message) for message in messages]
    theirs = builder.build_initial_tokens(spelt, tools=shown)
    ours = chat.encode_prompt(messages, _TOOLS)
    seen: Counter[Difference] = Counter()
    if any(chat.encoder.holds_control(message.text) for message in messages):
        seen[CONTROL] += 1
        assert theirs == chat.tokenizer.encode(chat.render(spelt, shown), add_special_tokens=False) != ours
    else:
        assert theirs == ours
    for _ in range(speaker.random.randint(1, 4)):
        turn = speaker.round()
        theirs = builder.merge_assistant_tokens(theirs, turn.sampled).token_ids
        spelt.append(chat.dialect.spell(turn.assistant))
        appended = [chat.dialect.spell(message) for message in turn.appended]
        differences, expected = predict(chat, kind, turn)
        try:
            merged = builder.merge_context_tokens(spelt, spelt + appended, theirs, tools=shown)
        except Exception:  # noqa: BLE001  # whatever a template raises
            seen[REFUSED] += 1
            break
        removed = merged.removed_prefix_token_count
        assert removed == (1 if STOP in differences else 0)
        assert merged.token_ids[len(theirs) - removed :] == expected
        assert (expected == delta(chat, turn) and not removed) == (not differences)
        seen.update(differences)
        theirs, spelt = merged.token_ids, spelt + appended
    return seen


def delta(chat: HFChatTemplate, turn: Round) -> list[int]:
    """Our ids after a turn."""
    return [token for piece in chat.encode_delta(turn.appended, last_id=turn.sampled[-1]) for token in piece.ids]


def own_end(chat: HFChatTemplate, appended: list[Message]) -> int:
    """The end of turn a template writes before these messages."""
    return chat.encode_delta(appended, last_id=None)[0].ids[0]


def predict(chat: HFChatTemplate, kind: str, turn: Round) -> tuple[set[Difference], list[int]]:
    """Which differences there are to what verl's builder appends, and what that is, from what we append."""
    pieces = chat.encode_delta(turn.appended, last_id=None)
    whole = [token for piece in pieces for token in piece.ids]
    place = next((i for i, token in enumerate(pieces[0].ids) if i and token in chat.control_ids), 1)
    end, separator, last = whole[:1], whole[1:place], turn.sampled[-1]
    rest, differences = _as_verl_says_it(chat, kind, turn, whole[place:])
    after_tool = turn.appended[0].role == "tool"
    if kind == "glm47":
        openings = chat.tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
        return differences | ({STOP} if last in openings else set()), [*end, *separator, *rest]
    if kind == "gemma4" and after_tool:
        return differences, [*([] if end == [last] else end), *separator, *rest]
    if end != [last]:
        differences |= {END}
    kept = separator if kind.startswith("qwen") and end == [last] else []
    if kept != separator:
        differences |= {SEPARATOR}
    return differences, [*kept, *rest]


def _as_verl_says_it(
    chat: HFChatTemplate, kind: str, turn: Round, rest: list[int]
) -> tuple[list[int], set[Difference]]:
    """Ids of the same words with control tokens looked for in all of them, and with verl's names of tools."""
    differences: set[Difference] = set()
    text = chat.tokenizer.decode(rest, clean_up_tokenization_spaces=False)
    if kind == "gptoss" and len({message.name for message in turn.appended}) > 1:
        heads = [f"<|start|>functions.{message.name} to=assistant" for message in turn.appended]
        first, _, second = text.rpartition(heads[0])
        text = first + heads[1] + second
        differences |= {NAME}
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    if any(map(chat.encoder.holds_control, (message.text for message in turn.appended))):
        plain = [token for token in rest if token in chat.control_ids]
        if [token for token in ids if token in chat.control_ids] != plain:
            differences |= {CONTROL}
    return ids, differences
