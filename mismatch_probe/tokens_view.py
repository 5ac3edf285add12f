"""The worst sequences of a step and what makes them so, from an analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mismatch_probe.diagnosis.finding import Diagnosis
from mismatch_probe.errors import UsageError
from mismatch_probe.folder import Analysis

PARTS = {"discrepancy": "D", "lag": "L", "log_ratio": "d"}
_LOGPROBS = ("sampler_logprob", "stale_trainer_logprob", "trainer_logprob")
_COLUMNS = ["sequence_id", "group_id", "position", "token_id", "sampler_version", *_LOGPROBS, *PARTS]
_ONE_TOKEN, _FEW, _LATE = 0.5, 0.8, 0.9


@dataclass(frozen=True)
class TokenView:
    """One counted token: log-probs and their differences in nats, None = null."""

    position: int
    token_id: int | None
    sampler_version: int | None
    sampler_logprob: float | None
    stale_trainer_logprob: float | None
    trainer_logprob: float | None
    discrepancy: float | None
    lag: float | None
    log_ratio: float | None


@dataclass(frozen=True)
class SequenceView:
    """One sequence: ``total`` is its sum of |x|, nats, ``share`` that of the step's, ``reason`` what makes it so."""

    sequence_id: str
    group_id: str
    total: float
    share: float
    reason: str
    findings: tuple[str, ...]
    facts: dict[str, Any]
    tokens: tuple[TokenView, ...]


def worst_sequences(
    analysis: Analysis, step: int, by: str, most: int, diagnosis: Diagnosis | None, sequence: str | None = None
) -> list[SequenceView]:
    """The sequences of a step with the largest sum of |x|, the largest first.

    Args:
        analysis: where the tokens are.
        step: which step.
        by: one of PARTS.
        most: how many.
        diagnosis: whose findings are named beside the sequences that they point to.
        sequence: only this one, however small.

    Raises:
        UsageError: the step was not analysed, or has no such sequence.
        InputError: the analysis cannot be read.
    """
    table = analysis.tokens_of(step, _COLUMNS)
    if table.empty:
        steps = ", ".join(map(str, analysis.steps["step"]))
        raise UsageError(f"--step {step}: no tokens of it in {analysis.folder}. Analysed are {steps}")
    table["sequence_id"], table["group_id"] = table["sequence_id"].astype(str), table["group_id"].astype(str)
    size = table[by].abs()
    totals = size.groupby(table["sequence_id"], sort=True).sum().sort_values(ascending=False, kind="stable")
    if sequence is not None and sequence not in totals.index:
        raise UsageError(f"--sequence {sequence}: step {step} has none of that name; the worst is {totals.index[0]}")
    names = [sequence] if sequence is not None else list(totals.index[:most])
    facts = analysis.sequences_of(step)
    whole = float(totals.sum())
    return [
        SequenceView(
            sequence_id=name,
            group_id=str(rows["group_id"].iloc[0]),
            total=float(totals[name]),
            share=float(totals[name]) / whole if whole > 0 else 0.0,
            reason=reason(rows["position"].to_numpy(), rows[by].to_numpy(dtype=np.float64), PARTS[by]),
            findings=_findings(diagnosis, step, name),
            facts=facts.get(name, {}),
            tokens=tuple(_token(row) for row in rows.to_dict("records")),
        )
        for name, rows in ((name, table[table["sequence_id"] == name]) for name in names)
    ]


def reason(position: np.ndarray, values: np.ndarray, symbol: str) -> str:
    """What makes a sequence's sum of |x| large: one token, a few, one end of it, one sign, or all of it.

    Args:
        position: place of each token, (n,).
        values: x of each token, nats, NaN = null, (n,).
        symbol: of x.
    """
    size = np.abs(np.nan_to_num(values))
    whole = size.sum()
    if not whole:
        return f"{symbol} is zero or unknown at every token"
    order = np.argsort(-size, kind="stable")
    at = int(position[order[0]])
    if len(values) > 1 and size[order[0]] >= _ONE_TOKEN * whole:
        return f"token {at} alone carries {size[order[0]] / whole:.0%} of it ({symbol} {values[order[0]]:+.3f})"
    half = len(values) // 2
    if len(values) >= 8 and size[half:].sum() >= _LATE * whole:
        first = int(position[half + int(np.argmax(size[half:] > size[:half].max()))])
        return f"its second half carries {size[half:].sum() / whole:.0%} of it, from token {first} on"
    if len(values) >= 8 and size[:half].sum() >= _LATE * whole:
        return f"its first half carries {size[:half].sum() / whole:.0%} of it"
    if len(values) >= 10 and size[order[:3]].sum() >= _FEW * whole:
        return f"three tokens carry {size[order[:3]].sum() / whole:.0%} of it"
    signed = np.nansum(values) / whole
    if abs(signed) >= _LATE:
        return f"{symbol} has one sign ({'+' if signed > 0 else '-'}) at nearly every token"
    return f"spread over its tokens, {whole / len(values):.3f} nats each"


def _findings(diagnosis: Diagnosis | None, step: int, name: str) -> tuple[str, ...]:
    if diagnosis is None:
        return ()
    pointing = (
        finding
        for finding in diagnosis.findings
        if any(example.step == step and example.sequence_id == name for example in finding.examples)
        or (step in finding.steps and not any(example.sequence_id for example in finding.examples))
    )
    return tuple(dict.fromkeys(finding.code for finding in pointing))


def _token(row: Mapping[Any, Any]) -> TokenView:
    return TokenView(
        position=int(row["position"]),
        token_id=_whole(row["token_id"]),
        sampler_version=_whole(row["sampler_version"]),
        **{name: _known(row[name]) for name in (*_LOGPROBS, *PARTS)},
    )


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def _known(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
