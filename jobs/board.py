"""How far training workers are, seen from the driver: an actor they write to, and what turns it into progress lines.

`ray.train.report` is no way for this: a report waits until the controller has taken the one before.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from jobs.config import Config
from jobs.progress import Progress, clock, say

T = TypeVar("T")


class Board:
    """Where workers write their news and the driver reads them; see `post`."""

    def __init__(self) -> None:
        self._news: dict[str, dict[str, Any]] = {}

    def tell(self, name: str, news: dict[str, Any]) -> None:
        """Take a run's latest news."""
        self._news.setdefault(name, {}).update(news)

    def read(self) -> dict[str, dict[str, Any]]:
        """The latest news of every run."""
        return self._news


def post() -> Any:
    """Start the actor that workers tell their progress to."""
    import ray

    return ray.remote(num_cpus=0)(Board).remote()


def watch(action: Callable[[], T], show: Callable[[], None]) -> T:
    """Run `action` in a thread and call `show` twice a second until it ends; returns or raises what it does.

    Ray Train and Tune take over Ctrl-C when they run in the main thread; here it stays ours and ends the stage.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def act() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=act, daemon=True, name="fit")
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        if thread.is_alive():
            show()
    if failure:
        raise failure[0]
    return outcome[0]


def latest(board: Any) -> dict[str, dict[str, Any]]:
    """What the board says now; empty while its process starts or is too busy to answer."""
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(board.read.remote(), timeout=1)
    except GetTimeoutError:
        return {}


class Teller:
    """Turns the board's news into the progress line, and says once how long the run will take."""

    def __init__(self, progress: Progress, board: Any, config: Config) -> None:
        self._progress, self._board, self._config = progress, board, config
        self._began: tuple[float, int] | None = None
        self._said = False

    def show(self) -> None:
        news = next(iter(latest(self._board).values()), {})
        done, total = news.get("step", 0), news.get("total")
        if total:
            if self._progress.total is None:  # a new clock: starting up says nothing about how long steps take
                self._progress = Progress("train", total)
            note = f"loss {news['loss']:.3f}  {news['tokens_per_s']:,.0f} tokens/s"
            self._progress.update(done, "  ".join(filter(None, [note, news.get("phase", "")])))
            self._estimate(done, total)
        else:
            self._progress.update(0, news.get("phase") or "starting workers")

    def _estimate(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = (now, done)
        elif not self._said and done >= self._began[1] + 2:
            self._said = True
            seconds = (now - self._began[0]) / (done - self._began[1]) * (total - done)
            hours = seconds * self._config.train.num_workers / 3600
            say("train", f"about {clock(seconds)} more for {total - done} steps ({hours:.2f} device-hours)")
