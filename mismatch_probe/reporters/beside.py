"""Sentences of ``ess-report`` on what ``decompose`` was asked for beside the split."""

from __future__ import annotations

import pandas as pd

from mismatch_probe.folder import Analysis
from mismatch_probe.stats.attribution import attribution_sentence
from mismatch_probe.stats.fresh import StepFresh, fresh_sentence


def beside_sentences(analysis: Analysis, exact: pd.DataFrame) -> list[str]:
    """Whose error the discrepancy is, and full against prefix KL; none where it was not asked for.

    Args:
        analysis: the tables.
        exact: rows of the steps table that no neighbouring weights stand in for.
    """
    dtype = str((analysis.record["options"]).get("reference"))
    names = ("error_engine_rms", "error_trainer_rms", "error_covariance", "reference_tokens")
    errors = [{name: float(row[name]) for name in names} for row in exact[list(names)].to_dict("records")]
    full = "full_kl_fresh_trainer_stale"
    ratio = "full_kl_fresh_ratio"
    columns = [
        *("step", full, f"{full}_ci_low", f"{full}_ci_high", "full_kl_fresh_prefix_trainer_stale"),
        *(ratio, f"{ratio}_ci_low", f"{ratio}_ci_high"),
    ]
    fresh = [StepFresh(int(step), *map(float, rest)) for step, *rest in exact[columns].itertuples(index=False)]
    told = (attribution_sentence(errors, dtype), fresh_sentence(fresh, analysis.record["options"]["confidence"]))
    return [sentence for sentence in told if sentence]
