"""Puts OpenBLAS in front of the reference BLAS that MLX's Linux wheels carry.

A module of its own because it must run before ``mlx.core``, which ``exactspec`` imports.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys


def use_openblas() -> None:
    """Make MLX multiply matrices on the CPU with OpenBLAS, from the package scipy-openblas32.

    With the reference BLAS a forward pass over several tokens costs nearly that many passes over
    one, and drafting cannot pay. Does nothing where MLX uses another BLAS: on systems other than
    Linux, or when a BLAS is already in front (``LD_PRELOAD``).

    OpenBLAS runs on one thread unless the environment sets ``OPENBLAS_NUM_THREADS``: its further
    threads spin between calls, which slows a machine that has other work to do.

    Raises:
        RuntimeError: ``mlx.core`` is already imported, so its BLAS is already bound.
        FileNotFoundError: scipy-openblas32 is not installed.
    """
    if sys.platform != "linux" or hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return
    if "mlx.core" in sys.modules:
        raise RuntimeError("[use_openblas] expected a call before mlx.core is imported")
    openblas = ctypes.CDLL(_installed_file("scipy-openblas32", "libscipy_openblas.so"))
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        openblas.scipy_openblas_set_num_threads(1)
    forward = ctypes.CDLL(_installed_file("exactspec", "libblas_forward.so"), ctypes.RTLD_GLOBAL)
    for function in ("sgemm", "dgemm", "cgemm"):
        address = ctypes.cast(openblas[f"scipy_cblas_{function}"], ctypes.c_void_p)
        ctypes.c_void_p.in_dll(forward, f"exactspec_{function}").value = address.value


def main() -> None:
    """Run the ``exactspec`` command, with OpenBLAS where MLX has only the reference BLAS."""
    # A standard stream that is closed leaves its number to the next file that is opened, such as
    # the weights, which MLX does not read from number 0.
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    try:
        use_openblas()
        from exactspec.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # as the command ends with it
    except (ImportError, OSError) as error:
        # Without the package that would print it.
        if sys.argv[1:2] == ["doctor"]:
            for name, value in _versions().items():
                print(f"{name:17}{value}")
            print(f"FAILED import: {_one_line(error)}")
        else:
            print("error:", _one_line(error), file=sys.stderr)
        sys.exit(1)
    run()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _versions() -> dict[str, str]:
    """What is known of this installation without importing any of it."""
    versions = {}
    for name in ("exactspec", "mlx", "mlx-lm", "scipy-openblas32"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {**versions, "python": platform.python_version(), "system": platform.platform()}


def _installed_file(distribution: str, name: str) -> str:
    """Path of a file of an installed distribution, found without importing anything of it."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name:
            return str(file.locate())
    raise FileNotFoundError(
        f"[use_openblas] {name} is not installed: run `pip install {distribution}`"
    )
