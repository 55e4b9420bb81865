"""The import check names both versions and a fix, and the command says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import pytest
from exactspec import _compat, _ext

# The package that carries MLX's CPU build.
PACKAGE = "mlx[cpu]" if sys.platform == "linux" else "mlx"


def rejected(*_):
    raise TypeError("sample(): incompatible function arguments")


def test_another_abi_is_an_import_error(monkeypatch):
    monkeypatch.setattr(_ext, "sample", rejected)
    monkeypatch.setattr(mx, "__version__", "0.29.1")
    with pytest.raises(ImportError) as error:
        _compat.check_extension()
    assert str(error.value) == (
        f"exactspec was built against mlx {_ext.MLX_VERSION} with nanobind "
        f"{_ext.NANOBIND_VERSION} and cannot exchange arrays with mlx 0.29.1; install the mlx it "
        f'was built for: pip install "{PACKAGE}=={_ext.MLX_VERSION}"'
    )


def test_another_build_of_the_same_mlx_asks_for_a_new_build(monkeypatch):
    monkeypatch.setattr(_ext, "sample", rejected)
    with pytest.raises(ImportError, match="in its checkout: pip install .* --force-reinstall \\.$"):
        _compat.check_extension()


def test_an_extension_that_does_not_load_names_the_pinned_mlx(monkeypatch):
    monkeypatch.setitem(sys.modules, "exactspec._ext", None)
    monkeypatch.delattr("exactspec._ext")
    monkeypatch.setattr(mx, "__version__", "0.29.1")
    with pytest.raises(ImportError, match="does not load with mlx 0.29.1 ") as error:
        _compat.check_extension()
    assert str(error.value).endswith(f'pip install "{PACKAGE}=={_ext.MLX_VERSION}"')


def test_this_one_fits():
    _compat.check_extension()
    assert _ext.MLX_VERSION == mx.__version__


# A stand-in for another version of MLX, whose arrays the extension does not know.
OTHER_MLX = """
__version__ = "0.29.1"
cpu = 0
def zeros(shape):
    return object()
"""


def run_command(*arguments, mlx_core, folder):
    package = folder / "mlx"
    package.mkdir()
    (package / "core.py").write_text(mlx_core)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    code = "import exactspec_openblas; exactspec_openblas.main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "mlx_core, message",
    [
        (OTHER_MLX, f'pip install "{PACKAGE}=={_ext.MLX_VERSION}"'),
        ("raise ImportError('no symbol\\nin a library')", "no symbol in a library"),
    ],
)
def test_the_command_says_in_one_line_what_does_not_fit(mlx_core, message, tmp_path):
    run = run_command("generate", "x", mlx_core=mlx_core, folder=tmp_path)
    assert (run.returncode, run.stdout) == (1, "")
    [line] = run.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith(message)


def test_doctor_says_what_it_can(tmp_path):
    run = run_command("doctor", mlx_core=OTHER_MLX, folder=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")
    *versions, failed = run.stdout.splitlines()
    names = [line.split()[0] for line in versions]
    assert names == ["exactspec", "mlx", "mlx-lm", "scipy-openblas32", "python", "system"]
    assert failed.startswith("FAILED import: exactspec ") and "mlx 0.29.1" in failed
    assert failed.endswith(f'pip install "{PACKAGE}=={_ext.MLX_VERSION}"')
