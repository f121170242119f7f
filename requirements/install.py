"""Make .venv from the lock file of this machine: `make setup`. Costs nothing when the stamp says that it is done.

A machine where nvidia-smi works takes gpu.lock, any other cpu.lock. Needs only Python's standard library.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from jobs.progress import Progress, clock, say  # noqa: E402

VENV = PROJECT / ".venv"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
# Compiling all 27,000 files takes longer than the rest: `_first_import` writes the bytecode of those in use.
INSTALL = ["install", "--no-deps", "--no-compile", "--progress-bar=off", "--disable-pip-version-check", "--no-input"]
# What the stages import. Importing it here shows that the set fits together before anything is started, and once
# instead of in every process of the first run at the same time.
IMPORTS = (
    "vllm.entrypoints.openai.api_server, vllm.v1.engine.core, openai, aiohttp",
    "ray.train.torch, ray.tune, ray.serve, ray.data, transformers, transformers.models.llama.modeling_llama, peft, "
    "bitsandbytes, accelerate, matplotlib.pyplot",
)
LANES = 3  # pip works on one package at a time; the lock needs no resolving, so several pips can share it


def has_gpu() -> bool:
    """Whether NVIDIA's driver answers here."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def install(lock: Path) -> None:
    """Create or complete the environment; SystemExit with one message when that fails."""
    stamp = VENV / "installed"
    wanted = f"{hashlib.sha256(lock.read_bytes()).hexdigest()} {sys.version_info.major}.{sys.version_info.minor}"
    python = VENV / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return
    started = time.monotonic()
    if not python.exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True)
        if made.returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit(f"error: {VENV}: could not be made: {(made.stdout + made.stderr).strip()[:500]}")
    packages = [line for line in lock.read_text().split("\n") if line and not line.startswith("#")]
    say("setup", f"{lock.name}: {len(packages)} packages into .venv (Python {wanted.split()[1]})")
    # The CPU build of torch has an index of its own. Where that cannot be reached pip goes on without: few retries.
    torch = [line for line in packages if line.startswith("torch==") and "+cpu" in line]
    rest = [line for line in packages if line not in torch]
    commands = [[*INSTALL, "--retries", "1", "--extra-index-url", CPU_WHEELS, *torch]] if torch else []
    commands += [[*INSTALL, *rest[lane::LANES]] for lane in range(LANES)]
    logs = [VENV / f"install-{number}.log" for number in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with open(log, "wb") as output:
                line = [str(python), "-m", "pip", *command]
                running.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
        with Progress("setup", 2 * len(packages), unit=" steps") as progress:
            while any(process.poll() is None for process in running):
                said = b"".join(log.read_bytes() for log in logs)
                found = said.count(b"\nCollecting ") + said.count(b"\nRequirement already satisfied")
                placed = len(list(VENV.glob("lib/python*/site-packages/*.dist-info")))
                progress.update(found + min(placed, found), f"{found} found, {placed} installed")
                time.sleep(0.3)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    for process, log in zip(running, logs, strict=True):
        if process.returncode:
            said = log.read_text(errors="replace").strip().splitlines()
            lines = [line for line in said if line.startswith("ERROR")] or said[-3:]
            sys.exit(
                f"error: pip failed ({log}): {' '.join(lines)}\nRun `make setup` again: what is there already stays"
            )
    if missing := _differing(python, packages):
        sys.exit(
            f"error: .venv differs from {lock.name} in {', '.join(missing[:10])}: delete .venv and run `make setup`"
        )
    _first_import(python)
    stamp.write_text(wanted)
    say("setup", f"done in {clock(time.monotonic() - started)}")


def _first_import(python: Path) -> None:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "PYTHONDONTWRITEBYTECODE": ""}
    running = [
        subprocess.Popen([str(python), "-c", f"import {names}"], env=environment, stderr=subprocess.PIPE, text=True)
        for names in IMPORTS
    ]
    with Progress("setup") as progress:
        while any(process.poll() is None for process in running):
            progress.update(0, "first import of what was installed")
            time.sleep(0.3)
    for process in running:
        said = process.communicate()[1].strip().splitlines()
        if process.returncode:
            sys.exit(f"error: what was installed does not import: {said[-1] if said else process.returncode}")


def _differing(python: Path, packages: list[str]) -> list[str]:
    code = (
        "import importlib.metadata as m, sys\n"
        "have = {d.name.lower().replace('_', '-').replace('.', '-'): d.version for d in m.distributions()}\n"
        "print(*[p for p in sys.argv[1:] if have.get(p.split('==')[0]) != p.split('==')[1]], sep='\\n')"
    )
    found = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True, check=True)
    return found.stdout.split()


if __name__ == "__main__":
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        sys.exit(f"error: Python {sys.version.split()[0]}: needs 3.11 or 3.12, for example `make PYTHON=python3.11`")
    os.environ.pop("PYTHONPATH", None)
    try:
        install(PROJECT / "requirements" / ("gpu.lock" if has_gpu() else "cpu.lock"))
    except KeyboardInterrupt:
        sys.exit(130)
