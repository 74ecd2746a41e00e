"""The pictures of docs/gallery.md, measured and drawn on the spot.

python -m benchmarks.pictures            all, into docs/pictures
python -m benchmarks.pictures --out DIR
python -m benchmarks.pictures --drawn    those that nothing is measured for
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import mambakit as mk
from benchmarks.measure import interleaved, median, write_json
from mambakit.cli import why_mamba

BLOCK = mk.Mamba2Config(d_model=768)
LAYERS, VOCABULARY, PROMPT, NEW = 6, 50_288, 1024, 16
ROOMS = (
    ("cli   serving", "verbs and HTTP"),
    ("training   inference   tools", "loops over a model: train it, many requests through it, look at it"),
    ("checkpoints   text   parallel", "formats as data; tokens, documents, chat templates; several ranks"),
    ("models", "stacks of layers; a layer is a list of blocks, each  x += block(norm(x))"),
    ("blocks", "mamba1  mamba2  mamba3  attention  mlp  moe  parallel: one file each, one record each"),
    ("ops", "one operation per file: contract, plain form, derivative"),
    ("kernels", "cpu (C++): implementations of operations, nothing else knows them"),
)


def speed() -> dict[str, dict[str, float]]:
    """Tokens per second of one model in two libraries."""
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=768, num_heads=24, head_dim=64, n_groups=1, num_hidden_layers=LAYERS
    )
    theirs: Any = transformers.Mamba2ForCausalLM(config).eval()
    ours = mk.LanguageModel(mk.ModelConfig(block=BLOCK, n_layer=LAYERS, vocab_size=VOCABULARY))
    int8 = mk.quantize(ours, bits=8)
    prompt_1s, short_1s = torch.randint(VOCABULARY, (1, PROMPT)), torch.randint(VOCABULARY, (1, 8))
    short_8s = short_1s.expand(8, -1)

    def write(ids_bs: torch.Tensor) -> Any:
        return theirs.generate(ids_bs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)

    def wrote(model: mk.LanguageModel, ids_bs: torch.Tensor) -> Any:
        return mk.generate(model, ids_bs, max_new_tokens=NEW, temperature=0)

    with torch.no_grad():
        times = interleaved(
            {
                ("read a prompt", "transformers"): lambda: theirs(prompt_1s, logits_to_keep=1),
                ("read a prompt", "mambakit"): lambda: mk.generate(ours, prompt_1s, max_new_tokens=1),
                ("write, one text", "transformers"): lambda: write(short_1s),
                ("write, one text", "mambakit"): lambda: wrote(ours, short_1s),
                ("write, one text", "mambakit, 8 bits"): lambda: wrote(int8, short_1s),
                ("write, eight texts", "transformers"): lambda: write(short_8s),
                ("write, eight texts", "mambakit"): lambda: wrote(ours, short_8s),
                ("write, eight texts", "mambakit, 8 bits"): lambda: wrote(int8, short_8s),
            },
            5,
            seconds=20,
        )
    tokens = {"read a prompt": PROMPT, "write, one text": NEW, "write, eight texts": 8 * NEW}
    found: dict[str, dict[str, float]] = {}
    for (what, library), seconds in times.items():
        found.setdefault(what, {})[library] = tokens[what] / median(seconds)
    return found


def draw_speed(found: dict[str, dict[str, float]], path: Path) -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    figure.suptitle(f"a Mamba-2 of {LAYERS} layers of 768 on {torch.get_num_threads()} cores, tokens per second")
    colors = {"transformers": "#aaaaaa", "mambakit": "tab:blue", "mambakit, 8 bits": "tab:green"}
    for axes, (what, rates) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        bars = axes.bar(list(rates), list(rates.values()), color=[colors[name] for name in rates])
        axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates.values()])
        axes.set_title(what)
        axes.tick_params(axis="x", labelsize=8)
        axes.margins(y=0.15)
    figure.savefig(path, dpi=110)


def draw_architecture(path: Path) -> None:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(0, 10), ylim=(-0.2, len(ROOMS)))
    for floor, (name, says) in enumerate(reversed(ROOMS)):
        room = FancyBboxPatch(
            (0.1, floor + 0.1), 9.8, 0.7, boxstyle="round,pad=0.05", facecolor="#e8f1f2", edgecolor="#5b8a8f"
        )
        axes.add_patch(room)
        axes.text(0.35, floor + 0.45, name, va="center", fontsize=12, fontweight="bold")
        axes.text(9.65, floor + 0.45, says, va="center", ha="right", fontsize=9)
        if floor:
            axes.annotate("", (5, floor - 0.12), (5, floor + 0.05), arrowprops={"arrowstyle": "->", "color": "#5b8a8f"})
    figure.savefig(path, dpi=110)


def draw_boundary(path: Path) -> None:
    """What crosses from one share of a sequence to the next; see docs/parallel.md."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(0, 12), ylim=(0, 5.6))

    def box(x: float, y: float, width: float, height: float, says: str, color: str) -> None:
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.05", fc=color, ec="#5b8a8f"))
        axes.text(x + width / 2, y + height / 2, says, ha="center", va="center", fontsize=9)

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#5b8a8f"})

    for rank in range(3):
        x = 0.2 + 4 * rank
        box(x, 4.5, 3.6, 0.8, f"rank {rank}\nits tokens of the sequence", "#e8f1f2")
        arrow((x + 1.8, 4.42), (x + 1.8, 3.98))
        arrow((x + 1.8, 2.82), (x + 1.8, 2.38))
        box(x, 1.5, 3.6, 0.8, "follow all shares from the\nfirst to the last", "#f7efe2")
        arrow((x + 1.8, 1.42), (x + 1.8, 0.98))
        box(x, 0.1, 3.6, 0.8, f"scan, from the state\nthat enters rank {rank}", "#e8f1f2")
    told = "state written, total decay, rotation, last token; as many bytes for a thousand tokens as for a million"
    box(0.2, 2.9, 11.6, 1.0, f"one all-gather per layer: what a share does to whatever enters it\n{told}", "#dde8d8")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", action="store_true", help="only those that nothing is measured for")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    draw_architecture(args.out / "architecture.png")
    draw_boundary(args.out / "boundary.png")
    if args.drawn:
        return
    block = mk.Mamba3Config(d_model=256, state_rank=64)
    mamba = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=6, vocab_size=257))
    ours, other = why_mamba.measure([mamba, why_mamba.transformer_like(mamba)])
    print(why_mamba.table(ours, other))
    why_mamba.draw(ours, other, args.out / "memory_over_length.png")
    rates = speed()
    for what, found in rates.items():
        print(what + ": " + ", ".join(f"{library} {rate:,.0f} tokens/s" for library, rate in found.items()))
    draw_speed(rates, args.out / "speed.png")
    print(write_json("pictures", {"speed": rates, "by_length": [[*map(tuple, one)] for one in (ours, other)]}))


if __name__ == "__main__":
    main()
