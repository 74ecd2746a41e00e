"""Train with Lightning Fabric on two processes: shares of parameters (FSDP2), or of heads (tensor parallelism).

pip install lightning-fabric
python examples/trainers/fabric.py
python examples/trainers/fabric.py --tensor-parallel 2
"""

import argparse
from typing import Any, cast

import torch
from counting import LR, STEPS, compare, loss_of, make_model, rows
from lightning_fabric import Fabric
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import mambakit as mk


def parallelize(model: Any, mesh: Any) -> Any:
    """The plan: heads first, then a share of what each process has of every layer."""
    if mesh["tensor_parallel"].size() > 1:
        mk.parallel.tensor_parallel(model, mesh["tensor_parallel"])
    if mesh["data_parallel"].size() > 1:
        for layer in model.backbone.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    args = parser.parse_args()
    data = args.processes // args.tensor_parallel
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=data, tensor_parallel_size=args.tensor_parallel)
    fabric = Fabric(accelerator="cpu", devices=args.processes, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_model())
    optimizer = cast(Any, fabric.setup_optimizers(torch.optim.AdamW(mk.param_groups(model), lr=LR)))
    losses = []
    for step in range(STEPS):
        # Processes that share heads have the same rows.
        loss = loss_of(model, rows(step, fabric.global_rank // args.tensor_parallel, data))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))  # type: ignore[arg-type]
    if fabric.global_rank == 0:
        compare(losses)


if __name__ == "__main__":
    main()
