"""Writes checkpoints with torch's own sharding on four forked ranks (gloo): ``python -m tests.write_sharded OUT``.

In OUT, for each kind of head: ``{head}/model`` whole, ``{head}/fsdp`` and ``{head}/hsdp`` as verl's workers save them
(``torch.save`` of the sharded state dict of fully_shard, over one mesh dimension and over 2 x 2), ``{head}/grid``
(tensors split over both dimensions), ``{head}/dcp`` (with an optimizer beside the model) and ``{head}/parts``
(HuggingFaceStorageWriter without consolidation).
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM

from tests.tiny import save_model

WORLD = 4
HEADS = {"untied": False, "tied": True}


def save_ranks(folder: Path, state: dict[str, torch.Tensor], rank: int, config: Path) -> None:
    (folder / "huggingface").mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
    if rank == 0:
        shutil.copy(config, folder / "huggingface")


def sharded_model(source: Path, mesh) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work(rank: int, out: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=WORLD)
    line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    for head, tied in HEADS.items():
        folder, config = out / head, out / head / "model" / "config.json"
        model = sharded_model(out / head / "model", line)
        save_ranks(folder / "fsdp", model.state_dict(), rank, config)
        optimizer = torch.optim.AdamW(model.parameters())
        model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
        optimizer.step()
        model.load_state_dict(
            torch.load(folder / "fsdp" / f"model_world_size_{WORLD}_rank_{rank}.pt", weights_only=False)
        )
        moments = {str(index): moment["exp_avg"] for index, moment in enumerate(optimizer.state.values())}
        dcp.save({"app": {"model": model.state_dict(), "optimizers": moments, "step": 3}}, checkpoint_id=folder / "dcp")
        writer = HuggingFaceStorageWriter(path=str(folder / "parts"), save_distributed=True)
        dcp.save(
            {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")},
            storage_writer=writer,
        )
        save_ranks(folder / "hsdp", sharded_model(out / head / "model", square).state_dict(), rank, config)
        whole = AutoModelForCausalLM.from_pretrained(out / head / "model").state_dict()
        grid = {
            name: distribute_tensor(value, square, [Shard(0) if value.ndim > 1 else Replicate(), Shard(value.ndim - 1)])
            for name, value in whole.items()
        }
        save_ranks(folder / "grid", grid, rank, config)
        if rank == 0:
            shutil.copy(config, folder / "dcp")
    dist.destroy_process_group()


def main() -> None:
    out = Path(sys.argv[1])
    for head, tied in HEADS.items():
        save_model(out / head / "model", "llama", tied=tied)
    start_processes(work, (out,), WORLD, start_method="fork")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
