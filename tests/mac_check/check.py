"""Cross-compile the macOS extension and link it against MLX's own macOS library.

Downloads MLX's macOS wheels at the pinned version, compiles every source of the extension for
aarch64-macos with the Metal backend on, links it with the wheel's libmlx.dylib, and looks every
undefined mlx, Metal and Foundation symbol up in that library's export table. It shows that the
host code matches MLX's headers and library. It does not run anything, does not compile the shaders,
and is not the wheel that is shipped (zig brings its own libc++).

Usage: python tests/mac_check/check.py [--build build/mac_check]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lief
import mlx.core as mx
import nanobind

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TARGET = "aarch64-macos.14.0"
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", TARGET]
# MLX itself, Metal and Foundation by way of metal-cpp.
CHECKED = ("N3mlx", "NK3mlx", "N3MTL", "NK3MTL", "N2NS", "NK2NS")


def fetch_wheels(build: Path) -> Path:
    """MLX's macOS wheels at this environment's version, unpacked; returns the mlx folder."""
    version = mx.__version__.split("+")[0]
    folder = build / f"mlx-{version}"
    if not (folder / "mlx" / "lib" / "libmlx.dylib").exists():
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", build,
             "--only-binary=:all:", "--platform", "macosx_14_0_arm64", "--python-version", python,
             f"mlx=={version}", f"mlx-metal=={version}"],
            check=True,
        )  # fmt: skip
        for wheel in build.glob("mlx*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
    return folder / "mlx"


def sources() -> list[Path]:
    """Every source of the extension on macOS, and nanobind's own."""
    nanobind_source = Path(nanobind.source_dir()) / "nb_combined.cpp"
    own = [path for path in (ROOT / "csrc").glob("*.cpp") if "_avx" not in path.name]
    return [*sorted(own), nanobind_source]


def embed_shader(build: Path) -> None:
    """The header with the shader's text, made by the same step as in a real build."""
    names = "law verify_draft_params simd noise row draw filter verify_draft kernel".split()
    names = [*(f"{name}.h" for name in names), "verify_draft.metal", "verify_tree.h"]
    files = [ROOT / "metal" / name for name in [*names, "verify_tree.metal"]]
    subprocess.run(
        ["cmake", "-DNAME=verify_draft_source", f"-DOUTPUT={build / 'verify_draft_source.h'}",
         "-DFILES=" + ";".join(map(str, files)), "-P", ROOT / "cmake/embed_shader.cmake"],
        check=True,
    )  # fmt: skip


def compile_all(build: Path, mlx: Path) -> list[Path]:
    """Object files, compiled two at a time."""
    embed_shader(build)
    robin_map = Path(nanobind.include_dir()).parent / "ext/robin_map/include"
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-D_METAL_", "-DEXACTSPEC_METAL",
        "-DNB_DOMAIN=mlx", '-DEXACTSPEC_MLX_VERSION="check"',
        '-DEXACTSPEC_NANOBIND_VERSION="check"', "-Wno-nullability-completeness",
    ]  # fmt: skip
    includes = [ROOT / "csrc", ROOT / "metal", build, HERE / "stubs", mlx / "include",
                mlx / "include/metal_cpp", nanobind.include_dir(), robin_map,
                sysconfig.get_path("include")]  # fmt: skip
    flags += [f"-I{path}" for path in includes]

    def compile_one(source: Path) -> Path:
        output = build / (source.stem + ".o")
        subprocess.run([*ZIG, *flags, "-c", source, "-o", output], check=True)
        return output

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources()))


def link(build: Path, mlx: Path, objects: list[Path]) -> Path:
    """The extension; Python's own symbols come from the interpreter that loads it."""
    library = build / "_ext.so"
    subprocess.run(
        [*ZIG, "-shared", "-Wl,-undefined,dynamic_lookup", *objects,
         mlx / "lib/libmlx.dylib", "-o", library],
        check=True,
    )  # fmt: skip
    return library


def check_symbols(library: Path, mlx: Path) -> int:
    """The number of undefined symbols found exported; exits when one is not."""
    ours = lief.MachO.parse(str(library)).at(0)
    theirs = lief.MachO.parse(str(mlx / "lib/libmlx.dylib")).at(0)
    exported = {symbol.name for symbol in theirs.exported_symbols}
    wanted = {s.name for s in ours.imported_symbols if any(part in s.name for part in CHECKED)}
    missing = sorted(wanted - exported)
    if missing or not wanted:
        sys.exit("not exported by libmlx.dylib:\n" + "\n".join(missing or ["(nothing imported)"]))
    return len(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/mac_check")
    build = parser.parse_args().build
    build.mkdir(parents=True, exist_ok=True)
    mlx = fetch_wheels(build)
    objects = compile_all(build, mlx)
    library = link(build, mlx, objects)
    count = check_symbols(library, mlx)
    print(f"mac-check: compiled and linked for {TARGET}; {count} of {count} MLX symbols exported")


if __name__ == "__main__":
    main()
