"""Builds the simulator's extension, and compiles Metal source into libraries for it.

Clang comes from the ``ziglang`` package; what is not Metal is built by the system's C++ compiler.
Everything is kept under ``build/metal_sim``, by a hash of what went into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .translate import translate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "metal_sim"

LANGUAGE = [
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc",
    "-target", f"{platform.machine()}-linux-gnu",
    "-Xclang", "-cl-ext=+cl_khr_fp16,-__opencl_c_fp64,-cl_khr_fp64,-__opencl_c_pipes,"
    "-__opencl_c_device_enqueue",
]  # fmt: skip
CODE = [
    "-O2", "-g", "-fPIC",
    # Metal rounds each operation once, 16-bit ones too.
    "-ffp-contract=off",
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    # One hook per access that the source makes.
    "-fno-vectorize", "-fno-slp-vectorize", "-fno-optimize-sibling-calls",
    "-fsanitize=thread",
    "-mllvm", "-tsan-instrument-func-entry-exit=0",
    "-mllvm", "-tsan-instrument-read-before-write",
    "-mllvm", "-tsan-instrument-atomics=0",
    # Variables without a value hold NaN or a large negative number, never a plausible one.
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip
WARNINGS = ["-Werror=vla", "-Wno-unknown-pragmas"]


class CompileError(RuntimeError):
    """What clang said about a shader."""


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Test processes that run side by side share what is built."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clang(*arguments: str | Path) -> str:
    """Runs clang; returns its output.

    Raises:
        CompileError: clang failed.
    """
    command = [sys.executable, "-m", "ziglang", "clang", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(done.stderr or f"{command} failed")
    return done.stdout


def compiler() -> str:
    """The system's C++ compiler."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise CompileError("expected a C++ compiler on PATH (or in CXX)")


@functools.lru_cache
def mlx_include() -> Path:
    import mlx.core

    return Path(mlx.core.__file__).parent / "include"


@functools.lru_cache
def _machine_flags() -> list[str]:
    """Instructions for half and fma where the CPU has them; else the runtime's functions."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return [f"-m{name}" for name in ("f16c", "fma") if name in flags]


def _is_foreign(source: str) -> bool:
    return "mlx/backend/metal/kernels/" in source


def _shader_flags(source: str) -> list[str]:
    flags = [*LANGUAGE, "-I", str(HERE / "include")]
    if _is_foreign(source):
        # MLX's kernels use names of Metal's headers that the specification does not list.
        flags += ["-DMETAL_SIM_MLX", "-I", str(mlx_include())]
    return flags


def preprocess(source: str, path: Path) -> str:
    """Preprocesses Metal source, which is written to ``path`` for messages to point at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != source:
        path.write_text(source)
    return clang("-E", *_shader_flags(source), path)


def compile_library(name: str, source: str) -> Path:
    """Compiles Metal source to a shared object of kernels; returns its path.

    Raises:
        CompileError: clang rejects the source.
        TranslationError: the source is outside the supported subset.
    """
    shim = [p.read_bytes() for p in sorted((HERE / "include").iterdir())]
    tools = [(HERE / f).read_bytes() for f in ("translate.py", "toolchain.py", "runtime.h")]
    key = _hash(source, *_machine_flags(), *shim, *tools)
    stem = BUILD / "kernels" / f"{name}-{key}"
    library = stem.with_suffix(".so")
    runtime = build_extension().parent
    with _one_process():
        if not library.exists():
            _compile(name, source, stem, library, runtime)
    return library


def _compile(name: str, source: str, stem: Path, library: Path, runtime: Path) -> None:
    preprocessed = preprocess(source, stem.with_suffix(".metal"))
    translation = translate(preprocessed, name=name, foreign=_is_foreign(source))
    code, table = stem.with_suffix(".clcpp"), stem.with_suffix(".table.cpp")
    code.write_text(translation.code)
    table.write_text(translation.table)
    objects = [stem.with_suffix(".o"), stem.with_suffix(".table.o")]
    clang(*LANGUAGE, *CODE, *WARNINGS, *_machine_flags(), "-c", code, "-o", objects[0])
    _run(compiler(), "-std=c++20", "-fPIC", "-I", HERE, "-c", table, "-o", objects[1])
    partial = stem.with_suffix(".part")
    _run(
        compiler(), "-shared", "-o", partial, *objects,
        f"-L{runtime}", "-lmetal_sim", f"-Wl,-rpath,{runtime}", "-lm",
    )  # fmt: skip
    for path in (code, table, *objects):
        path.unlink()
    partial.replace(library)


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(done.stdout + done.stderr)


@functools.lru_cache
def build_extension() -> Path:
    """Builds the extension ``_metal_sim`` and the runtime beside it; returns its path."""
    import mlx.core as mx
    import nanobind
    import ninja

    sources = [ROOT / "CMakeLists.txt", HERE / "CMakeLists.txt"]
    for folder, pattern in (
        (ROOT / "csrc", "*"), (ROOT / "metal", "*"), (ROOT / "cmake", "*"),
        (HERE, "*.cpp"), (HERE, "*.h"), (HERE / "host", "**/*.h"),
    ):  # fmt: skip
        sources += sorted(p for p in folder.glob(pattern) if p.is_file())
    parts = [str(p.relative_to(ROOT)) + "\0" + p.read_text() for p in sources]
    key = _hash(sys.version, mx.__version__, nanobind.__version__, *parts)
    folder = BUILD / "extension"
    with _one_process():
        if not _built(folder) or _stamp(folder).read_text() != key:
            folder.mkdir(exist_ok=True)
            cmake = [sys.executable, "-m", "cmake"]
            _run(
                *cmake, "-S", HERE, "-B", folder, "-G", "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            )  # fmt: skip
            _run(*cmake, "--build", folder)
            _stamp(folder).write_text(key)
    return _built(folder)


def _stamp(folder: Path) -> Path:
    return folder / "hash"


def _built(folder: Path) -> Path | None:
    found = next(folder.glob("_metal_sim.*.so"), None)
    return found if _stamp(folder).exists() else None


def shader_source() -> str:
    """The text of the operations' shaders, as the package embeds it."""
    text = (build_extension().parent / "verify_draft_source.h").read_text()
    begin, end = text.index('R"metal(') + len('R"metal('), text.rindex(')metal"')
    return text[begin:end]
