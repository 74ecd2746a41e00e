"""One thread that steps an engine; everything else hands it requests and is told of tokens."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

LOG = logging.getLogger("mambakit.serving")


class NotBegunError(RuntimeError):
    """A request ended before the engine took it."""


class News(NamedTuple):
    """What has come since the last news of an answer."""

    tokens: list[int]
    logprobs: list[Any]
    done: bool


class Answer:
    """A request on its way, seen from the event loop: an iterator over its news.

    `request` is the engine's, once it has taken it. What went wrong is raised from the iterator.
    """

    def __init__(self, worker: "Worker", loop: asyncio.AbstractEventLoop):
        self._worker, self._loop = worker, loop
        self._news: asyncio.Queue[News | BaseException] = asyncio.Queue()
        self._seen = 0
        self.taken: asyncio.Future[None] = loop.create_future()
        """Done when the engine has taken it; what it refuses it for is raised from here too."""
        self.request: Any = None
        self.ended = False
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[News]:
        while True:
            news = await self._news.get()
            if isinstance(news, BaseException):
                raise news
            yield news
            if news.done:
                return

    def cancel(self) -> None:
        """No more tokens; the iterator ends with the news that it is done."""
        self.cancelled = True
        self._worker.wake()

    # What follows is called by the worker's thread.

    def take(self, request: Any) -> None:
        self.request = request
        self._call(self._settle, None)

    def tell(self) -> None:
        request = self.request
        done = request.done
        new = list(request.tokens[self._seen :])
        logprobs = list((request.logprobs or [])[self._seen : self._seen + len(new)])
        self._seen += len(new)
        if not self.ended:
            self._put(request.error if done and request.error is not None else News(new, logprobs, done))
        self.ended = self.ended or done

    def fail(self, error: BaseException) -> None:
        if not self.ended:
            self.ended = True
            self._call(self._settle, error)
            self._put(error)

    def _put(self, news: News | BaseException) -> None:
        self._call(self._news.put_nowait, news)

    def _settle(self, error: BaseException | None) -> None:
        if self.taken.done():
            return
        if error is None:
            self.taken.set_result(None)
        else:
            self.taken.set_exception(error)
            self.taken.exception()  # it need not be asked for: the news say it too

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.cancelled = True


class Worker:
    """Requests into `engine`, tokens out of it. `start` and `stop` are called once each.

    All calls of the engine are made by the worker's own thread, so that the event loop never waits for a step.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self._inbox: deque[tuple[Answer, Sequence[int], dict[str, Any]]] = deque()
        self._jobs: deque[Iterator[None]] = deque()
        self._answers: set[Answer] = set()
        self._told: dict[Answer, None] = {}
        self._awake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mambakit-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is left and end the thread."""
        with self._awake:
            self._stopping = True
            self._awake.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Requests of which nothing has been read yet."""
        return len(self._inbox) + len(self._jobs) + self.engine.waiting

    @property
    def active(self) -> int:
        return self.engine.active

    def submit(self, ids: Sequence[int], **options: Any) -> Answer:
        """To be called from the event loop; `options` are `Engine.add`'s."""
        answer = Answer(self, asyncio.get_running_loop())
        self._inbox.append((answer, ids, options))
        self.wake()
        return answer

    async def work(self, steps: Iterator[Any]) -> Any:
        """The last thing that `steps` gives; the engine's thread takes one at a time between its own."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(set: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set(value)

        def run() -> Iterator[None]:
            last = None
            try:
                for last in steps:  # noqa: B007
                    if future.cancelled():
                        return
                    yield
            except Exception as error:
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, last)

        self._jobs.append(run())
        self.wake()
        return await future

    def wake(self) -> None:
        with self._awake:
            self._awake.notify()

    def _run(self) -> None:
        while not self._stopping:
            busy = self._take()
            self._cancel()
            try:
                busy = self.engine.step() or busy
            except Exception as error:
                LOG.exception("a step of the engine failed")
                for answer in self._answers:
                    answer.fail(error)
                    answer.request.cancel()
                self._answers.clear()
                self._told.clear()
            self._tell()
            busy = self._advance() or busy
            if not busy:
                with self._awake:
                    idle = not (self._inbox or self._jobs or any(one.cancelled for one in self._answers))
                    if idle and not self._stopping:
                        self._awake.wait(timeout=1.0)
        for answer in list(self._answers):
            answer.cancelled = True
        for answer, _, _ in self._inbox:
            answer.fail(NotBegunError("the server is stopping"))
        self._cancel()
        self.engine.step()
        self._tell()

    def _take(self) -> bool:
        taken = False
        while self._inbox:
            answer, ids, options = self._inbox.popleft()
            taken = True
            if answer.cancelled:
                answer.fail(NotBegunError("cancelled before it began"))
                continue
            try:
                answer.take(self.engine.add(ids, on_token=self._note(answer), **options))
            except Exception as error:
                answer.fail(error)
            else:
                self._answers.add(answer)
        return taken

    def _note(self, answer: Answer) -> Callable[[Any], None]:
        def note(request: Any) -> None:
            self._told[answer] = None

        return note

    def _cancel(self) -> None:
        for answer in list(self._answers):
            if answer.cancelled and not answer.request.done:
                answer.request.cancel()
                self._told[answer] = None

    def _tell(self) -> None:
        told, self._told = self._told, {}
        for answer in told:
            answer.tell()
            if answer.request.done:
                self._answers.discard(answer)

    def _advance(self) -> bool:
        if not self._jobs:
            return False
        job = self._jobs.popleft()
        for _ in job:
            self._jobs.append(job)
            break
        return True
