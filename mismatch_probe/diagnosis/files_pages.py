"""Pages of faults of checkpoints, and of weights that no checkpoint shows."""

from __future__ import annotations

from mismatch_probe.diagnosis.catalogue import Page

PAGES = (
    Page(
        "MP205",
        "no known version fits, from the first step on",
        "The weights in the engine are none that the run holds, before any training: a converter or loader made "
        "something else of them, or they were lost.",
        "A large gap at the first step that no version, head, temperature or shift explains and that behaves as the "
        "log-ratio of two distributions; or a sampler's checkpoint that differs from the trainer's of that version.",
        "Engine and trainer that agree on one prompt when both load the same checkpoint from disk.",
        "Export one checkpoint, load it in the engine and compare tensors by name with `mismatch-probe compare`: look "
        "for fused projections in another order (gate and up, q, k and v), transposed or missing tensors, scales.",
        ("vllm-project/vime#274", "verl-project/verl#3461"),
    ),
    Page(
        "MP206",
        "no version fits, from some step on",
        "The first weights reached the engine well; what an update loads into it is none that the run holds.",
        "Steps before fit the claimed version, from one step on no version, head, temperature or shift does; or the "
        "sampler's checkpoints differ from the trainer's from some version on.",
        "An older version that fits these steps (MP202), or a head that does (MP203).",
        "Compare the engine's tensors after the first update with the checkpoint: an engine that changes the layout of "
        "weights when it starts may be handed the checkpoint's layout later. Read its warnings about weights.",
        ("NovaSky-AI/SkyRL#1680", "NovaSky-AI/SkyRL#1737", "vllm-project/vllm#42821"),
    ),
    Page(
        "MP208",
        "the sampler's checkpoints are identical to each other",
        "What is saved for the sampler does not change though the trainer's weights do.",
        "Log-probs under all of the sampler's checkpoints are the same numbers, and so are hashes of their tensors, "
        "while the trainer's differ.",
        "A tensor that differs between the sampler's first and last checkpoint.",
        "See what the saver writes: with adapters it may save the base model instead of the merged one.",
        ("NovaSky-AI/SkyRL#1776",),
    ),
    Page(
        "MP209",
        "rounding erases the update",
        "Updates are smaller than the grid of the dtype in which the sampler's weights are saved, so that most of them "
        "are lost.",
        "The sampler's weights equal the trainer's rounded, and less of the trainer's movement of log-probs is in them "
        "than should be.",
        "A share of the movement that arrives of 1 within its interval.",
        "Send adapters instead of merged weights, or merge and save in float32.",
        ("NVIDIA-NeMo/RL#3696",),
    ),
    Page(
        "MP210",
        "the tied output head",
        "Config and file say different things of the output head: it is tied but in the file too, or it was not "
        "exported with the rest. A head that is absent and tied is in order.",
        "Names in the file, the config's tie_word_embeddings, and the head's values against the embedding and those of "
        "the first version.",
        "A head in the file that equals the embedding, or a config that does not tie them.",
        "Export the head with every version, or leave it out of files whose config ties it.",
        ("NVIDIA-NeMo/Megatron-Bridge#4883", "vllm-project/vllm#51665"),
    ),
    Page(
        "MP211",
        "configs differ",
        "Trainer and sampler have the same tensors and another config, so they compute two networks.",
        "Tensors are identical, log-probs are not, and fields of config.json differ. For rope fields the difference "
        "grows with position.",
        "Log-probs that still differ when both use one config.",
        "Use one config.json on both sides.",
        ("PrimeIntellect-ai/prime-rl#2802", "vllm-project/vllm#27722"),
    ),
)
