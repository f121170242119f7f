"""The command line every stage shares: parse, run, and turn errors into one message and an exit status.

Heavy libraries are imported by the stage after parsing, so `--help` answers at once. Exit status: 0 done,
1 a user's mistake (one message, no traceback), 130 stopped by Ctrl-C or SIGTERM.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError


def main(stage: str, run: Callable[[Config], Any], doc: str | None, argv: Sequence[str] | None = None) -> None:
    """Parse `--config FILE [key=value ...]` for `python -m jobs.<stage>` and run it; never returns."""
    parser = argparse.ArgumentParser(
        prog=f"python -m jobs.{stage}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML config; without one the defaults hold")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override, for example run.name=mine")
    args = parser.parse_args(argv)
    guard(lambda: run(config_module.load(args.config, args.overrides)))


def guard(action: Callable[[], Any]) -> None:
    """Run `action` and exit with the status that the module's docstring lists."""
    signal.signal(signal.SIGTERM, _as_interrupt)  # `ray job stop` sends SIGTERM: clean up as for Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background jobs start with SIGINT ignored
    status = 0
    try:
        action()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 130
    sys.stdout.flush()
    sys.stderr.flush()
    if status and "ray" in sys.modules:
        _leave_ray()
    sys.exit(status)


def offline(config: Config) -> None:
    """Keep libraries off the model hub unless the config names a hub id. Call before importing transformers."""
    from_hub = (
        "/" in config.model.source and not os.path.exists(config.model.source) and "://" not in config.model.source
    )
    if not from_hub:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _as_interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave_ray() -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()
