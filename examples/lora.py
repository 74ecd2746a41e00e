"""Fine-tune a small model with LoRA adapters of the `peft` package, merge them, and save the result.

The model has learned to count upwards. Adapters on its projections, a few percent of its parameters, teach it to count
downwards; the weights that it had stay as they were until the adapters are merged into them.

    pip install peft transformers
    python examples/lora.py
"""

import tempfile
from typing import cast

import peft
import torch

import mambakit as mk
from mambakit.compat.auto import MambakitForCausalLM

VOCAB, LENGTH, BATCH = 32, 24, 16


def counting(step: int) -> torch.Tensor:
    start_b = torch.randint(0, VOCAB, (BATCH, 1))
    return (start_b + step * torch.arange(LENGTH)) % VOCAB


def train(model: torch.nn.Module, step: int, steps: int) -> float:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        ids_bs = counting(step)
        optimizer.zero_grad()
        model(input_ids=ids_bs, labels=ids_bs).loss.backward()
        optimizer.step()
    return loss_of(model, step)


@torch.no_grad()
def loss_of(model: torch.nn.Module, step: int) -> float:
    ids_bs = counting(step)
    return model.eval()(input_ids=ids_bs, labels=ids_bs).loss.item()


def main() -> None:
    torch.manual_seed(0)
    block = mk.Mamba3Config(d_model=64, state_rank=16, per_head_dim=16)
    base = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=VOCAB))
    model = MambakitForCausalLM.wrap(base)
    print(f"counting upwards, all parameters:   loss {train(model, 1, 60):.3f}")

    # Every Linear of a block can have an adapter; see tests/test_lora.py for convolutions.
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["in_proj", "out_proj"])
    )
    trained, total = adapted.get_nb_trainable_parameters()
    print(f"adapters: {trained:,} of {total:,} parameters, {trained / total:.1%}")
    before = loss_of(adapted, -1)
    after = train(adapted, -1, 100)
    print(f"counting downwards, adapters only:  loss {before:.3f} before, {after:.3f} after")
    with adapted.disable_adapter():
        print(f"counting upwards, adapters off:     loss {loss_of(adapted, 1):.3f}")

    ids_bs = counting(-1)
    with torch.no_grad():
        want = adapted(input_ids=ids_bs).logits
        merged = cast(MambakitForCausalLM, adapted.merge_and_unload())
        difference = (merged(input_ids=ids_bs).logits - want).abs().max().item()
    print(f"merged: logits differ by {difference:.1e} at most")
    assert difference < 1e-3
    assert after < before / 2

    with tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(folder)
        tokens = mk.generate(mk.load_model(folder), [9, 8, 7], max_new_tokens=8, temperature=0)
    print(f"9 8 7 goes on: {' '.join(map(str, tokens[0].tolist()))}")


if __name__ == "__main__":
    main()
