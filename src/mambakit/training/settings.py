"""What a run depends on, apart from the model and the text."""

import math
from dataclasses import dataclass

from mambakit.blocks.config import Config, check_positive, check_types

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd", "constant")
BOUNDARIES = ("reset", "carry")
PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings(Config):
    """A checkpoint resumes only under the settings it was made with, except those in `FREE`."""

    steps: int
    batch: int = 8
    """Rows of a step, over all ranks."""
    seq_len: int = 512
    """Tokens of a row that gradients reach back through. The state goes on to the row's next tokens."""
    segment_len: int | None = None
    """Keep the activations of this many tokens at a time and compute them again going back; None keeps all."""
    accumulate: int = 1
    """Parts in which each rank goes through its rows, one after the other."""
    boundaries: str = "reset"
    """What happens to the state where a document ends: `"reset"` or `"carry"`."""
    optimizer: str = "adamw"
    lr: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    schedule: str = "cosine"
    warmup: int = 100
    """Steps in which the learning rate rises."""
    decay: float = 0.2
    """Share of the steps, at the end, in which `"wsd"` falls."""
    floor: float = 0.1
    """Where the learning rate ends, as a share of its peak."""
    balance: float = 0.01
    """Share of the loss that keeps experts in use, in models that have some."""
    autocast: str | None = None
    seed: int = 0
    evaluate_every: int = 250
    evaluate_bytes: int = 200_000
    """Held-out text read by each evaluation but the last, which reads all."""
    save_every: int = 250
    skip_bad_steps: int = 0
    """Steps of the run that may be passed over because loss or gradients are no finite numbers."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "steps", "batch", "seq_len", "accumulate", "lr", "clip", "evaluate_every", "save_every")
        check_positive(self, "evaluate_bytes")
        if self.segment_len is not None:
            check_positive(self, "segment_len")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("boundaries", BOUNDARIES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose from {', '.join(known)}")
        if self.autocast not in (None, "bfloat16"):
            raise ValueError(f"autocast = {self.autocast!r} is unknown; choose bfloat16 or None")
        for name in ("lr", "weight_decay", "balance"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)} has to be a finite number")
        if min(self.warmup, self.weight_decay, self.skip_bad_steps, self.balance) < 0:
            raise ValueError("warmup, weight_decay, skip_bad_steps and balance have to be 0 or more")
        if not 0 <= self.floor <= 1 or not 0 <= self.decay <= 1:
            raise ValueError("floor and decay are shares between 0 and 1")
        if self.batch % self.accumulate:
            raise ValueError(f"batch = {self.batch} rows cannot be gone through in {self.accumulate} equal parts")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len


FREE = {"steps", "evaluate_every", "evaluate_bytes", "save_every", "accumulate", "segment_len", "skip_bad_steps"}
"""Settings that may change from one part of a run to the next: they leave what is computed as it is, up to rounding.

Of `steps` that holds where the schedule is constant; others are those of the new number from there on."""
