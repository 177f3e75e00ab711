"""Rows and files: verl's shape, the plain one, and every way a row can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_multiturn.dataset import read_rows, spec_from_row
from sglang_multiturn.errors import DataError
from sglang_multiturn.request import RequestSpec, ToolKwargs

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Solve."}, {"role": "user", "content": "2+2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {
        "index": 3,
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}, "release_kwargs": {"x": 1}}},
    },
}


def make(row: dict[str, Any]) -> RequestSpec:
    return spec_from_row(row, place="rows.jsonl:1", request_id="r", uid="u")


def test_a_row_of_verls_shape() -> None:
    spec = make(ROW)
    assert [(m.role, m.content) for m in spec.messages] == [("system", "Solve."), ("user", "2+2?")]
    assert (spec.data_source, spec.ground_truth, spec.extra_info["index"]) == ("openai/gsm8k", "4", 3)
    assert spec.tools_kwargs == {"calc": ToolKwargs(create_kwargs={"ground_truth": "4"}, release_kwargs={"x": 1})}
    assert spec.tool_names is None


def test_a_plain_row_and_a_bare_string() -> None:
    assert make({"messages": [{"role": "user", "content": "hi"}]}).messages[0].content == "hi"
    assert make({"prompt": "hi"}).messages[0].role == "user"


def test_unknown_keys_of_a_message_are_kept() -> None:
    spec = make({"messages": [{"role": "user", "content": "hi", "mood": "good"}]})
    assert spec.messages[0].for_template() == {"role": "user", "content": "hi", "mood": "good"}


def test_a_row_can_choose_its_tools() -> None:
    assert make({**ROW, "extra_info": {"tool_selection": ["calc"]}}).tool_names == ("calc",)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "hi"}, "no prompt; a row needs 'prompt' or 'messages', it has ['text']"),
        ({"prompt": []}, "'prompt' holds no messages"),
        ({"messages": [{"role": "usr", "content": "hi"}]}, "'messages': role: Input should be"),
        ({"messages": ["hi"]}, "'messages': "),
        ({**ROW, "extra_info": [1]}, "'extra_info' must be a mapping, got list"),
        (
            {**ROW, "extra_info": {"tools_kwargs": {"calc": {"create_kwarg": {}}}}},
            "tools_kwargs.calc: unknown key 'create_kwarg'; did you mean 'create_kwargs'?",
        ),
        ({**ROW, "tools_kwargs": {"calc": {"create_kwargs": 3}}}, "must be a mapping, got int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "holds an image, video or audio"),
    ],
)
def test_a_wrong_row_is_told_with_its_place(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        make(row)
    assert str(caught.value).startswith("rows.jsonl:1: ")
    assert said in str(caught.value)


def test_jsonl_and_parquet_give_the_same_requests(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [ROW, {**ROW, "extra_info": {"index": 4, "tools_kwargs": {"other": {"create_kwargs": {"a": 1}}}}}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_jsonl, from_parquet = (
        [make(row) for _, row in read_rows(tmp_path / name)] for name in ("rows.jsonl", "rows.parquet")
    )
    assert [s.tools_kwargs.keys() for s in from_parquet] == [s.tools_kwargs.keys() for s in from_jsonl]
    assert [s.messages for s in from_parquet] == [s.messages for s in from_jsonl]
    assert from_parquet[0].tools_kwargs["calc"].create_kwargs == {"ground_truth": "4"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "does not exist"),
        ("rows.csv", "a,b", "'.csv' is not supported; use .json, .jsonl, .parquet"),
        ("rows.jsonl", "", "holds no rows"),
        ("rows.jsonl", "\n\n", "holds no rows"),
        ("rows.jsonl", '{"a": 1}\n{broken\n', "rows.jsonl:2: not valid JSON"),
        ("rows.jsonl", "[1]\n", "rows.jsonl:1: expected a JSON object, got list"),
        ("rows.parquet", "not parquet", "is not parquet"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert said in str(caught.value)
