"""One planted problem a folder, and the doctor finds it and nothing else.

`expect.yaml` says what is to be found, and may name another model or further options. What a folder does not hold is
taken from `healthy/`: tools.yaml, rows.jsonl, overrides.txt (to which the folder's is added), and the model's files from
the tiny model. `family` takes a real family's tokenizer instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

PLANTED = Path(__file__).parent / "planted"
KINDS = sorted(folder.name for folder in PLANTED.iterdir() if folder.is_dir())


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 24


@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_finds_exactly_what_is_planted(
    kind: str,
    doctor: Callable[..., Any],
    make_model: Callable[..., Path],
    launch: Callable[..., str],
    healthy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / kind
    shutil.copytree(PLANTED / kind, here)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    expected = yaml.safe_load((here / "expect.yaml").read_text().replace("{healthy}", str(healthy)))
    if (family := expected.get("family")) is not None:
        model = family_model(family, tmp_path / "model")
    else:
        model = expected.get("model") or make_model(here / "model", expected.get("remove", ()))
    if (here / "overrides.txt").is_file():
        options = ["--verl", launch((here / "overrides.txt").read_text(), model=model, here=here)]
    else:
        options = ["--model", model, *_files(here, healthy, expected.get("options", []))]
    report = doctor(*options, *expected.get("options", []))
    found = [finding for finding in report.json["findings"] if finding["severity"] != "ok"]
    if family is not None:  # a real template has surprises of its own
        found = [f for f in found if f["severity"] == "problem" or _kind(f) in list(map(_kind, expected["finds"]))]
    assert sorted(map(_kind, found)) == sorted(map(_kind, expected["finds"])), [f["what"] for f in found]
    for wanted in expected["finds"]:
        (finding,) = [finding for finding in found if _kind(finding) == _kind(wanted)]
        assert wanted["says"] in finding["what"]
        assert finding["advice"]
    assert report.exit_code == int(any(f["severity"] == "problem" for f in expected["finds"]))


def family_model(name: str, folder: Path) -> Path:
    from families import FAMILIES, tokenizer

    if (missing := FAMILIES[name].missing()) is not None:
        pytest.skip(missing)
    tokenizer(name).save_pretrained(folder)
    return folder


def _kind(finding: dict[str, str]) -> tuple[str, str]:
    return finding["check"], finding["severity"]


def _files(here: Path, healthy: Path, given: list[str]) -> Iterator[object]:
    for option, name in (("--tools", "tools.yaml"), ("--data", "rows.jsonl")):
        if option not in given:
            yield from (option, (here if (here / name).is_file() else healthy) / name)
