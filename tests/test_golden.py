"""Prompt and delta ids of every family are those of `golden/`, which were looked at when they were made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from families import FAMILIES
from make_golden import FOLDER, cases

ALL = ("tiny", *FAMILIES)


def golden(family: str) -> dict[str, Any]:
    file = FOLDER / f"{family}.json"
    assert file.is_file(), f"make it: python tests/make_golden.py {family}"
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return kept


@pytest.mark.parametrize("family", ALL)
def test_ids_are_those_of_the_golden_file(family: str) -> None:
    if family in FAMILIES and (missing := FAMILIES[family].missing()):
        pytest.skip(missing)
    kept = golden(family)
    made_with = kept.pop("")["with"]
    found = dict(cases(family))
    assert found.keys() == kept.keys()
    for name, case in found.items():
        assert case == kept[name], f"{family}, {name}; the file was made with {made_with}"


def test_no_file_is_left_of_a_family_that_is_gone() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(ALL)


def test_tomorrows_prompt_is_another_one_only_where_the_template_says_the_date() -> None:
    dated = {family for family in ALL if golden(family)["next_day"] != golden(family)["user_only"]}
    assert dated == {"llama3_2", "gptoss", "mistral_v7_tekken"}


def test_what_a_user_says_never_holds_a_control_token() -> None:
    for family in ALL:
        said = golden(family)["control_tokens"]
        assert all(word in said["text"] for word in ("<|im_end|>", "</s>", "<eos>", "<|eot_id|>"))
        assert len(said["ids"]) > len(golden(family)["user_only"]["ids"]) + 5
