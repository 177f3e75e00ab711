"""Nodes of a real Ray cluster: one that is as this machine, and one that the launch's files do not reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("SGLANG_MULTITURN_CPU", "1")
pytest.importorskip("verl")

import ray

import sglang_multiturn
from sglang_multiturn.doctor.cluster_checks import check_cluster, is_up, node_findings
from sglang_multiturn.doctor.environment_checks import installed_versions
from sglang_multiturn.verl_plugin.compat import LOOP_CLASS
from sglang_multiturn.verl_plugin.node_report import NodeReport, digest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"SGLANG_MULTITURN_CPU": "1", "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


def test_a_node_of_this_machine_is_well(cluster: None, tmp_path: Path) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: []\n")
    assert is_up()
    (finding,) = check_cluster([str(tools), str(tmp_path)])
    assert (finding.check, finding.severity.value) == ("cluster-node", "ok"), finding.what
    assert ray.is_initialized()  # the cluster is somebody else's, and stays


def test_a_file_that_is_not_on_the_node_is_found(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has its own working directory: a relative path means another file there."""
    monkeypatch.chdir(tmp_path)
    Path("only_here.yaml").write_text("tools: []\n")
    (finding,) = check_cluster(["only_here.yaml"])
    assert finding.severity.value == "problem"
    assert finding.what == "only_here.yaml cannot be read there"


def test_without_a_cluster_none_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if ray.is_initialized():
        ray.shutdown()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not is_up()
    (finding,) = check_cluster([])
    assert finding.severity.value == "problem"
    assert finding.what.startswith("no Ray cluster was found: Could not find any running Ray instance")
    assert not ray.is_initialized()


def report(**changes: object) -> NodeReport:
    healthy = {
        "versions": installed_versions(),
        "package": sglang_multiturn.__version__,
        "loop": LOOP_CLASS,
        "files": {},
    }
    return NodeReport(**(healthy | changes))  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            report(package="ModuleNotFoundError: No module named 'sglang_multiturn'"),
            "is not there: ModuleNotFoundError",
        ),
        (report(package="0.0.9"), "is not there: 0.0.9"),
        (report(loop="not registered"), "verl does not know the loop 'sglang_multiturn' there: not registered"),
        (report(versions=installed_versions() | {"torch": "2.0.0"}), "other versions than here: torch 2.0.0 (here "),
        (report(files={"a.yaml": "0"}), "a.yaml has another content there"),
        ("GetTimeoutError: no answer", "the node did not answer: GetTimeoutError: no answer"),
    ],
)
def test_what_is_wrong_on_a_node_is_told(wrong: NodeReport | str, said: str, tmp_path: Path) -> None:
    here = {"a.yaml": "1"} if isinstance(wrong, dict) and wrong["files"] else {}
    (finding,) = node_findings("node-1", wrong, here)
    assert (finding.severity.value, finding.where) == ("problem", "node-1")
    assert said in finding.what
    assert finding.advice


def test_a_digest_tells_contents_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    assert digest(str(tmp_path / "a")) != digest(str(tmp_path / "b"))
    assert digest(str(tmp_path)) == "folder"
    assert digest(str(tmp_path / "none")) == ""
