"""What this package relies on in verl, checked in the installed version and, by kept facts, in older ones.

Nothing of any verl is imported here. `make compat-verl` keeps the facts anew, and must after a new name of verl is used.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from verl_versions.facts import KEPT, Facts, lacking
from verl_versions.promises import CALLED, LINES
from verl_versions.reliance import Reliance, reliance
from verl_versions.sources import VerlSource

REPOSITORY = Path(__file__).parents[2]
OURS = VerlSource(REPOSITORY)
TESTED = "0.9.1"
VERSIONS = sorted(file.stem for file in KEPT.glob("*.json"))
STALE = "this package relies on other names of verl than when the facts were kept: run `make compat-verl`"


@cache
def relied_on() -> Reliance:
    return reliance(REPOSITORY / "sglang_multiturn")


def installed() -> VerlSource:
    source = VerlSource.installed()
    if source is None:
        pytest.skip("verl is not installed")
    return source


def test_the_installed_verl_has_everything_this_package_relies_on() -> None:
    facts = Facts.of(installed(), relied_on())
    assert lacking(facts, relied_on(), facts, OURS) == {}


def test_the_facts_of_the_tested_version_are_those_of_the_installed_one() -> None:
    facts = Facts.of(installed(), relied_on())
    if facts.version != TESTED:
        pytest.skip(f"verl {facts.version} is installed")
    assert facts == Facts.kept(TESTED), STALE


def test_one_older_version_of_each_line_is_kept() -> None:
    assert VERSIONS == ["0.8.0", "0.9.0", TESTED]


@pytest.mark.parametrize("version", VERSIONS)
def test_kept_facts_cover_all_that_is_relied_on(version: str) -> None:
    facts = Facts.kept(version)
    assert (relied_on().names.keys() | relied_on().overrides.keys()) - facts.names.keys() == set(), STALE
    assert relied_on().config.keys() == facts.config.keys(), STALE
    assert {line.name for line in LINES} == facts.lines.keys(), STALE
    assert {call.name for call in CALLED} == facts.calls.keys(), STALE


@pytest.mark.parametrize("version", VERSIONS)
def test_the_docs_name_exactly_what_a_version_lacks(version: str) -> None:
    problems = lacking(Facts.kept(version), relied_on(), Facts.kept(TESTED), OURS)
    assert documented(version) == set(problems)


def test_the_list_is_long_enough_to_mean_something() -> None:
    names = relied_on().names
    assert "verl.experimental.agent_loop.agent_loop:_agent_loop_registry" in names  # a patch, by `after_import`
    assert "verl.workers.rollout.replica:RolloutReplica.servers" in names  # inherited
    assert relied_on().keywords["verl.experimental.agent_loop.agent_loop:AgentLoopOutput"] >= {
        "reward_score",
        "metrics",
    }
    assert "verl.plugin.platform:PlatformBase.ray_resource_name" in relied_on().overrides
    assert {"actor_rollout_ref.rollout.n", "reward.custom_reward_function.path"} <= relied_on().config.keys()


def test_the_docs_declare_what_the_package_declares() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = declared["optional-dependencies"].values()
    asked = {wanted.lower() for wanted in [*declared["dependencies"], *chain(*extras)]}
    asked.add(f"python{declared['requires-python']}")
    text = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `([^`]+)` \|", text.partition("\n## ")[0], flags=re.MULTILINE)
    assert [f"{package}{spec}" for package, spec in rows if f"{package}{spec}".lower() not in asked] == []
    assert len(rows) == 7


def documented(version: str) -> set[str]:
    """The first column of the version's table; "nothing" stands for an empty one."""
    text = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
    _, heading, rest = text.partition(f"### verl {version}\n")
    if not heading:
        return set()
    section = rest.partition("\n#")[0]
    return {row.strip("`") for row in re.findall(r"^\| ([^|]+?) \|", section, flags=re.MULTILINE)} - {"what", "---"}


# -- the reading of source itself -------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> VerlSource:
    """A verl of a few files."""
    files = {
        "verl/version/version": "1.2.3\n",
        "verl/__init__.py": "from .base import Base\n",
        "verl/base.py": "class Base:\n    kind: str = 'x'\n    def __init__(self, a, b=1, *, c):\n        self.made = a\n",
        "verl/sub/__init__.py": "from verl.base import Base as Shown\nfrom os import path\n",
        "verl/sub/one.py": (
            "from dataclasses import dataclass\nfrom verl.sub import Shown\n\n"
            "class Child(Shown):\n    async def run(self, *args, x, y=2, **more):\n        call.me(1, y=x, **more)  # not said\n\n"
            "@dataclass\nclass Data:\n    first: int\n    second: int = 2\n\n"
            "try:\n    late = 1\nexcept Exception:\n    pass\n"
        ),
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return VerlSource(tmp_path)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("verl", "module"),
        ("verl:Base", "(a, b=..., *, c)"),
        ("verl.sub:Shown", "(a, b=..., *, c)"),
        ("verl.sub:path", "value"),
        ("verl.sub:one.Child", "(a, b=..., *, c)"),
        ("verl.sub.one:Child.run", "(*args, x, y=..., **more)"),
        ("verl.sub.one:Child.kind", "value"),
        ("verl.sub.one:Child.made", "value"),
        ("verl.sub.one:Child.gone", None),
        ("verl.sub.one:Data", "(*, first, second=...)"),
        ("verl.sub.one:late", "value"),
        ("verl.sub.two:Child", None),
    ],
)
def test_names_are_looked_up_as_python_would(small: VerlSource, name: str, signature: str | None) -> None:
    assert small.signature(name) == signature


def test_words_and_calls_are_read_from_code_alone(small: VerlSource) -> None:
    assert small.version == "1.2.3"
    assert small.says("verl.sub.one:Child.run", "call.me(1, y=x")
    assert small.says("verl.sub.one:Child.run", "not said") is False
    assert small.says("verl.sub.one:Child.gone", "call") is None
    assert small.calls("verl.sub.one:Child.run", "call.me") == ["*", "y", "**"]
    assert small.calls("verl.sub.one:Child.run", "call.you") is None


def test_what_a_version_took_away_or_changed_is_found(small: VerlSource, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "mine.py").write_text(
        "from verl.sub.one import Child, Data, Gone\nfrom verl.nowhere import anything\n\n"
        "class Mine(Child):\n    def run(self, x):\n        self.lost()\n        return Data(first=1, third=3)\n"
    )
    found = reliance(package)
    assert {name: small.signature(name) for name in found.names} == {
        "verl.sub.one:Child": "(a, b=..., *, c)",
        "verl.sub.one:Child.lost": None,
        "verl.sub.one:Data": "(*, first, second=...)",
        "verl.sub.one:Gone": None,
        "verl.nowhere:anything": None,
    }
    facts = Facts(version="1.2.3", names={name: small.signature(name) for name in found.names | found.overrides.keys()})
    facts.names |= {"verl.nowhere": None, "verl.sub.one": "module"}
    facts.lines = {"a line": False}
    facts.calls = dict.fromkeys(call.name for call in CALLED)
    assert {name: why for name, why in lacking(facts, found, facts, OURS).items() if name not in facts.calls} == {
        "verl.sub.one:Child.lost": "is not there",
        "verl.sub.one:Child.run": "is called with y, which ours does not take",
        "verl.sub.one:Data": "does not take third",
        "verl.sub.one:Gone": "is not there",
        "verl.nowhere": "is not there",
        "a line": "is not so",
    }
