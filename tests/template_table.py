"""The tables of docs/templates.md, made from what templates say of themselves.

    python tests/template_table.py

writes them between their markers; `test_template_docs.py` compares.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.chat.traits import TraitKind, examine
from sglang_multiturn.chat.traits import kinds as kinds_module
from sglang_multiturn.chat.traits.advice import ADVICE

from chat_templates import chat_template
from families import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "templates.md"
NAMES = ("tiny", *FAMILIES)
ROLES = ("tool", "user")


def tables() -> dict[str, str]:
    """Every table by the name of its markers."""
    return {
        "families": families(),
        "vocabularies": vocabularies(),
        "refused": refused(),
        "surprises": surprises(),
    }


def families() -> str:
    """One row a family: vocabulary, who may speak, ends, history, parser."""
    head = [
        "| family | vocabulary | results / users can be appended | ends of a turn | history kept after a result / a user "
        "| parser |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_family, NAMES)])


def vocabularies() -> str:
    """Where ids come from: one line a source."""
    whose = defaultdict(list)
    for name in FAMILIES:
        whose[FAMILIES[name].vocabulary_note].append(f"`{name}`")
    return "\n".join(f"* {', '.join(names)}: {note}." for note, names in whose.items())


def refused() -> str:
    """Why a role cannot be appended."""
    return "\n".join(
        f"* `{name}`, {'results' if role == 'tool' else 'users'}: {reason}"
        for name in NAMES
        for role in ROLES
        if (reason := _reason(chat_template(name), role)) is not None
    )


def surprises() -> str:
    """One row a kind: how grave, what it is, whose template does it."""
    docs = _meanings()
    whose = defaultdict(list)
    for name in NAMES:
        for kind in _kinds(name):
            whose[kind].append(name)
    head = ["| kind | | the template | seen in |", "|---|---|---|---|"]
    rows = [f"| `{kind}` | {ADVICE[kind][0]} | {docs[kind]} | {', '.join(whose[kind]) or '–'} |" for kind in TraitKind]
    return "\n".join([*head, *rows])


def replaced(page: str) -> str:
    """The page with its tables as they are now."""
    for name, table in tables().items():
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition(f"<!-- /{name} -->")
        page = f"{before}<!-- {name} -->\n{table}\n<!-- /{name} -->{after}"
    return page


def _family(name: str) -> str:
    template = chat_template(name)
    speak = " / ".join("yes" if template.refusal(role) is None else "**no**" for role in ROLES)
    keeps = " / ".join(_keeps(template, role) for role in ROLES)
    ends = ", ".join(f"`{_cell(template.tokenizer.convert_ids_to_tokens(i))}`" for i in template.stop_token_ids)
    parser = f"`{template.tool_call_format}`" if template.tool_call_format else "–"
    vocabulary = "stand-in" if name in FAMILIES and FAMILIES[name].stand_in else "own"
    return f"| `{name}` | {vocabulary} | {speak} | {ends} | {keeps} | {parser} |"


def _keeps(template: HFChatTemplate, role: str) -> str:
    if template.refusal(role) is not None:
        return "–"
    return "yes" if template.keeps_history(role) else "no"


def _reason(template: HFChatTemplate, role: str) -> str | None:
    reason = template.refusal(role)
    return None if reason is None else reason.removeprefix(f"{template.name}: ").replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


@functools.cache
def _kinds(name: str) -> tuple[TraitKind, ...]:
    return tuple(trait.kind for trait in examine(chat_template(name)))


def _meanings() -> dict[TraitKind, str]:
    """The docstring of every kind, as a part of a sentence."""
    return {TraitKind[name]: text for name, text in _docstrings()}


def _docstrings() -> Iterator[tuple[str, str]]:
    tree = ast.parse(Path(kinds_module.__file__).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TraitKind")
    for member, meaning in itertools.pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(meaning, ast.Expr):
            assert isinstance(member.targets[0], ast.Name)
            assert isinstance(meaning.value, ast.Constant)
            yield member.targets[0].id, str(meaning.value.value).rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
