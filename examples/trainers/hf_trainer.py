"""Train with the Trainer of transformers on two processes, each with a share of every parameter (FSDP2 of Accelerate).

pip install transformers accelerate
torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py
"""

import tempfile
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from counting import BATCH, LR, STEPS, compare, make_model, rows
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

import mambakit as mk
from mambakit.compat.auto import MambakitForCausalLM


class Counting(torch.utils.data.Dataset):
    """The rows of all steps."""

    def __init__(self) -> None:
        self.rows = torch.cat([rows(step) for step in range(STEPS)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class InOrder(Trainer):
    """On the CPU, Accelerate has to be told that FSDP2 works there too; with GPUs `fsdp=True` does all of this."""

    losses: list[float]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
            cpu_ram_efficient_loading=False,
        )
        state = cast(Any, self.accelerator.state)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True

    def _get_train_sampler(self, *given: Any, **named: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def create_optimizer(self, *given: Any, **named: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(mk.param_groups(self.model), lr=LR)  # type: ignore[arg-type]
        return self.optimizer

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*given, **named)
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        self.losses.append(mean.item())
        return loss


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model = MambakitForCausalLM.wrap(make_model())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH // world,
            max_steps=STEPS,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InOrder(model, arguments, train_dataset=Counting())  # type: ignore[arg-type]
        trainer.losses = []
        trainer.train()
    assert any(isinstance(p, DTensor) for p in trainer.model.parameters()), "nothing was shared"  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        compare(trainer.losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
