"""What docs/templates.md says of every family is what the templates themselves say."""

from __future__ import annotations

import pytest

from chat_templates import missing
from template_table import NAMES, PAGE, tables


@pytest.mark.parametrize("table", ["families", "vocabularies", "refused", "surprises"])
def test_the_tables_are_those_of_the_templates(table: str) -> None:
    if gone := [name for name in NAMES if missing(name)]:
        pytest.skip(f"not here: {', '.join(gone)}; `make setup` installs them")
    page = PAGE.read_text(encoding="utf-8")
    written = page.partition(f"<!-- {table} -->\n")[2].partition(f"\n<!-- /{table} -->")[0]
    assert written == tables()[table], "run: python tests/template_table.py"


def test_every_kind_and_family_is_named() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page] == []
