"""What frameworks hold in memory -> rows for ``StepWriter.add_rows``.

A row's step is the number of updates made before it is trained on, and a version the number of updates that made the
weights; each function says where its framework counts otherwise. A batch is read when its rows are added, so one that
has changed its shape is set aside like a row that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mismatch_probe.log.arrays import Row, padded_rows, to_numpy


def rows_from_trl(batch: Mapping[str, Any], step: int, sampler_version: Any = None) -> Iterator[Row]:
    """Rows of what TRL's ``GRPOTrainer._prepare_inputs`` or ``_generate_and_score_completions`` returns.

    Args:
        batch: ``prompt_ids`` and ``prompt_mask`` (B, P) left-padded, ``completion_ids`` and ``completion_mask`` (B, C)
            right-padded, ``advantages`` (B,), and where TRL made them ``tool_mask``, ``sampling_per_token_logps``
            (vLLM only) and ``old_per_token_logps`` (B, C).
        step: ``trainer.state.global_step`` when the batch is trained on.
        sampler_version: the same when its completions were drawn, one value or (B,); None takes ``step``.

    TRL computes ``old_per_token_logps`` when it draws. Of a batch that is used again in later steps they are not the
    trainer's log-probs any more, so they are left out there. Completions that ``mask_truncated_completions`` took out
    of the loss have an empty mask, so they are set aside.
    """
    held = {key: to_numpy(value) for key, value in batch.items() if key in _TRL}
    completed = held["completion_mask"]
    versions = np.broadcast_to(to_numpy(step if sampler_version is None else sampler_version), len(completed))
    old = held.get("old_per_token_logps")
    if old is not None:
        old = np.where((versions == step)[:, None], old, np.nan)
    yield from padded_rows(
        input_ids=np.concatenate([held["prompt_ids"], held["completion_ids"]], axis=1),
        attention_mask=np.concatenate([held["prompt_mask"], completed], axis=1),
        response_mask=completed,
        loss_mask=held.get("tool_mask"),
        sampler_logprobs=held.get("sampling_per_token_logps"),
        trainer_logprobs=old,
        advantages=held["advantages"],
        sampler_version=versions,
    )


_TRL = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"),
    *("tool_mask", "sampling_per_token_logps", "old_per_token_logps"),
)


def rows_from_openrlhf(experience: Any, sampler_version: Any) -> Iterator[Row]:
    """Rows of an OpenRLHF ``Experience`` as ``make_experience_batch`` returns it.

    Args:
        experience: ``sequences`` and ``attention_mask`` (B, T); ``action_mask``, ``action_log_probs``, ``advantages``
            and ``rollout_log_probs`` (B, T - 1), whose index t - 1 is token t; ``rewards`` (B,).
        sampler_version: ``global_step`` of ``train_step`` in a synchronous run.

    ``rollout_log_probs`` is None unless OpenRLHF's importance-sampling correction is on.
    """
    yield from padded_rows(
        input_ids=experience.sequences,
        attention_mask=experience.attention_mask,
        response_mask=experience.action_mask,
        sampler_logprobs=experience.rollout_log_probs,
        trainer_logprobs=experience.action_log_probs,
        advantages=experience.advantages,
        reward=experience.rewards,
        sampler_version=sampler_version,
    )


def rows_from_areal(trajectory: Mapping[str, Any], group_id: Any = None) -> Iterator[Row]:
    """Rows of an AReaL trajectory, as ``arun_episode`` returns it or ``prepare_batch`` collects it.

    Args:
        trajectory: ``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs`` and ``versions`` (B, T), index t for
            token t; ``rewards`` (B,); ``prox_logp`` (B, T) where it was recomputed, index t for token t + 1.
        group_id: (B,) or None to group by identical prompt.

    ``versions`` is -1 at tokens that no engine drew. Inside a response (tool output) they take the version before them;
    the loss leaves them out.
    """
    held = {key: to_numpy(_fetched(value)) for key, value in trajectory.items() if key in _AREAL}
    proximal = held.get("prox_logp")
    yield from padded_rows(
        input_ids=held["input_ids"],
        attention_mask=held["attention_mask"],
        response_mask=held["loss_mask"],
        sampler_logprobs=held["logprobs"],
        sampler_version=_filled(np.asarray(held["versions"])),
        trainer_logprobs=None if proximal is None else np.asarray(proximal)[:, :-1],
        reward=held.get("rewards"),
        group_id=group_id,
    )


_AREAL = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "prox_logp", "rewards")


def _fetched(value: Any) -> Any:
    """Under AReaL's single controller a batch holds handles to tensors of other processes."""
    return value.to_local() if hasattr(value, "to_local") else value


def _filled(versions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """-1 takes the last version before it, (B, T)."""
    place = np.where(versions >= 0, np.arange(versions.shape[1]), 0)
    return np.take_along_axis(versions, np.maximum.accumulate(place, axis=1), axis=1)


def rows_from_skyrl(batch: Mapping[str, Any], sampler_version: Any) -> Iterator[Row]:
    """Rows of a SkyRL ``TrainingInputBatch``, as a ``TrainingCallback`` gets it in ``on_step_end``.

    Args:
        batch: ``sequences`` and ``attention_mask`` (B, S) left-padded; ``response_mask``, ``loss_mask``,
            ``rollout_logprobs``, ``action_log_probs`` and ``advantages`` (B, R), right-aligned; log-probs may be None.
        sampler_version: ``global_step - 1`` in a synchronous run: SkyRL counts the update it is making.

    SkyRL appends an end token with log-prob 0.0 where a generation stopped without one. A last token with exactly 0.0
    is therefore null.
    """
    response = np.asarray(to_numpy(batch["response_mask"])).astype(bool)
    sampled = batch.get("rollout_logprobs")
    if sampled is not None:
        sampled = np.array(to_numpy(sampled))
        rows = np.flatnonzero(response.any(axis=1))
        last = response.shape[1] - 1 - response[rows, ::-1].argmax(axis=1)
        made_up = sampled[rows, last] == 0.0
        sampled[rows[made_up], last[made_up]] = np.nan
    yield from padded_rows(
        input_ids=batch["sequences"],
        attention_mask=batch["attention_mask"],
        response_mask=response,
        loss_mask=batch["loss_mask"],
        sampler_logprobs=sampled,
        trainer_logprobs=batch.get("action_log_probs"),
        advantages=batch["advantages"],
        sampler_version=sampler_version,
    )
