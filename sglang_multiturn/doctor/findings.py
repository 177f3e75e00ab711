"""What a check says: one finding, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from sglang_multiturn.errors import SglangMultiturnError

MAX_SHOWN_CHARS = 600
"""Rows, schemas and names may be long and hostile; a finding quotes no more than this."""


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    """Looked at, and as it should be."""
    NOTE = "note"
    """Not wrong by itself; look whether it is what you mean."""
    PROBLEM = "problem"
    """Training or rolling out like this fails, or trains on something else than you think."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing the doctor found."""

    check: str
    """The check's stable name, such as `data-agent-name`; its first word is the group it is printed in."""
    severity: Severity
    what: str
    where: str = ""
    """A file and line, a launch key, or a node."""
    advice: str = ""
    """What to do; empty only for `ok`."""

    @property
    def group(self) -> str:
        """What is looked at: model, template, tools, calls, data, budget, conversation, launch, environment, cluster."""
        return self.check.partition("-")[0]


Findings = Iterator[Finding]


def ok(check: str, what: str, where: str = "") -> Finding:
    """Something that is as it should be."""
    return Finding(check=check, severity=Severity.OK, what=shorten(what), where=where)


def note(check: str, what: str, advice: str, where: str = "") -> Finding:
    """Something to look at."""
    return Finding(check=check, severity=Severity.NOTE, what=shorten(what), where=where, advice=advice)


def problem(check: str, what: str, advice: str, where: str = "") -> Finding:
    """Something to mend."""
    return Finding(check=check, severity=Severity.PROBLEM, what=shorten(what), where=where, advice=advice)


def shorten(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Text whose middle is left out where it is long."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def isolated(check: str, run: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one check. What it raises becomes one more finding, so that the other checks go on."""
    found: list[Finding] = []
    try:
        found.extend(run())
    except SglangMultiturnError as error:
        found.append(problem(check, str(error), "Mend this first; what depends on it was not looked at."))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - input is hostile, and users' modules run when imported
        said = f"this check could not finish: {type(error).__name__}: {error}"
        found.append(problem(check, said, "Look at what raised it; what this check would have found is not known."))
    return found
