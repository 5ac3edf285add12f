"""Train a tiny model with a TRL trainer for a few steps; keep what it trained on and what came out.

python -m tests.trl_dlc_run RECIPE.py FOLDER

One file a case, in FOLDER: ``plain``, TRL's own loss on-policy; ``dlc``, the recipe on-policy; ``lag``, six steps a
generation; ``discrepancy``, sampler log-probs that differ from the trainer's, some of them missing, and two
batches an update.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import save_model
from tests.trl_run import EOS, PAD, tokenizer

STEPS = 6
CASES = ("plain", "dlc", "lag", "discrepancy")


def train(trainer_class: type[GRPOTrainer], folder: Path, case: str) -> None:
    base = GRPOTrainer if case == "plain" else trainer_class
    seen: list[dict[str, torch.Tensor]] = []
    drawn: list[int] = []

    class Recorded(base):
        def _generate_and_score_completions(self, inputs):
            drawn.append(self.state.global_step)
            made = super()._generate_and_score_completions(inputs)
            if case == "discrepancy":
                noise = torch.randn(made["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(1))
                made["sampling_per_token_logps"] = made["old_per_token_logps"] - noise
                made["sampling_per_token_logps"][:, 0] = torch.nan
            return made

        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            kept = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
            seen.append({"loss": loss.detach(), **kept})
            return loss

    save_model(folder / "base", "llama", pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    arguments = GRPOConfig(
        output_dir=str(folder / case),
        per_device_train_batch_size=8,
        steps_per_generation=1 if case in ("plain", "dlc") else STEPS,
        gradient_accumulation_steps=2 if case == "discrepancy" else 1,
        num_generations=4,
        max_completion_length=7,
        learning_rate=3e-2 if case == "lag" else 3e-3,
        loss_type="bnpo",
        max_steps=STEPS // 2 if case == "discrepancy" else STEPS,
        logging_steps=1,
        save_strategy="no",
        use_vllm=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(sum(map(len, text.split()))) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6 w7"}, {"prompt": "w9"}] * 48),
        processing_class=tokenizer(),
    )
    trainer.train()
    weights = torch.cat([each.detach().reshape(-1) for each in trainer.model.parameters()])
    logs = [entry["ess_lag"] for entry in trainer.state.log_history if "ess_lag" in entry]
    torch.save({"seen": seen, "drawn": drawn, "weights": weights, "ess": logs}, folder / f"{case}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = runpy.run_path(sys.argv[1])["DLCTrainer"]
    for name in CASES:
        train(made, Path(sys.argv[2]), name)
