"""What one training step on a million tokens takes from each of 64 ranks: bytes, FLOPs, memory. No device is needed.

python -m benchmarks.parallel_arithmetic
python -m benchmarks.parallel_arithmetic --family mamba2 --ranks 64 --tokens 1048576

Everything is counted from the blocks' own records: parameters of a rank's share of the heads, what its caches hold, and
matrix products. Weights are bfloat16 in calls and gathered for them, states of AdamW float32, layers computed again in
the backward pass, where each keeps its input.
"""

import argparse
from math import prod
from typing import Any, NamedTuple

import mambakit as mk
from mambakit.blocks.family import FAMILIES, family_of
from mambakit.ops.team import Team
from mambakit.tools.benchmark import module_flops

WIDTH, LAYERS, VOCABULARY = 4096, 48, 131_072
NARROW, WIDE = 2, 4
"""Bytes of a number."""
GIGA = 1e9


class Cost(NamedTuple):
    context: int
    tensor: int
    tokens: int
    """Of a rank."""
    flops: float
    boundary: float
    """Bytes that a rank tells the others in a forward pass, in all layers."""
    received: float
    """Bytes of the others' that it gets: an all-gather gives everyone everything."""
    keys: float
    """What it would get of keys and values, if the blocks were attention of the same width."""
    sums: float
    """Bytes of outputs that are summed over the ranks that share heads, in a forward pass."""
    gathered: float
    """Bytes of weights that a rank gets in a forward pass under FSDP2."""
    weights: float
    """Bytes of memory: parameters, gradients, two momenta."""
    inputs: float
    """Bytes of memory: each layer's input."""


def cost(config: Any, tokens: int, context: int, tensor: int) -> Cost:
    """Of one row, which `context` groups of ranks share; each group has `tensor` shares of the heads."""
    plan = family_of(config).shares
    assert plan is not None
    local = plan(config, Team(None, 0, tensor)).config
    block = family_of(local).block(local, device="meta")
    own = tokens // context
    words = VOCABULARY * config.d_model // tensor
    parameters = LAYERS * (sum(p.numel() for p in block.parameters()) + config.d_model) + words
    # A forward, the same again for layers, and twice as much going back.
    flops = 4 * LAYERS * module_flops(block, own) + 3 * 2 * own * words
    return Cost(
        *(context, tensor, own, flops),
        boundary=LAYERS * WIDE * sent(block) if context > 1 else 0,
        received=LAYERS * WIDE * sent(block) * (context - 1),
        keys=LAYERS * NARROW * 2 * own * config.d_model / tensor * (context - 1),
        sums=(LAYERS + 1) * NARROW * own * config.d_model if tensor > 1 else 0,
        gathered=NARROW * parameters * (context - 1) / context,
        weights=4 * WIDE * parameters / context,
        inputs=LAYERS * WIDE * own * config.d_model,
    )


def sent(block: Any) -> int:
    """Numbers that a block's share of a row tells the others: what a cache holds, and how much is left of the state."""
    config, kept = block.config, sum(prod(shape) for shape in block.cache_shapes(1).values())
    decays = {"mamba1": lambda: config.d_inner * config.state_rank, "mamba2": lambda: config.nheads}
    # Mamba-3's first token has a weight for the one before it.
    return kept + decays.get(family_of(block).name, lambda: 2 * config.nheads)()


def table(config: Any, ranks: int, tokens: int) -> str:
    lines = [
        "| context x tensor | tokens | TFLOPs | boundary: sent, MB | received, GB | (keys and values, GB) | sums, GB "
        "| gathered, GB | weights and AdamW, GB | layers' inputs, GB |",
        "| --- " * 10 + "|",
    ]
    for tensor in (1, 2, 4, 8):
        if ranks % tensor == 0:
            one = cost(config, tokens, ranks // tensor, tensor)
            lines.append(
                f"| {one.context} x {tensor} | {one.tokens:,} | {one.flops / 1e12:,.0f} | {one.boundary / 1e6:,.0f} "
                f"| {one.received / GIGA:.1f} | {one.keys / GIGA:,.0f} | {one.sums / GIGA:.1f} "
                f"| {one.gathered / GIGA:.1f} | {one.weights / GIGA:.1f} | {one.inputs / GIGA:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("mamba1", "mamba2", "mamba3"), default="mamba3")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2**20)
    args = parser.parse_args()
    config = FAMILIES[args.family].config(d_model=WIDTH)
    model = mk.LanguageModel(mk.ModelConfig(block=config, n_layer=1, vocab_size=256), device="meta")
    layer = sum(p.numel() for p in model.backbone.layers.parameters())
    title = FAMILIES[args.family].title
    print(f"{title}: {LAYERS} layers of width {WIDTH}, {(LAYERS * layer + VOCABULARY * WIDTH) / 1e9:.1f}B parameters")
    print(table(config, args.ranks, args.tokens))


if __name__ == "__main__":
    main()
