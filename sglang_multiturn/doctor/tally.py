"""Findings about rows: one for each kind, with a count and the first row that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_multiturn.doctor.findings import Finding, Findings, Severity, shorten


@dataclass(slots=True)
class _Kind:
    severity: Severity
    advice: str
    first: str
    place: str
    count: int = 0


class Tally:
    """Counts what rows have in common."""

    def __init__(self, rows: int) -> None:
        """`rows` is how many are looked at."""
        self._rows = rows
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def add(self, check: str, severity: Severity, what: str, advice: str, place: str) -> None:
        """One row shows this. Rows that show the same `check` with the same `advice` become one finding."""
        kind = self._kinds.setdefault((check, advice), _Kind(severity, advice, what, place))
        kind.count += 1

    def findings(self) -> Findings:
        """One finding a kind, the most frequent first."""
        for (check, _), kind in sorted(self._kinds.items(), key=lambda item: -item[1].count):
            share = f"{kind.count:,} of {self._rows:,} rows, the first" if kind.count > 1 else "one row"
            yield Finding(
                check=check,
                severity=kind.severity,
                what=shorten(f"{share}: {kind.first}"),
                where=kind.place,
                advice=kind.advice,
            )
