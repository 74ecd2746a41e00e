"""scikit-learn's 8 by 8 digits read pixel by pixel, 64 tokens each: a classifier and a bidirectional autoencoder."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from mambakit.blocks.mamba3 import Mamba3Config
from mambakit.models.bidirectional import BidirectionalConfig, BidirectionalStack
from mambakit.models.latent_model import LatentConfig, LatentModel
from mambakit.optional import need
from mambakit.tools.experiments.fitting import one_thread

SIDE, PIXELS, CLASSES, CODE = 8, 64, 10, 16
CHANNELS = 1 + 2 * SIDE
FILES = ("results.json", "classifier.png", "autoencoder.png")
Tell = Callable[[str, int, int, float], None]
"""`tell(what, step, steps, loss)`"""


@dataclass(frozen=True, kw_only=True)
class DigitsRecipe:
    classifier_epochs: int = 20
    autoencoder_epochs: int = 30
    seed: int = 0
    d_model: int = 32
    state_rank: int = 16
    batch: int = 32
    learning_rate: float = 1e-2

    @property
    def block(self) -> Mamba3Config:
        return Mamba3Config(d_model=self.d_model, state_rank=self.state_rank, per_head_dim=self.d_model)


def recipe(quick: bool, epochs: int | None, seed: int) -> DigitsRecipe:
    made = DigitsRecipe(seed=seed)
    if quick:
        made = replace(made, classifier_epochs=6, autoencoder_epochs=6)
    if epochs is not None:
        if epochs < 1:
            raise ValueError(f"epochs = {epochs} has to be positive")
        made = replace(made, classifier_epochs=epochs, autoencoder_epochs=epochs)
    return made


class Digits(NamedTuple):
    train_bs: Tensor
    train_b: Tensor
    test_bs: Tensor
    test_b: Tensor


def load() -> Digits:
    """Pixels from 0 to 1 and labels; every fifth of a shuffle that never changes is held out."""
    found = need("the digits", "sklearn.datasets").load_digits()
    images_bs = torch.tensor(found.data, dtype=torch.float32) / 16
    labels_b = torch.tensor(found.target, dtype=torch.int64)
    order_b = torch.randperm(len(labels_b), generator=torch.Generator().manual_seed(2**40))
    held_out_b = torch.arange(len(order_b)) % 5 == 0
    train, test = order_b[~held_out_b], order_b[held_out_b]
    return Digits(images_bs[train], labels_b[train], images_bs[test], labels_b[test])


def tokens(image_bs: Tensor) -> Tensor:
    """Each pixel with its row and column, one-hot: `CHANNELS` numbers."""
    place_s = torch.arange(PIXELS)
    row_sX, column_sX = F.one_hot(place_s // SIDE, SIDE), F.one_hot(place_s % SIDE, SIDE)
    place_bsX = torch.cat([row_sX, column_sX], 1).to(image_bs.dtype).expand(len(image_bs), -1, -1)
    return torch.cat([image_bs[..., None], place_bsX], -1)


class Classifier(nn.Module):
    """Reads a digit once, from the upper left to the lower right; the mean of what it says on the way is its answer."""

    def __init__(self, recipe: DigitsRecipe):
        super().__init__()
        self.model = LatentModel(LatentConfig(block=recipe.block, n_layer=2, d_input=CHANNELS, d_output=CLASSES))

    def forward(self, image_bs: Tensor) -> Tensor:
        return self.model(tokens(image_bs))[0].mean(1)


class Autoencoder(nn.Module):
    """64 pixels, read in both directions, to `CODE` numbers, and from these to 64 pixels."""

    def __init__(self, recipe: DigitsRecipe):
        super().__init__()
        d = recipe.d_model
        self.pixel = nn.Linear(CHANNELS, d)
        both_ways = BidirectionalConfig(block=recipe.block, n_layer=2, merge="cat_linear")
        self.encoder = BidirectionalStack(both_ways)
        self.code = nn.Linear(d, CODE)
        self.spread = nn.Linear(CODE, d)
        self.place_sd = nn.Parameter(torch.randn(PIXELS, d))
        self.decoder = BidirectionalStack(both_ways)
        self.paint = nn.Linear(d, 1)

    def encode(self, image_bs: Tensor) -> Tensor:
        x_bsd, _ = self.encoder(self.pixel(tokens(image_bs)))
        return self.code(x_bsd.mean(1))

    def forward(self, image_bs: Tensor) -> Tensor:
        """Logits of the pixels."""
        x_bsd, _ = self.decoder(self.spread(self.encode(image_bs))[:, None] * self.place_sd)
        return self.paint(x_bsd)[..., 0]


def run(out: Path, recipe: DigitsRecipe, tell: Tell) -> dict[str, Any]:
    """Train both, write `FILES` into the folder, and return what `results.json` holds."""
    digits = load()
    with one_thread():
        results = {"recipe": asdict(recipe), "torch": torch.__version__}
        results["classifier"] = run_classifier(out, digits, recipe, tell)
        results["autoencoder"] = run_autoencoder(out, digits, recipe, tell)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return results


def run_classifier(out: Path, digits: Digits, recipe: DigitsRecipe, tell: Tell) -> dict[str, Any]:
    torch.manual_seed(recipe.seed)
    model = Classifier(recipe)

    def loss(index_b: Tensor) -> Tensor:
        return F.cross_entropy(model(digits.train_bs[index_b]), digits.train_b[index_b])

    seconds = fit(model, loss, len(digits.train_b), recipe.classifier_epochs, recipe, "classifier", tell)
    with torch.no_grad():
        said_b = model(digits.test_bs).argmax(-1)
    wrong = (said_b != digits.test_b).nonzero()[:, 0].tolist()
    shown = (wrong + [i for i in range(len(said_b)) if i not in wrong])[:20]
    captions = [f"{said_b[i]}" + (f", is {digits.test_b[i]}" if i in wrong else "") for i in shown]
    draw(out / "classifier.png", [digits.test_bs[shown[:10]], digits.test_bs[shown[10:]]], captions)
    accuracy = 100 * (1 - len(wrong) / len(said_b))
    return {"accuracy": round(accuracy, 2), "held_out": len(said_b), "wrong": len(wrong), "cpu_seconds": seconds}


def run_autoencoder(out: Path, digits: Digits, recipe: DigitsRecipe, tell: Tell) -> dict[str, Any]:
    torch.manual_seed(recipe.seed)
    model = Autoencoder(recipe)

    def loss(index_b: Tensor) -> Tensor:
        images_bs = digits.train_bs[index_b]
        return F.binary_cross_entropy_with_logits(model(images_bs), images_bs)

    seconds = fit(model, loss, len(digits.train_b), recipe.autoencoder_epochs, recipe, "autoencoder", tell)
    with torch.no_grad():
        painted_bs = model(digits.test_bs).sigmoid()
    linear_bs = principal_components(digits, CODE)
    shown = [int((digits.test_b == digit).nonzero()[0, 0]) for digit in range(CLASSES)]
    draw(out / "autoencoder.png", [digits.test_bs[shown], painted_bs[shown], linear_bs[shown]], [])
    return {
        "numbers_per_digit": CODE,
        "error": error(painted_bs, digits),
        "error_of_principal_components": error(linear_bs, digits),
        "error_of_mean_digit": error(digits.train_bs.mean(0).expand_as(digits.test_bs), digits),
        "cpu_seconds": seconds,
    }


def fit(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    count: int,
    epochs: int,
    recipe: DigitsRecipe,
    what: str,
    tell: Tell,
) -> float:
    """Returns the CPU seconds it took."""
    started = time.process_time()
    steps = epochs * -(-count // recipe.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1)
    for step, index_b in enumerate(batches(count, recipe.batch, epochs), 1):
        loss = loss_of(index_b)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tell(what, step, steps, loss.item())
    return round(time.process_time() - started, 1)


def batches(count: int, size: int, epochs: int) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(count).split(size)


def principal_components(digits: Digits, count: int) -> Tensor:
    """The held-out digits from as many numbers as the code has: the best that a linear map and back can do."""
    mean_s = digits.train_bs.mean(0)
    basis_ns = torch.linalg.svd(digits.train_bs - mean_s, full_matrices=False).Vh[:count]
    return (digits.test_bs - mean_s) @ basis_ns.T @ basis_ns + mean_s


def error(image_bs: Tensor, digits: Digits) -> float:
    """Root of the mean square over all pixels, which go from 0 to 1."""
    return round((image_bs - digits.test_bs).square().mean().sqrt().item(), 4)


def draw(path: Path, rows: list[Tensor], captions: list[str]) -> None:
    """Rows of digits, with what to write above each."""
    columns = max(len(row_bs) for row_bs in rows)
    size = (0.8 * columns, (1.0 if captions else 0.8) * len(rows))
    figure = need("their pictures", "matplotlib.figure").Figure(figsize=size, layout="constrained")
    number = 0
    for r, row_bs in enumerate(rows):
        for c, image_s in enumerate(row_bs):
            axes = figure.add_subplot(len(rows), columns, r * columns + c + 1)
            axes.imshow(image_s.view(SIDE, SIDE).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set_axis_off()
            if captions:
                axes.set_title(captions[number], fontsize=8)
            number += 1
    figure.savefig(path, dpi=130)


def table(results: dict[str, Any]) -> Any:
    made = Table(title="Digits, pixel by pixel")
    for title in ("model", "measured on held-out digits", ""):
        made.add_column(title)
    c, a = results["classifier"], results["autoencoder"]
    right = c["held_out"] - c["wrong"]
    made.add_row("classifier", "accuracy", f"{c['accuracy']:.1f} % ({right} of {c['held_out']})")
    made.add_row("", "CPU minutes", f"{c['cpu_seconds'] / 60:.1f}", end_section=True)
    made.add_row(f"autoencoder, {a['numbers_per_digit']} numbers", "RMS error of a pixel", f"{a['error']:.3f}")
    made.add_row("", "principal components, as many", f"{a['error_of_principal_components']:.3f}")
    made.add_row("", "the mean digit", f"{a['error_of_mean_digit']:.3f}")
    made.add_row("", "CPU minutes", f"{a['cpu_seconds'] / 60:.1f}")
    return made
