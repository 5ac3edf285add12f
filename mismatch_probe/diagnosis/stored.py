"""``findings.json``: a diagnosis as it is kept in the analysis folder, and read back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mismatch_probe.diagnosis.finding import Bucket, Diagnosis, Example, Finding, NotTestable, Number, Severity
from mismatch_probe.errors import InputError

FILE = "findings.json"
SCHEMA_VERSION = 1


def as_content(diagnosis: Diagnosis) -> dict[str, Any]:
    """What the file holds; NaN is null, severities are words."""
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **_plain(asdict(diagnosis))}
    for finding in content["findings"]:
        finding["severity"] = Severity(finding["severity"]).name.lower()
    return content


def as_text(diagnosis: Diagnosis) -> str:
    """The file's text."""
    return json.dumps(as_content(diagnosis), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_findings(folder: Path) -> Diagnosis | None:
    """The diagnosis of an analysis folder; None where none was made.

    Raises:
        InputError: the file is there and cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {content['schema_version']}")
        return Diagnosis(
            findings=tuple(_finding(entry) for entry in content["findings"]),
            not_testable=tuple(NotTestable(tuple(e["codes"]), e["because"]) for e in content["not_testable"]),
            gap=content["gap"],
            left=content["left"],
            notes=tuple(content["notes"]),
            buckets=tuple(Bucket(**entry) for entry in content["buckets"]),
            concentration=tuple(Number(**entry) for entry in content["concentration"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not readable ({error}). Run mismatch-probe diagnose again") from None


def _finding(entry: dict[str, Any]) -> Finding:
    return Finding(
        **{
            **entry,
            "severity": Severity[entry["severity"].upper()],
            "numbers": tuple(Number(**number) for number in entry["numbers"]),
            "examples": tuple(Example(**example) for example in entry["examples"]),
            "steps": tuple(entry["steps"]),
        }
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
