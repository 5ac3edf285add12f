"""One joined step -> its tokens table and its rows of the sequences and places tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_probe.assemble import StepData
from mismatch_probe.engine_split import engine_columns
from mismatch_probe.run import UNKNOWN_TOKEN, UNKNOWN_VERSION, Bools, Floats, Ints
from mismatch_probe.stats.positions import Places
from mismatch_probe.stats.ratios import sequence_sums
from mismatch_probe.table_io import nullable, schema
from mismatch_probe.tables import PLACES, SEQUENCES, TOKENS


def token_table(data: StepData, provenance: dict[str, str]) -> pa.Table:
    """The step's tokens table."""
    rollouts, counted, scores = data.rollouts, data.counted, data.scores
    sequence = data.levels.sequence
    versions = rollouts.sampler_version[counted]
    ids = rollouts.response.values[counted]
    none = np.zeros(len(versions), dtype=np.bool_)
    columns: dict[str, pa.Array] = {
        "sequence_id": _category(sequence, rollouts.sequence_id),
        "group_id": _category(sequence, rollouts.group_id),
        "position": pa.array(rollouts.position_of_token[counted], pa.int32()),
        "token_id": pa.array(ids, pa.int32(), mask=ids == UNKNOWN_TOKEN),
        "sampler_version": pa.array(versions, pa.int64(), mask=versions == UNKNOWN_VERSION),
        "trainer_version": _constant(data.trainer_version, len(versions)),
        "sampler_logprob": nullable(data.sampler),
        "stale_trainer_logprob": nullable(data.stale),
        "trainer_logprob": nullable(data.trainer),
        "discrepancy": nullable(data.split.discrepancy),
        "lag": nullable(data.split.lag),
        "log_ratio": nullable(data.split.log_ratio),
        "sampler_logprob_source": _source(data.sampler, none, none, engine=data.engine.stands_in),
        "stale_trainer_logprob_source": _source(
            data.stale, data.stale_rescored | data.trainer_rescored, data.stale_nearest
        ),
        "trainer_logprob_source": _source(data.trainer, data.trainer_rescored, data.trainer_nearest),
        "logged_trainer_logprob": nullable(rollouts.trainer_logprob[counted]),
        "entropy_stale": nullable(scores.entropy_stale[counted]),
        "entropy_trainer": nullable(scores.entropy_trainer[counted]),
        "kl_stale_trainer": nullable(scores.kl_stale_trainer[counted]),
        "kl_trainer_stale": nullable(scores.kl_trainer_stale[counted]),
        "total_variation": nullable(scores.total_variation[counted]),
        "same_top": nullable(scores.same_top[counted]),
        "advantage": nullable(rollouts.advantage[counted]),
        **engine_columns(data.engine),
    }
    target = schema(TOKENS, provenance)
    return pa.table([columns[name] for name in target.names], schema=target)


def sequence_table(data: StepData, provenance: dict[str, str]) -> pa.Table:
    """The step's part of the sequences table."""
    rollouts, levels = data.rollouts, data.levels
    n = len(rollouts)
    versions = rollouts.sampler_version[data.counted]
    oldest, newest = np.full(n, np.iinfo(np.int64).max), np.full(n, UNKNOWN_VERSION)
    np.minimum.at(oldest, levels.sequence, versions)
    np.maximum.at(newest, levels.sequence, versions)
    tokens = np.bincount(levels.sequence, minlength=n)
    empty = tokens == 0
    prefix_kl = sequence_sums(data.scores.kl_stale_trainer[data.counted], levels) / np.maximum(tokens, 1)
    columns = {
        "step": pa.array(np.full(n, data.step), pa.int64()),
        "sequence_id": pa.array(rollouts.sequence_id, pa.string()),
        "group_id": pa.array(rollouts.group_id, pa.string()),
        "tokens": pa.array(tokens, pa.int64()),
        "sampler_version_min": pa.array(oldest, pa.int64(), mask=empty | (oldest == UNKNOWN_VERSION)),
        "sampler_version_max": pa.array(newest, pa.int64(), mask=empty | (newest == UNKNOWN_VERSION)),
        "trainer_version": _constant(data.trainer_version, n),
        "discrepancy_sum": nullable(sequence_sums(data.split.discrepancy, levels)),
        "lag_sum": nullable(sequence_sums(data.split.lag, levels)),
        "log_ratio_sum": nullable(sequence_sums(data.split.log_ratio, levels)),
        "prefix_kl_stale_trainer": nullable(prefix_kl),
        "reward": nullable(rollouts.reward),
        "finish_reason": pa.array(rollouts.finish_reason, pa.string()),
    }
    target = schema(SEQUENCES, provenance)
    return pa.table([columns[name] for name in target.names], schema=target)


def place_table(step: int, places: Places, provenance: dict[str, str]) -> pa.Table:
    """The step's part of the places table."""
    count = len(places.alive)
    columns = {
        "step": pa.array(np.full(count, step)),
        "place": pa.array(np.arange(count)),
        "alive": pa.array(places.alive),
        "mean_weight": nullable(places.mean_weight),
        "mean_weight_ci_low": nullable(places.mean_weight_low),
        "mean_weight_ci_high": nullable(places.mean_weight_high),
        "missing_mass": nullable(places.missing_mass),
        "effective_sequences": nullable(places.effective),
        "pareto_k": nullable(places.pareto_k),
        "prefix_kl_trainer_stale": nullable(places.prefix_kl),
        "full_kl_trainer_stale": nullable(places.full_kl),
        "identifiable": pa.array(places.identifiable),
    }
    target = schema(PLACES, provenance)
    return pa.table([columns[name] for name in target.names], schema=target)


def _source(values: Floats, rescored: Bools, nearest: Bools, engine: bool = False) -> pa.Array:
    codes = pa.array(rescored.astype(np.int32) + nearest, mask=np.isnan(values), type=pa.int32())
    return pa.DictionaryArray.from_arrays(codes, pa.array(["engine" if engine else "logged", "rescored", "nearest"]))


def _category(sequence: Ints, names: Any) -> pa.Array:
    kinds, code_of_row = np.unique(names.astype(str), return_inverse=True)
    codes = pa.array(code_of_row[sequence].astype(np.int32))
    return pa.DictionaryArray.from_arrays(codes, pa.array(kinds.tolist(), pa.string()))


def _constant(version: int, count: int) -> pa.Array:
    unknown = np.full(count, version == UNKNOWN_VERSION)
    return pa.array(np.full(count, version), pa.int64(), mask=unknown)
