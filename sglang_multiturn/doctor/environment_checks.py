"""What is installed, and whether verl will find this package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

from sglang_multiturn.doctor.findings import Findings, note, ok, problem
from sglang_multiturn.doctor.launch import Launch
from sglang_multiturn.verl_plugin.compat import LOOP_CLASS, LOOP_NAME
from sglang_multiturn.verl_plugin.node_report import version_of

TESTED: Mapping[str, str] = {
    "verl": "0.9.1",
    "sglang": "0.5.14",
    "torch": "2.13.0",
    "transformers": "5.8.1",
    "ray": "2.60.0",
}
"""Versions the tests run with."""
_PLUGIN_GROUP = "verl.plugins"


def installed_versions() -> dict[str, str]:
    """Version of each package in TESTED, "" where it is not installed; local parts (`+cpu`) left out."""
    return {name: version_of(name) for name in TESTED}


def check_versions(versions: Mapping[str, str]) -> Findings:
    """Other versions than the tested ones."""
    other = [
        f"{name} {versions[name] or 'is not installed'} (tested: {TESTED[name]})"
        for name in TESTED
        if versions[name] != TESTED[name]
    ]
    if not versions["verl"].startswith("0.9."):
        what = f"verl {versions['verl']}: this package is written against 0.9.1, whose loader it replaces at two names"
        yield problem("environment-versions", what, "pip install 'verl>=0.9.1,<0.10'.")
    elif other:
        yield note(
            "environment-versions", ", ".join(other), "Should work; if something is odd, try the tested versions first."
        )
    else:
        yield ok("environment-versions", ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_trl(version: str | None, launch: Launch) -> Findings:
    """verl 0.9.1 imports trl where it is there (models/transformers/monkey_patch.py:350), and trl 1 has no such class."""
    if (
        version is None
        or int(version.partition(".")[0]) < 1
        or not str(launch.get("actor_rollout_ref.actor.strategy")).startswith("fsdp")
    ):
        return
    yield problem(
        "environment-trl",
        f"trl {version} is installed: verl 0.9.1 imports AutoModelForCausalLMWithValueHead from it in every FSDP worker, "
        "which trl 1 has no more",
        "pip uninstall trl, or install trl<1.",
    )


def installed_trl() -> str | None:
    """trl's version where verl would import it."""
    return version_of("trl") or None if importlib.util.find_spec("trl") is not None else None


def check_plugin(entry_points: Mapping[str, str], policy: str) -> Findings:
    """Whether `import verl` imports this package.

    Args:
        entry_points: name and module of each `verl.plugins` entry point that is installed.
        policy: `VERL_USE_EXTERNAL_PLUGINS`, "" or "auto" where it is not set.
    """
    allowed = policy in ("", "auto") or LOOP_NAME in [name.strip() for name in policy.split(",")]
    if LOOP_NAME not in entry_points:
        what = f"no {_PLUGIN_GROUP} entry point of sglang_multiturn is installed, so verl will not find the loop"
        yield problem(
            "environment-plugin", what, "Install the package (pip install -e .); a folder on PYTHONPATH is not enough."
        )
    elif not allowed:
        what = f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps this package out of verl"
        yield problem("environment-plugin", what, f"Unset it, or set it to {LOOP_NAME}.")


def installed_plugins() -> dict[str, str]:
    """Entry points of the group verl reads."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=_PLUGIN_GROUP)}


def plugin_policy() -> str:
    """As verl reads it (verl/__init__.py)."""
    return os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "").strip().lower()


def check_registered() -> Findings:
    """Import verl as a worker does and look into its registry."""
    from sglang_multiturn.verl_plugin.launch import registered_loops

    loops = registered_loops()
    if loops.get(LOOP_NAME) == LOOP_CLASS:
        yield ok("environment-plugin", f"verl knows the loop {LOOP_NAME!r}")
        return
    what = f"verl was imported and does not know the loop {LOOP_NAME!r}; it knows {', '.join(sorted(loops))}"
    yield problem("environment-plugin", what, "Look for an ERROR of sglang_multiturn in the log: it says what failed.")
