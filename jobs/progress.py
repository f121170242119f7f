"""A line that moves: how far a stage is, how fast, and how long it will take.

On a terminal the line rewrites itself; in a job's log a new line comes every two seconds at most.
"""

import sys
import time


class Progress:
    """Progress of `total` steps (None: unknown) in a named stage. Use as a context manager."""

    def __init__(self, stage: str, total: float | None = None, *, unit: str = "") -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self._live = sys.stdout.isatty()
        self._start = time.monotonic()
        self._shown = self._start if not self._live else 0.0  # in a log, silent for the first two seconds
        self._open = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            print(flush=True)

    def update(self, done: float, note: str = "") -> None:
        """Show that `done` of the total is finished; `note` follows, for example the loss and tokens/s."""
        now = time.monotonic()
        last = self.total is not None and done >= self.total
        if now - self._shown < (0.2 if self._live else 2.0) and not (last and self._open):
            return
        self._shown = now
        spent = now - self._start
        parts = [f"[{self.stage}]"]
        if self.total:
            share = min(1.0, done / self.total)
            bar = "#" * round(20 * share)
            parts.append(f"[{bar:<20}] {done:g}/{self.total:g}{self.unit}")
            if done:
                parts.append(f"{clock(spent * (self.total - done) / done)} left")
        else:
            parts.append(f"{done:g}{self.unit}" if done else "")
            parts.append(clock(spent))
        line = "  ".join(p for p in [*parts, note] if p)
        if self._live:
            print(f"\r\x1b[K{line}", end="", flush=True)
            self._open = True
        else:
            print(line, flush=True)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def say(stage: str, text: str) -> None:
    """One plain line of a stage."""
    print(f"[{stage}] {text}", flush=True)
