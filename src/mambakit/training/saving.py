"""When checkpoints are written: at once, or by a thread while the run goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mambakit.training.loop import Trainer
from mambakit.training.run_checkpoints import RunCheckpoints


class Saving:
    """Writes a trainer's checkpoints. Every rank has one and calls its methods together with the others."""

    def __init__(self, trainer: Trainer, checkpoints: RunCheckpoints, aside: bool = False):
        self._trainer, self._checkpoints, self._aside = trainer, checkpoints, aside
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._step = 0

    def save(self) -> None:
        """The run as it stands. Written aside, it is on the disk after the next `save` or `wait`, which say if not.

        An OSError says what could not be done and which checkpoint is there.
        """
        self.wait()
        self._step = self._trainer.step
        write = self._work()
        if not self._aside:
            with on_failure(self._told(), self._checkpoints):
                write()
            return

        def work() -> None:
            try:
                write()
            except BaseException as error:  # told by `wait`
                self._problem = error

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread, problem, self._problem = None, self._problem, None
            with on_failure(self._told(), self._checkpoints):
                if problem is not None:
                    raise problem

    def _work(self) -> Callable[[], None]:
        trainer, checkpoints = self._trainer, self._checkpoints
        if trainer.ranks.world == 1:
            saved = trainer.saved(copied=self._aside)
            return lambda: checkpoints.save(saved)
        part = trainer.part(copied=self._aside)
        return lambda: checkpoints.save_part(part, trainer.ranks)

    def _told(self) -> str:
        return f"step {self._step} could not be saved in {self._checkpoints.folder}"


@contextmanager
def on_failure(told: str, checkpoints: RunCheckpoints) -> Iterator[None]:
    """Make an OSError say what could not be done and which checkpoint is there."""
    try:
        yield
    except OSError as error:
        known = checkpoints.steps()
        last = f"the last checkpoint is that of step {known[-1]}" if known else "there is no checkpoint yet"
        raise OSError(f"{told}: {error}; {last}") from error
