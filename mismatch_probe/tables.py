"""The Parquet tables: columns, units and definitions, in one place."""

from __future__ import annotations

import sys

import pyarrow as pa

from mismatch_probe.columns import Column as Column
from mismatch_probe.tables_engine import STEPS_ENGINE, TOKENS_ENGINE
from mismatch_probe.tables_fresh import FRESH
from mismatch_probe.tables_gradient import GRADIENT
from mismatch_probe.tables_reference import REFERENCE

_F, _I, _S = pa.float64(), pa.int64(), pa.string()
_CATEGORY = pa.dictionary(pa.int32(), pa.string())


def _nats(name: str, definition: str, interval: bool = False) -> Column:
    return Column(name, _F, definition, "nats", interval)


def _number(name: str, definition: str, interval: bool = False) -> Column:
    return Column(name, _F, definition, "1", interval)


TOKENS = (
    Column("sequence_id", _CATEGORY, "sequence, unique in its step"),
    Column("group_id", _CATEGORY, "prompt group: responses to one prompt"),
    Column("position", pa.int32(), "place in the response, from 0, masked tokens counted"),
    Column("token_id", pa.int32(), "the sampled token; null = not logged"),
    Column("sampler_version", _I, "version of the weights that drew the token; null = unknown"),
    Column("trainer_version", _I, "version of the trainer's weights at this step; null = unknown"),
    _nats("sampler_logprob", "log mu: the engine's log-prob as logged, never altered; see its source"),
    _nats("stale_trainer_logprob", "log pi_s: trainer network at the sampler's weights"),
    _nats("trainer_logprob", "log pi: trainer network at its current weights"),
    _nats("discrepancy", "D = log pi_s - log mu: engine numerics"),
    _nats("lag", "L = log pi - log pi_s: stale weights"),
    _nats("log_ratio", "d = D + L, exactly in float64"),
    Column("sampler_logprob_source", _CATEGORY, "logged, engine (its prefill, none was logged: approximate), or null"),
    Column(
        "stale_trainer_logprob_source",
        _CATEGORY,
        "rescored, nearest (scored at the closest checkpoint: approximate), or null",
    ),
    Column("trainer_logprob_source", _CATEGORY, "rescored, nearest (as above), logged, or null"),
    _nats("logged_trainer_logprob", "the trainer's own log-prob as logged, where the run has it"),
    _nats("entropy_stale", "entropy of pi_s at the token's prefix"),
    _nats("entropy_trainer", "entropy of pi at the token's prefix"),
    _nats("kl_stale_trainer", "KL(pi_s || pi) at the prefix, exact over the vocabulary"),
    _nats("kl_trainer_stale", "KL(pi || pi_s) at the prefix, exact over the vocabulary"),
    _number("total_variation", "half the L1 norm of pi_s - pi at the prefix"),
    _number("same_top", "1 where pi_s and pi have the same most probable token at the prefix, else 0"),
    _number("advantage", "advantage as logged"),
    *TOKENS_ENGINE,
)

SEQUENCES = (
    Column("step", _I, "training step"),
    Column("sequence_id", _S, "sequence, unique in its step"),
    Column("group_id", _S, "prompt group"),
    Column("tokens", _I, "counted response tokens"),
    Column("sampler_version_min", _I, "oldest sampler version among counted tokens"),
    Column("sampler_version_max", _I, "newest sampler version among counted tokens"),
    Column("trainer_version", _I, "version of the trainer's weights"),
    _nats("discrepancy_sum", "sum of D over the response; null where a token is null"),
    _nats("lag_sum", "sum of L over the response: log of the sequence's lag weight"),
    _nats("log_ratio_sum", "sum of d over the response"),
    _nats("prefix_kl_stale_trainer", "mean of KL(pi_s || pi) over its prefixes"),
    _number("reward", "reward as logged"),
    Column("finish_reason", _S, "finish reason as logged"),
)

_RATIOS, _LEVELS = ("lag", "discrepancy", "total"), ("token", "sequence", "prompt")
_PARTS = (("discrepancy", "D"), ("lag", "L"), ("log_ratio", "d"))

STEPS = (
    Column("step", _I, "training step; step k turns version k into version k + 1"),
    Column("sequences", _I, "sequences analysed"),
    Column("groups", _I, "prompt groups analysed"),
    Column("tokens", _I, "counted response tokens"),
    Column("tokens_with_discrepancy", _I, "counted tokens whose D is known"),
    Column("tokens_with_lag", _I, "counted tokens whose L is known"),
    Column("rejected", _I, "rows set aside"),
    Column("nearest_gap_max", _I, "updates between a version and the checkpoint scored in its place; 0 = all exact"),
    _number("version_lag_mean", "trainer version minus sampler version, mean over counted tokens", True),
    _number("version_lag_max", "the same, at the oldest token"),
    _number("response_length_mean", "counted tokens in a response, mean", True),
    _number("reward_mean", "reward as logged, mean over sequences", True),
    *(
        column
        for part, symbol in _PARTS
        for column in (
            _nats(f"{part}_mean", f"mean of {symbol} over tokens", True),
            _nats(f"{part}_mean_abs", f"mean of |{symbol}|", True),
            _nats(f"{part}_rms", f"root mean square of {symbol}", True),
        )
    ),
    Column("discrepancy_lag_covariance", _F, "covariance of D and L over tokens", "nats^2", True),
    *(
        column
        for part, symbol, pair in (("discrepancy", "D", "KL(mu || pi_s)"), ("log_ratio", "d", "KL(mu || pi)"))
        for column in (
            _nats(f"{part}_k1", f"mean of -{symbol}: {pair}, unbiased", True),
            _nats(f"{part}_k2", f"mean of {symbol}^2 / 2: {pair}, biased in second order", True),
            _nats(
                f"{part}_k3", f"mean of e^{symbol} - 1 - {symbol}: {pair}, unbiased where the mean weight is 1", True
            ),
            _number(
                f"{part}_mean_weight", f"mass audit: mean of e^{symbol}; 1 when the logs are what they claim", True
            ),
        )
    ),
    *(
        _number(f"ess_{ratio}_{level}", f"Kish ESS of the {ratio} ratio at {level} level, share of n", True)
        for ratio in _RATIOS
        for level in _LEVELS
    ),
    *(
        _number(f"ess_{ratio}_{level}_bias", f"small-sample bias of ess_{ratio}_{level}: bootstrap mean minus value")
        for ratio in _RATIOS
        for level in _LEVELS
    ),
    _nats("prefix_kl_stale_trainer", "prefix KL: mean of KL(pi_s || pi) over the sampler's prefixes", True),
    _nats("prefix_kl_trainer_stale", "prefix KL: mean of KL(pi || pi_s) over the sampler's prefixes", True),
    _nats("discrepancy_sequence_kl", "KL(mu || pi_s) of whole responses: mean over them of the sum of -D", True),
    _nats("log_ratio_sequence_kl", "KL(mu || pi) of whole responses: mean over them of the sum of -d", True),
    _nats(
        "prefix_kl_sequence_stale_trainer", "mean over responses of the summed KL(pi_s || pi) of their prefixes", True
    ),
    _number("lag_mean_weight", "mean of e^L; need not be 1, since tokens come from mu", True),
    _nats(
        "full_kl_trainer_stale",
        "KL(pi || pi_s) over the trainer's own prefixes, re-weighted; null: not identifiable",
        True,
    ),
    *(
        _number(f"pareto_k_{ratio}_{level}", f"Pareto k of the {ratio} weights at {level} level; from 0.7 on distrust")
        for ratio in _RATIOS
        for level in _LEVELS
    ),
    *(
        _number(
            f"perplexity_ess_{ratio}_{level}", f"perplexity ESS of the {ratio} ratio at {level} level, share of n", True
        )
        for ratio in _RATIOS
        for level in _LEVELS
    ),
    *(
        column
        for ratio in _RATIOS
        for level in _LEVELS
        for column in (
            _number(f"max_weight_share_{ratio}_{level}", f"largest {ratio} weight over their sum at {level} level"),
            _number(f"chi_square_{ratio}_{level}", f"1 / ess_{ratio}_{level} - 1: variance over squared mean", True),
            _number(f"second_moment_{ratio}_{level}", "mean of the squared weight; null beyond float64", True),
        )
    ),
    *(
        column
        for ratio in _RATIOS
        for column in (
            _number(f"share_beyond_ln2_{ratio}", f"share of tokens whose {ratio} log-ratio is beyond ln 2", True),
            _number(f"share_outside_band_{ratio}", f"share of tokens whose {ratio} ratio is outside [0.8, 1.25]", True),
            _number(
                f"predicted_ess_{ratio}_sequence",
                "sequence ESS were token log-ratios independent normals: exp(-T s^2)",
                True,
            ),
        )
    ),
    Column(
        "discrepancy_half_ess_length",
        _F,
        "response length at which D alone brings the sequence ESS to 1/2; infinite where D does not vary",
        "tokens",
        True,
    ),
    _nats("entropy_stale", "mean entropy of pi_s over the sampler's prefixes", True),
    _nats("entropy_trainer", "mean entropy of pi over the sampler's prefixes", True),
    _number("top1_agreement", "share of prefixes at which pi_s and pi have the same most probable token", True),
    *(
        column
        for part, difference, how in (
            ("discrepancy", "mu - pi_s", "from the sampled tokens"),
            ("lag", "pi_s - pi", "exact over the vocabulary"),
        )
        for column in (
            _number(f"bias_{part}_tv", f"score bias: mean total variation of {difference}, {how}", True),
            _number(f"bias_{part}_norm", f"L2 norm of the mean vector of {difference}, {how}"),
            _number(f"bias_{part}_noise", "its standard error as an L2 norm, from halves by prompt group"),
            _number(f"bias_{part}_split_half_cosine", "cosine between the halves' mean vectors: 1 real, 0 noise"),
            _number(
                f"bias_{part}_cosine_previous", "cosine with the previous analysed step's mean vector: persistence"
            ),
        )
    ),
    *FRESH,
    *GRADIENT,
    *STEPS_ENGINE,
    _nats("noise_floor_rms", "the probe's own error: rms difference of log-probs scored in a batch and alone", True),
    _nats("noise_floor_max", "largest such difference"),
    Column("noise_floor_tokens", _I, "tokens scored twice for it"),
    *REFERENCE,
    _nats("logged_trainer_gap_rms", "rms of logged minus rescored log pi, where the run logs it", True),
    _nats("logged_trainer_gap_max", "largest such difference"),
    Column("breakdown_level", _S, "level at which breakdown was judged"),
    Column("breakdown_ratio", _S, "ratio whose ESS was judged"),
    _number("breakdown_threshold", "ESS below it is a breakdown"),
    _number(
        "breakdown_probability", "confidence, by the interval's method, that the judged ESS is below the threshold"
    ),
    Column("status", _S, "ok, warning, breakdown, unjudged or approximate"),
    Column("reasons", pa.list_(pa.string()), "why something is null or of limited meaning"),
)

PLACES = (
    Column("step", _I, "training step"),
    Column("place", _I, "place t in the counted tokens of the responses, from 0"),
    Column("alive", _I, "sequences with a token there"),
    _number("mean_weight", "mass audit: mean over sequences of W_t, the product of e^d before t", True),
    _number("missing_mass", "1 - mean_weight where its interval lies below 1, else 0: trainer mass never sampled"),
    _number("effective_sequences", "Kish effective number of sequences under W_t"),
    _number("pareto_k", "Pareto k of W_t; null where the weights are equal or tie"),
    _nats("prefix_kl_trainer_stale", "mean of KL(pi || pi_s) at t over the sampler's prefixes"),
    _nats("full_kl_trainer_stale", "the same over the trainer's own, self-normalised by W_t; null: not identifiable"),
    Column("identifiable", pa.bool_(), "mean_weight's interval holds 1, k below its limit, 20 effective sequences"),
)

REJECTED = (
    Column("step", _I, "training step"),
    Column("file", _S, "file, relative to the run directory"),
    Column("row", _I, "1-based line or row; 0 = the whole file"),
    Column("sequence_id", _S, "sequence, where it could be read"),
    Column("reason", _S, "why it was set aside"),
)


def markdown() -> str:
    """The page that documents the tables, ``docs/tables.md``: ``python -m mismatch_probe.tables`` prints it."""
    from mismatch_probe.tables_trends import TRENDS  # it needs Column from here

    lines = [
        "# Tables",
        "",
        "What `decompose` writes. Null means not known; `reasons` in `steps.parquet` says why. A column marked with ±",
        "has `_ci_low` and `_ci_high` beside it: over prompt groups, by the method in run.json.",
        "The same definitions and units are in the metadata of each Parquet field.",
    ]
    for file, columns in (
        ("tokens/step=K/part-0.parquet", TOKENS),
        ("sequences.parquet", SEQUENCES),
        ("steps.parquet", STEPS),
        ("places.parquet", PLACES),
        ("trends.parquet", TRENDS),
        ("rejected.parquet", REJECTED),
    ):
        lines += ["", f"## {file}", "", "| column | unit | definition |", "|---|---|---|"]
        for column in columns:
            definition = column.definition.replace("|", "\\|")
            lines.append(f"| `{column.name}`{' ±' if column.interval else ''} | {column.unit} | {definition} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
