"""The import check names both versions and the fix when arrays cannot cross."""

from __future__ import annotations

import mlx.core as mx
import pytest
from exactspec import _compat, _ext


def test_another_abi_is_an_import_error(monkeypatch):
    def rejected(*_):
        raise TypeError("sample(): incompatible function arguments")

    monkeypatch.setattr(_ext, "sample", rejected)
    with pytest.raises(ImportError) as error:
        _compat.check_extension()
    message = str(error.value)
    assert f"mlx {_ext.MLX_VERSION} with nanobind {_ext.NANOBIND_VERSION}" in message
    assert f"mlx {mx.__version__}" in message and "pip install" in message


def test_this_one_fits():
    _compat.check_extension()
    assert _ext.MLX_VERSION == mx.__version__
