"""Import check: the compiled extension must speak the same nanobind ABI as mlx.core."""

import mlx.core as mx


def check_extension() -> None:
    """Raise ``ImportError`` naming both versions and the fix when arrays cannot cross."""
    fix = (
        "reinstall exactspec with the mlx you use: "
        "pip install --no-cache-dir --force-reinstall exactspec"
    )
    try:
        from . import _ext
    except ImportError as error:
        raise ImportError(
            f"exactspec's extension does not load with mlx {mx.__version__} ({error}); {fix}"
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
            f"{_ext.NANOBIND_VERSION} and cannot exchange arrays with mlx {mx.__version__}; {fix}"
        ) from error
