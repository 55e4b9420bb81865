"""Import check: the compiled extension must speak the same nanobind ABI as mlx.core."""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires

import mlx.core as mx


def check_extension() -> None:
    """Raise ``ImportError`` naming both versions and the fix when arrays cannot cross."""
    try:
        from . import _ext
    except ImportError as error:
        raise ImportError(
            f"exactspec's extension does not load with mlx {mx.__version__} ({error}); "
            f"{_fix(_pinned_mlx())}"
        ) from error
    try:
        _ext.sample(
            mx.zeros((1,)),
            (1.0, 0.0, 1.0, 0.0, 0),
            0,
            mx.zeros((2,)),
            None,
            None,
            None,
            0,
            mx.cpu,
        )
    except TypeError as error:
        raise ImportError(
            f"exactspec was built against mlx {_ext.MLX_VERSION} with nanobind "
            f"{_ext.NANOBIND_VERSION} and cannot exchange arrays with mlx {mx.__version__}; "
            f"{_fix(_ext.MLX_VERSION)}"
        ) from error


def _fix(wanted: str | None) -> str:
    """What to run: the mlx that the extension was built for, or, where it is there, a new build."""
    if wanted is None or wanted == mx.__version__:
        return (
            "build exactspec anew, in its checkout: pip install --no-cache-dir --force-reinstall ."
        )
    package = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    return f'install the mlx it was built for: pip install "{package}=={wanted}"'


def _pinned_mlx() -> str | None:
    """The version of mlx in exactspec's requirements."""
    try:
        requirements = requires("exactspec") or []
    except PackageNotFoundError:
        return None
    pins = (re.match(r"mlx(?:\[\w+\])?==([\w.]+)", line) for line in requirements)
    return next((pin[1] for pin in pins if pin), None)
