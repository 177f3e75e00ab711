"""Every node of a running Ray cluster: is the package there, will verl find it, can it read what the launch names.

A cluster is never started. One small task runs on each node; it is sent by value, so that it runs where the package is
missing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_multiturn.doctor.environment_checks import TESTED, installed_versions
from sglang_multiturn.doctor.findings import Findings, ok, problem
from sglang_multiturn.verl_plugin import node_report
from sglang_multiturn.verl_plugin.compat import LOOP_CLASS, LOOP_NAME
from sglang_multiturn.verl_plugin.node_report import NodeReport, digest

NODE_TIMEOUT_S = 180.0
"""For importing verl on a node that is busy."""


def is_up() -> bool:
    """Whether this process is, or is told to be, part of a Ray cluster."""
    ray = sys.modules.get("ray")
    return bool(os.environ.get("RAY_ADDRESS")) or (ray is not None and bool(ray.is_initialized()))


def check_cluster(files: Sequence[str]) -> Findings:
    """Ask every node.

    Args:
        files: paths that workers will open, as the launch names them.
    """
    with _connected() as ray:
        if isinstance(ray, str):
            what = f"no Ray cluster was found: {ray}"
            yield problem("cluster-node", what, "Start one (ray start --head), set RAY_ADDRESS, or leave --ray out.")
            return
        here = {path: digest(path) for path in files}
        for name, report in _reports(ray, files):
            yield from node_findings(name, report, here)


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray, connected to the cluster that is there; why not, where there is none. Left as it was found."""
    import ray

    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        yield str(error)
        return
    try:
        yield ray
    finally:
        ray.shutdown()


def _reports(ray: Any, files: Sequence[str]) -> Iterator[tuple[str, NodeReport | str]]:
    """Each live node's name and report, or why it gave none."""
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle.register_pickle_by_value(node_report)  # type: ignore[no-untyped-call]
    # No CPU is asked for: a cluster whose slots are all taken answers too.
    task = ray.remote(num_cpus=0, max_retries=0)(node_report.report_of_node)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[name] = task.options(scheduling_strategy=pinned).remote(list(files), list(TESTED))
    for name, reference in asked.items():
        try:
            yield name, ray.get(reference, timeout=NODE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a node may fail in any way, and the others are asked all the same
            yield name, f"{type(error).__name__}: {error}"


def node_findings(name: str, report: NodeReport | str, here: Mapping[str, str]) -> Findings:
    """What is wrong on a node.

    Args:
        name: of the node.
        report: what it said, or why it said nothing.
        here: digest of each file on this machine.
    """
    if isinstance(report, str):
        yield problem("cluster-node", f"the node did not answer: {report}", "Look at that node's Ray logs.", name)
        return
    import sglang_multiturn

    wrong = list(_wrong_on_node(report, here, sglang_multiturn.__version__))
    for what, advice in wrong:
        yield problem("cluster-node", what, advice, name)
    if not wrong:
        yield ok(
            "cluster-node",
            "the package is there, verl knows its loop, files and versions are those of this machine",
            name,
        )


def _wrong_on_node(report: NodeReport, here: Mapping[str, str], version: str) -> Iterator[tuple[str, str]]:
    if report["package"] != version:
        yield f"sglang_multiturn {version} is not there: {report['package']}", "Install the same version on this node."
    if report["loop"] != LOOP_CLASS:
        yield (
            f"verl does not know the loop {LOOP_NAME!r} there: {report['loop']}",
            "Install the package with pip on this node.",
        )
    for path, expected in here.items():
        found = report["files"].get(path, "")
        if not found and expected:
            yield f"{path} cannot be read there", "Put it on a shared file system, and write an absolute path."
        elif found != expected:
            yield f"{path} has another content there", "Put it on a shared file system, so that there is one."
    mine = installed_versions()
    if other := [
        f"{name} {report['versions'][name] or 'missing'} (here {mine[name] or 'missing'})"
        for name in TESTED
        if report["versions"][name] != mine[name]
    ]:
        yield f"other versions than here: {', '.join(other)}", "Install the same versions on every node."
