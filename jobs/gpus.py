"""GPUs by name or size, and the one in this machine."""

import re
import subprocess
from dataclasses import dataclass

from jobs.errors import UserError

GIB = 2**30
# GiB that a process sees as the card's total (torch.cuda.mem_get_info): a little under the name's size.
TOTALS = {
    "T4": 14.58,
    "V100-16GB": 15.77,
    "V100-32GB": 31.74,
    "RTX 3090": 23.57,
    "RTX 4080": 15.60,
    "RTX 4090": 23.52,
    "RTX 5090": 31.36,
    "RTX A6000": 47.53,
    "RTX 6000 Ada": 47.38,
    "A10": 22.06,
    "L4": 21.95,
    "L40S": 44.39,
    "A100-40GB": 39.39,
    "A100-80GB": 79.15,
    "H100": 79.18,
    "H100 NVL": 93.10,
    "GH200": 94.50,
    "H200": 139.80,
    "B200": 178.35,
}
COMMON = ("T4", "L4", "RTX 4090", "RTX 5090", "A100-40GB", "L40S", "A100-80GB", "H100", "H200", "B200")


@dataclass(frozen=True)
class Gpu:
    """A card: its name and the bytes that a process sees as its total."""

    name: str
    total: float


def find(text: str) -> Gpu:
    """A card by name (`rtx4090`, `H100`) or size (`24`, `24GB` are 10^9 bytes, `24GiB` is binary).

    Raises UserError listing the names.
    """
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(g|gb|gib)?\s*", text.lower())
    if size and 0 < float(size[1]) <= 1000:  # 4090 is a name
        unit = GIB if size[2] == "gib" else 1e9
        return Gpu(f"a card of {size[1]} {'GiB' if unit == GIB else 'GB'}", float(size[1]) * unit)
    wanted = _plain(text)
    names = {_plain(name): name for name in TOTALS}
    hits = [name for plain, name in names.items() if plain == wanted]
    if wanted and not hits:
        hits = [n for p, n in names.items() if p.startswith(wanted) or p.endswith(wanted) or wanted.endswith(p)]
    if not hits:
        raise UserError(f"--gpu {text!r}: not a size like 24GB and none of {', '.join(TOTALS)}")
    if len(hits) > 1:
        raise UserError(f"--gpu {text!r} could be {', '.join(hits)}: name one of them")
    return Gpu(hits[0], TOTALS[hits[0]] * GIB)


def detected() -> Gpu | None:
    """The first GPU of this machine as nvidia-smi tells it; None without one."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.reserved", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        name, total, reserved = done.stdout.strip().splitlines()[0].rsplit(",", 2)
        return Gpu(name.strip(), (float(total) - float(reserved)) * 2**20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|gb$", "", name.lower())
