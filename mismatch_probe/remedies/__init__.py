"""Losses that correct the training-inference mismatch, for a trainer to import; they need torch and numpy only."""

from mismatch_probe.remedies.batch import Batch, sequence_index
from mismatch_probe.remedies.centring import Centre, SampledCentre, TopKCentre
from mismatch_probe.remedies.clipping import cispo_loss, gspo_loss, ppo_clip_loss, ppo_coupled_loss, ppo_decoupled_loss
from mismatch_probe.remedies.corrections import (
    geometric_mask_loss,
    reinforce_loss,
    sequence_is_loss,
    sequence_mask_loss,
    token_mask_loss,
    token_tis_loss,
)
from mismatch_probe.remedies.dlc import dlc_loss, score_centring_loss
from mismatch_probe.remedies.full_centre import FullCentre
from mismatch_probe.remedies.logprobs import token_and_head_logprobs, token_logprobs
from mismatch_probe.remedies.ratios import RatioClip
from mismatch_probe.remedies.resync import Reading, ResyncMonitor

CORRECTIONS = {
    "none": reinforce_loss,
    "token_tis": token_tis_loss,
    "token_mask": token_mask_loss,
    "sequence_is": sequence_is_loss,
    "sequence_mask": sequence_mask_loss,
    "geometric_mask": geometric_mask_loss,
    "ppo_clip": ppo_clip_loss,
    "ppo_coupled": ppo_coupled_loss,
    "ppo_decoupled": ppo_decoupled_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "score_centring": score_centring_loss,
    "dlc": dlc_loss,
}
"""Every correction by name; each is called with (logprobs, batch) and takes ``reduction``."""

__all__ = [
    "CORRECTIONS",
    "Batch",
    "Centre",
    "FullCentre",
    "RatioClip",
    "Reading",
    "ResyncMonitor",
    "SampledCentre",
    "TopKCentre",
    "cispo_loss",
    "dlc_loss",
    "geometric_mask_loss",
    "gspo_loss",
    "ppo_clip_loss",
    "ppo_coupled_loss",
    "ppo_decoupled_loss",
    "reinforce_loss",
    "score_centring_loss",
    "sequence_index",
    "sequence_is_loss",
    "sequence_mask_loss",
    "token_and_head_logprobs",
    "token_logprobs",
    "token_mask_loss",
    "token_tis_loss",
]
