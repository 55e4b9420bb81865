"""Which BLAS MLX calls, and putting OpenBLAS in front of the reference BLAS on Linux."""

import importlib.metadata
import os
import subprocess
import sys

import exactspec_openblas
import pytest
from exactspec import blas

# MLX binds its BLAS once per process, so each case runs in a fresh one.
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems' MLX does not use the reference BLAS"
)

USE_OPENBLAS = "import exactspec_openblas; exactspec_openblas.use_openblas()\n"
PRINT_BLAS = "from exactspec.blas import blas_in_use; print(blas_in_use())\n"
PRINT_NUM_THREADS = (
    "import ctypes; print(ctypes.CDLL(exactspec_openblas._installed_file("
    "'scipy-openblas32', 'libscipy_openblas.so')).scipy_openblas_get_num_threads())\n"
)
MULTIPLY = """
import mlx.core as mx, numpy as np
rng = np.random.default_rng(0)
for name in ("float32", "float64", "complex64"):
    a, b = (rng.standard_normal(s) + 1j * rng.standard_normal(s) for s in ((7, 33), (33, 5)))
    if name != "complex64":
        a, b = a.real, b.real
    x, y = (mx.array(z, dtype=getattr(mx, name)) for z in (a, b))
    with mx.stream(mx.cpu):
        # The second product reads both factors transposed.
        products = np.array(x @ y), np.array(y.T @ x.T).T
    for product in products:
        np.testing.assert_allclose(product, a @ b, rtol=0, atol=2e-5)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("LD_PRELOAD", "OPENBLAS_NUM_THREADS")
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def output(code: str, **environment: str) -> str:
    result = run(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@linux_only
def test_importing_the_package_leaves_the_blas_alone():
    assert output("import exactspec\n" + PRINT_BLAS).startswith("reference BLAS (/")


@linux_only
def test_use_openblas_puts_openblas_in_front():
    # A second call is harmless.
    name = output(USE_OPENBLAS + USE_OPENBLAS + PRINT_BLAS)
    assert name.startswith("OpenBLAS 0.3.") and name.endswith("libscipy_openblas.so)")


@linux_only
def test_products_are_right_through_openblas():
    # 2e-5: twice the largest error seen in 200 draws.
    output(USE_OPENBLAS + MULTIPLY)


@linux_only
def test_a_preloaded_blas_stays_in_front():
    reference = output(PRINT_BLAS).removeprefix("reference BLAS (").removesuffix(")")
    name = output(USE_OPENBLAS + PRINT_BLAS, LD_PRELOAD=reference)
    assert name == f"reference BLAS ({reference})"


@linux_only
def test_openblas_is_refused_once_mlx_is_imported():
    result = run("import mlx.core\n" + USE_OPENBLAS)
    assert result.returncode != 0
    assert "[use_openblas] expected a call before mlx.core is imported" in result.stderr


@linux_only
def test_openblas_runs_on_one_thread_unless_told_otherwise():
    assert output(USE_OPENBLAS + PRINT_NUM_THREADS) == "1"
    num_threads = str(min(2, len(os.sched_getaffinity(0))))
    assert output(USE_OPENBLAS + PRINT_NUM_THREADS, OPENBLAS_NUM_THREADS="2") == num_threads


@linux_only
def test_the_command_uses_openblas():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="exactspec")
    assert script.value == "exactspec_openblas:main"
    # Stands in for the command line: the module that main() runs once the BLAS is in place.
    command = (
        "import sys, types; cli = types.ModuleType('exactspec.cli')\n"
        "def main():\n    from exactspec.blas import blas_in_use; print(blas_in_use())\n"
        "cli.main = main; sys.modules['exactspec.cli'] = cli\n"
        "import exactspec_openblas; exactspec_openblas.main()\n"
    )
    assert output(command).startswith("OpenBLAS ")


def test_other_systems_keep_accelerate(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    exactspec_openblas.use_openblas()
    assert blas.blas_in_use() == "Accelerate"


@pytest.mark.parametrize("distribution", ["exactspec", "a-distribution-that-does-not-exist"])
def test_a_missing_library_names_the_command_that_installs_it(distribution):
    with pytest.raises(FileNotFoundError, match=f"libnone.so .*`pip install {distribution}`"):
        exactspec_openblas._installed_file(distribution, "libnone.so")
