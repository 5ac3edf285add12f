"""Engine numerics, on what scans and weights leave unexplained: all checks in their order."""

from __future__ import annotations

from mismatch_probe.diagnosis import (
    numerics_growth,
    numerics_ids,
    numerics_levels,
    numerics_places,
    numerics_tails,
    numerics_trainer,
)
from mismatch_probe.diagnosis.catalogue import Page

PAGES = (
    Page(
        "MP302",
        "single tokens carry the error",
        "A kernel that is right nearly always is far off at some tokens: fused RoPE or bias kernels, a "
        "reduced-precision product, an overflow.",
        "Tokens whose change in log-odds is beyond 20 robust standard deviations and 1 nat, or a tail of its own "
        "beside tokens that are close. Means of ratios are of these tokens alone; median and tail are told side by "
        "side.",
        "The same tokens, scored again by the same program, that are close.",
        "Score the named tokens again with one fused kernel switched off at a time. Until then cap token ratios, and "
        "judge by medians.",
        ("NVIDIA-NeMo/RL#1801",),
    ),
    Page(
        "MP303",
        "few sequences carry the error",
        "Some responses, often all that share a prompt, are wrong as a whole while the others are fine.",
        "Responses whose median change in log-odds and mean |D| are five times those of the others, a third of all at "
        "most, that carry a fifth of the gap or more.",
        "The same prompts, sampled and scored again, that are as close as the others.",
        "Mask these sequences by their own mean |D|; the threshold and what it drops are in the finding. Then score "
        "one of them with another parallel layout: expert parallelism was at fault in the report.",
        ("NVIDIA-NeMo/RL#2100", "NVIDIA-NeMo/RL#4243"),
    ),
    Page(
        "MP308",
        "numerics grow over the run",
        "The engine's error rises from step to step while the lag does not, as quantised engines do when weights move "
        "away from what their scales were made for.",
        "The log of rms D, in log-odds at equal confidence, rises over the steps beyond what groups and steps scatter, "
        "and so does the median. No verdict rests on a mean of chi-square, which single steps decide.",
        "The first step's tokens, scored by the last step's engine, with the last step's error.",
        "Compare with a run in bfloat16; make quantisation scales anew after each weight update, or use a block "
        "format.",
        ("verl-project/verl#7519",),
    ),
    Page(
        "MP311",
        "isolated tokens, as experts routed otherwise give them",
        "A mixture of experts sends some tokens to other experts in the engine than in the trainer.",
        "The model has experts, and a few percent of the tokens form a tail of their own, at any probability, while "
        "the others are close: heavier than a normal distribution of the same variance.",
        "Routed experts that are the same on both sides at the tokens in the tail.",
        "Replay the engine's routing in the trainer, or leave out tokens with |d| above ln 2.",
        ("PrimeIntellect-ai/prime-rl#2808", "areal-project/AReaL#1207", "NVIDIA/Megatron-LM#4168"),
    ),
    Page(
        "MP312",
        "each token id has its own bias",
        "The output head differs between the two programs, or a bias acts on logits of one side: a stale or untied "
        "head, a logit bias.",
        "Mean D of an id in one half of the prompt groups predicts that in the other half, and ids hold a sixth of the "
        "variance of D or more.",
        "Ids whose mean D changes sign between the halves.",
        "Compare lm_head and embedding of both programs tensor by tensor; see whether the config ties them.",
        ("PrimeIntellect-ai/prime-rl#2438", "vllm-project/vllm#51665"),
    ),
    *numerics_places.PAGES,
    *numerics_trainer.PAGES,
    *numerics_levels.PAGES,
)
CHECKS = (
    *numerics_trainer.CHECKS,
    *numerics_places.CHECKS,
    *numerics_tails.CHECKS[:1],
    *numerics_ids.CHECKS,
    *numerics_tails.CHECKS[1:],
    *numerics_growth.CHECKS,
    *numerics_levels.CHECKS,
)
"""The trainer's own log-probs; places, sequences, ids and tokens that stand out; then growth and level of the rest."""
