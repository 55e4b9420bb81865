"""Which BLAS library MLX multiplies matrices with on the CPU."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    ]


def blas_in_use() -> str:
    """Name the BLAS library that MLX calls in this process.

    Returns:
        ``"Accelerate"`` on macOS; elsewhere the library's name, version if it is OpenBLAS, and
        path, such as ``"OpenBLAS 0.3.34 (/.../libscipy_openblas.so)"`` or
        ``"reference BLAS (/.../libblas.so.3)"``. A library that became global only after MLX was
        imported is named although MLX does not call it.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    # Like the dynamic linker for MLX: first what is global in the process, then MLX's own.
    scope = ctypes.CDLL(None)
    if not hasattr(scope, "cblas_sgemm"):
        scope = ctypes.CDLL(mx.__file__)
    return _describe(_file_of(ctypes.cast(scope.cblas_sgemm, ctypes.c_void_p)))


def _describe(path: str) -> str:
    library = ctypes.CDLL(path)
    if hasattr(library, "exactspec_sgemm"):
        # The forwarder of exactspec_openblas: name the library behind it.
        return _describe(_file_of(ctypes.c_void_p.in_dll(library, "exactspec_sgemm")))
    for symbol in ("openblas_get_config", "scipy_openblas_get_config"):
        if hasattr(library, symbol):
            get_config = library[symbol]
            get_config.restype = ctypes.c_char_p
            # The configuration starts with the name and the version.
            return f"{' '.join(get_config().decode().split()[:2])} ({path})"
    # Netlib's own name; vendors' libraries have others.
    return f"reference BLAS ({path})" if Path(path).name.startswith("libblas") else path


def _file_of(address: ctypes.c_void_p) -> str:
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    return str(Path(info.file.decode()).resolve())
