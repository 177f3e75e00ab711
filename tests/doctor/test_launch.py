"""A launch of verl's: how it is composed, and what is installed around it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")

from sglang_multiturn.doctor.environment_checks import TESTED, check_plugin, check_trl, check_versions
from sglang_multiturn.doctor.launch import Launch, compose, split_overrides
from sglang_multiturn.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def test_overrides_are_split_as_a_shell_does(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("# a comment\na.b=1  # another\n+c='[1, 2]'\n\n~d\n")
    assert split_overrides(["x=1 y='two words'", f"@{tmp_path / 'all.txt'}"]) == (
        "x=1", "y=two words", "a.b=1", "+c=[1, 2]", "~d",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="'--config-name' is no override"):
        split_overrides(["--config-name ppo"])
    with pytest.raises(ConfigError, match="does not exist"):
        split_overrides(["@none.txt"])


def test_a_launch_is_composed_as_verl_does_with_its_references() -> None:
    launch = compose(["data.max_prompt_length=77", "actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml"])
    assert launch.get("actor_rollout_ref.rollout.prompt_length") == 77
    assert launch.get("data.tool_config_path") == "t.yaml"
    assert launch.get("actor_rollout_ref.rollout.name") is None  # verl's `???`
    assert launch.get("no.such.key", 5) == 5
    assert launch.says("data.max_prompt_length")
    assert not launch.says("data.max_response_length")


@pytest.fixture(scope="module")
def fsdp() -> Launch:
    return compose(["actor_rollout_ref.actor.strategy=fsdp2"])


@pytest.mark.parametrize(("version", "found"), [(None, 0), ("0.24.0", 0), ("1.0.0", 1), ("1.16.0", 1)])
def test_a_trl_that_breaks_verls_workers_is_found(version: str | None, found: int, fsdp: Launch) -> None:
    findings = list(check_trl(version, fsdp))
    assert len(findings) == found
    assert all("pip uninstall trl" in finding.advice for finding in findings)


@pytest.mark.parametrize(
    ("installed", "policy", "said"),
    [
        ({"sglang_multiturn": "m"}, "", None),
        ({"sglang_multiturn": "m"}, "other, sglang_multiturn", None),
        ({"sglang_multiturn": "m"}, "none", "VERL_USE_EXTERNAL_PLUGINS=none keeps this package out"),
        ({"other": "m"}, "auto", "no verl.plugins entry point of sglang_multiturn is installed"),
    ],
)
def test_whether_verl_imports_this_package(installed: dict[str, str], policy: str, said: str | None) -> None:
    findings = [finding.what for finding in check_plugin(installed, policy)]
    assert len(findings) == (said is not None)
    assert all(said is not None and said in what for what in findings)


@pytest.mark.parametrize(
    ("changed", "severity"), [({}, "ok"), ({"torch": "2.12.0"}, "note"), ({"sglang": ""}, "note"), ({"verl": "0.10.0"}, "problem")]
)  # fmt: skip
def test_versions_are_compared_with_the_tested_ones(changed: dict[str, str], severity: str) -> None:
    (finding,) = check_versions({**TESTED, **changed})
    assert finding.severity.value == severity


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    lines = (REPOSITORY / "constraints-cpu.txt").read_text().splitlines()
    pinned = dict(line.partition("+")[0].split("==") for line in lines if "==" in line)
    assert {name: pinned[name] for name in TESTED} == dict(TESTED)
