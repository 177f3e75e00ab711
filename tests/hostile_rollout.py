"""Plays conversations full of hostile words under audit hooks; run by `test_untrusted_text`, in a process of its own.

An audit hook cannot be taken off again. It raises where text that holds the mark is executed, or given to a process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from sglang_multiturn import Message, RolloutConfig, ScriptedEngine, Trajectory, run_one
from sglang_multiturn.chat.parsers import make_parser
from sglang_multiturn.summary import RunSummary
from sglang_multiturn.tools.builtin.calculator import CalculatorTool

from support import TEMPLATE, RecordingTool, context, spec
from written_calls import FORMATS

MARK = "pwned"
WORDS = (
    f"__import__('os').system('touch {MARK}')",
    f"$(touch {MARK})",
    f"`touch {MARK}`; touch {MARK} | tee {MARK} && touch {MARK}",
    f"{{0.__class__.__mro__}} {{{MARK}}} {{request_id!r:>99999999}} %s %n %(x)s %99999999d",
    f"{{{{ cycler.__init__.__globals__.os.popen('touch {MARK}').read() }}}} {{% for x in range(9) %}}{MARK}{{% endfor %}}",
    f"[bold red]{MARK}[/] [link=file:///etc/passwd]x[/link] \x1b[2J\x1b]0;{MARK}\x07",
    f"!!python/object/apply:os.system ['touch {MARK}']",
    f"<script>alert('{MARK}')</script><img src=x onerror=alert(1)>",
    f"cos\nsystem\n(S'touch {MARK}'\ntR.",
    f"../../../{MARK}\x00.jsonl",
)
RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen", "import")


def watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "exec" and isinstance(args[0], types.CodeType):
        code = args[0]
        if MARK in repr((code.co_consts, code.co_names)) and not code.co_filename.endswith(".py"):
            raise SystemError(f"hostile text is executed: {code.co_filename}")
    if event in RUNS and MARK in repr(args):
        raise SystemError(f"hostile text reached {event}: {args!r:.300}")
    if event == "open" and MARK in str(args[0]):
        raise SystemError(f"hostile text reached a path: {args[0]!r:.300}")


class Echo(RecordingTool):
    """Says hostile things back, whatever it is asked."""

    def __init__(self, word: str) -> None:
        super().__init__("echo")
        self._word = word

    async def answer(self, parameters: dict[str, Any]) -> Any:
        return self._word, 0.0, {self._word: self._word}


async def converse(parser_name: str, turns: list[str], word: str) -> Trajectory:
    tools = [Echo(word), CalculatorTool({}, CalculatorTool.default_schema())]
    async with ScriptedEngine.playing(TEMPLATE, {"r": turns}) as engine:
        shared = context(engine, tools, RolloutConfig(max_errors_in_a_row=99))
        parser = make_parser(parser_name, TEMPLATE)
        shared = type(shared)(**{name: getattr(shared, name) for name in shared.__slots__} | {"parser": parser})
        asked = spec(messages=(Message(role="system", content=word), Message(role="user", content=word)))
        return await run_one(asked, shared)


def turns_of(name: str, word: str) -> list[str]:
    write = FORMATS[name].write
    return [
        write(("echo", {"text": word})),
        write(("echo", {word: word})),
        write((word, {"expression": word})),
        write(("calculator", {"expression": word})),
        write(("echo", {"text": word})).replace("echo", word, 1),
        f"{word} {json.dumps(word)}",
    ]


async def main() -> int:
    sys.addaudithook(watch)
    summary = RunSummary()
    for name in FORMATS:
        for word in WORDS:
            trajectory = await converse(name, turns_of(name, word), word)
            trajectory.check(end_ids=TEMPLATE.end_ids)
            assert trajectory.error is None, (name, word, trajectory.error)
            assert Trajectory.from_json(trajectory.to_json()) == trajectory
            summary.add(trajectory)
    json.dumps(summary.to_dict())
    return summary.rollouts


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(main())} conversations, nothing was run\n")
