"""`make compat`: how this package does with versions that its tests do not run.

    python -m compat verl      older versions of verl, as source: what they lack (docs/versions.md)
    python -m compat sglang    the newest SGLang, running: all engine tests, in an environment on top of this one

Packages are fetched with pip. It is no part of the test suite: minutes, and a package index, are needed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table
from verl_versions.facts import Facts, lacking
from verl_versions.reliance import reliance
from verl_versions.sources import VerlSource

REPOSITORY = Path(__file__).parents[1]
OLDER_VERL = ("0.9.0", "0.8.0")
SGLANG_SET = REPOSITORY / "constraints-sglang-newest.txt"
CONSOLE = Console(width=110, highlight=False)


class Verdict(NamedTuple):
    """A row of the table."""

    package: str
    how: str
    holds: str
    lacks: str
    is_expected: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when an engine test fails, or the installed verl lacks something."""
    parser = argparse.ArgumentParser(
        prog="compat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["verl", "sglang"], help="(both)")
    parser.add_argument(
        "--folder", type=Path, default=Path(sys.prefix) / "compat", help="of the second environment (%(default)s)"
    )
    chosen = parser.parse_args(arguments)
    what = [chosen.what] if chosen.what else ["verl", "sglang"]
    table = Table("package", "how", "holds", Column("lacks or fails", overflow="fold"))
    verdicts = [*(of_verl() if "verl" in what else ()), *([of_sglang(chosen.folder)] if "sglang" in what else ())]
    for verdict in verdicts:
        table.add_row(*verdict[:4])
    CONSOLE.print(table, markup=False)
    return 0 if all(verdict.is_expected for verdict in verdicts) else 1


def of_verl() -> Iterator[Verdict]:
    """Keep the facts of the installed version and of older ones, and judge them."""
    installed = VerlSource.installed()
    if installed is None:
        raise SystemExit("verl is not installed: pip install 'sglang_multiturn[verl]'")
    relied_on = reliance(REPOSITORY / "sglang_multiturn")
    tested = Facts.of(installed, relied_on)
    with tempfile.TemporaryDirectory() as folder:
        sources = [installed, *(VerlSource.of_wheel(_wheel("verl", version, folder)) for version in OLDER_VERL)]
        for source in sources:
            facts = Facts.of(source, relied_on)
            facts.keep()
            problems = lacking(facts, relied_on, tested, VerlSource(REPOSITORY))
            looked_at = len(facts.names) + len(facts.config) + len(facts.lines) + len(facts.calls)
            yield Verdict(
                f"verl {facts.version}",
                "its source",
                f"{looked_at} facts looked up",
                "\n".join(f"{name}: {why}" for name, why in problems.items()) or "nothing",
                is_expected=source is not installed or not problems,
            )


def of_sglang(folder: Path) -> Verdict:
    """Run the engine tests with the newest SGLang."""
    python = _environment(folder)
    report = folder / "engine.xml"
    done = subprocess.run(
        [python, "-m", "pytest", "tests/engine", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    cases = list(ET.parse(report).iter("testcase"))
    failed = [
        str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    version = next(
        line.partition("==")[2] for line in SGLANG_SET.read_text().splitlines() if line.startswith("sglang==")
    )
    return Verdict(
        f"sglang {version}",
        "its engine, running",
        f"{len(cases) - len(failed) - skipped} tests passed, {skipped} skipped",
        "\n".join(failed) or "nothing",
        is_expected=done.returncode == 0,
    )


def _environment(folder: Path) -> Path:
    """A virtual environment that sees this one's packages behind its own; its interpreter."""
    CONSOLE.print(f"making {folder}")
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    below = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (below / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", SGLANG_SET], check=True)
    return python


def _wheel(package: str, version: str, folder: str) -> Path:
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        folder,
        f"{package}=={version}",
    ]
    subprocess.run(download, check=True)
    (wheel,) = Path(folder).glob(f"{package}-{version}-*.whl")
    return wheel


if __name__ == "__main__":
    sys.exit(main())
