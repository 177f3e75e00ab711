"""What a node of a cluster says of itself. Sent there by value: it names nothing but the standard library."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict


class NodeReport(TypedDict):
    """One node's answers."""

    versions: dict[str, str]
    """"" where a package is not installed."""
    package: str
    """Version of this package, or why it cannot be imported."""
    loop: str
    """Class of our loop in verl's registry there, or why there is none."""
    files: dict[str, str]
    """`digest` of each."""


def report_of_node(files: Sequence[str], packages: Sequence[str]) -> NodeReport:
    """Look around. Imports verl, which takes seconds."""
    return {
        "versions": {name: version_of(name) for name in packages},
        "package": _attempt(_package),
        "loop": _attempt(_loop),
        "files": {name: digest(name) for name in files},
    }


def version_of(name: str) -> str:
    """Version of an installed package without its local part (`+cpu`); "" where there is none."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def digest(name: str) -> str:
    """A file's SHA-256; "folder" for a folder, "" where it cannot be read."""
    path = Path(name).expanduser()
    try:
        return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _package() -> str:
    import sglang_multiturn

    return str(sglang_multiturn.__version__)


def _loop() -> str:
    from verl.experimental.agent_loop import agent_loop

    return str(agent_loop._agent_loop_registry.get("sglang_multiturn", {}).get("_target_", "not registered"))


def _attempt(look: Callable[[], str]) -> str:
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - an import may raise anything, and that is the answer
        return f"{type(error).__name__}: {error}"
