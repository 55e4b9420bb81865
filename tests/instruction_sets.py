"""Which instruction sets the vector loops are compiled for, and which of them run here."""

from __future__ import annotations

import platform
from pathlib import Path

FLAGS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"),
}


def runs_here(name: str) -> bool:
    if name == "portable":
        return True
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    words = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return all(flag.removeprefix("-m") in words for flag in FLAGS[name])
