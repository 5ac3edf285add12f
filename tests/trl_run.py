"""Run TRL's GRPO for a few steps on a tiny model with the hook of docs/frameworks.md; keep what TRL trained on.

python tests/trl_run.py HOOK.py OUTPUT_DIR STEPS_PER_GENERATION
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from tests.tiny import VOCAB, save_model

PAD, EOS = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "</s>": EOS, "<unk>": 2} | {f"w{at}": at for at in range(3, VOCAB)}
    model = Tokenizer(WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def main(hook: str, output: str, steps_per_generation: int) -> None:
    torch.set_num_threads(1)
    logged = runpy.run_path(hook)["LoggedGRPOTrainer"]
    trained = []

    class Recorded(logged):
        def compute_loss(self, model, inputs, *args, **kwargs):
            kept = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
            trained.append({"step": self.state.global_step, **kept})
            return super().compute_loss(model, inputs, *args, **kwargs)

    base = Path(output).parent / "base"
    save_model(base, "llama", pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    arguments = GRPOConfig(
        output_dir=output,
        per_device_train_batch_size=8,
        steps_per_generation=steps_per_generation,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=7,
        temperature=0.8,
        learning_rate=3e-2,
        max_steps=2,
        save_steps=1,
        use_vllm=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(sum(map(len, text.split()))) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6 w7"}, {"prompt": "w9"}] * 16),
        processing_class=tokenizer(),
    )
    trainer.train()
    torch.save(trained, Path(output).parent / "trained.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
