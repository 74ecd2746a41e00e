"""Train with Ray Train on two workers, each with a share of every parameter (FSDP2).

pip install 'ray[train]'
python examples/trainers/ray_train.py
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # before ray.train is imported
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

import ray
import ray.train
import torch
import torch.distributed as dist
from counting import LR, STEPS, compare, loss_of, make_model, rows
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import mambakit as mk


def train(options: dict[str, Any]) -> None:
    """What each worker does. Ray has made the process group."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model: Any = make_model()
    for layer in model.backbone.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(mk.param_groups(model), lr=LR)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, rows(step, rank, world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
        ray.train.report({"loss": losses[-1]})
    if rank == 0:
        Path(options["losses"]).write_text(json.dumps(losses))


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        scaling = ray.train.ScalingConfig(num_workers=2, use_gpu=False)
        storage = ray.train.RunConfig(storage_path=folder, name="counting")
        losses = Path(folder, "losses.json")
        TorchTrainer(train, train_loop_config={"losses": str(losses)}, scaling_config=scaling, run_config=storage).fit()
        compare(json.loads(losses.read_text()))
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
