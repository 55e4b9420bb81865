"""Compiles Metal source to PTX and assembles it with NVIDIA's ptxas: the opinion of a GPU compiler.

The translation is the one that the simulator runs; ``ptx_runtime.clcpp`` stands in for its runtime.
Nothing is executed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .toolchain import BUILD, HERE, LANGUAGE, CompileError, clang
from .translate import BUILTINS, Translation, translate

ARCHITECTURE = "sm_90"
MAX_BUFFERS = 31

TARGET = [
    "-target", "nvptx64-nvidia-cuda", "-nogpulib", "-march=" + ARCHITECTURE,
    "-Xclang", "-target-feature", "-Xclang", "+ptx80", "-Wno-override-module",
    "-Xclang", "-cl-ext=+__opencl_c_program_scope_global_variables",
]  # fmt: skip
# Without calls, as a shader's registers are its only private memory.
OPTIONS = ["-O2", "-ffp-contract=off", "-mllvm", "-inline-threshold=1000000"]

REWRITES = (
    # What metal_stdlib asks of the simulator's runtime, in terms of ptx_runtime.clcpp.
    (r"metal_sim_shuffle\(word, source, uniform\)",
     "metal_sim_ptx::shuffle<sizeof(T)>(word, source)"),
    (r"bool simd_any\(bool value\) \{", r"\g<0> return metal_sim_ptx::any(value);"),
    (r"T\(metal_sim_atomic\(\s*ulong\(object\),(.*?)uint\(operand\),\s*uint\(expected\)\)\)",
     r"T(metal_sim_ptx::atomic(&object->metal_sim_value,\1operand, expected))"),
    (r"__builtin_(exp2?|log2?)f\(", r"metal_sim_ptx::\1("),
    (r'extern "C" (void metal_sim_kernel_)', r"static __attribute__((always_inline)) \1"),
)  # fmt: skip
FUNCTION_CONSTANT = re.compile(
    r"static __global (\w+)& (\w+) = \*\(__global \w+\*\)\(metal_sim_function_constants[^;]*;"
)
THREADGROUP_VARIABLE = re.compile(
    r"(?:tail )?call [^@\n]*@metal_sim_threadgroup_variable"
    r"\(i32 \w+ (\d+), i64 \w+ (\d+), i64 \w+ (\d+), i64 \w+ \d+\)[^\n]*"
)
POSITION = {
    "thread_position_in_grid": "ctaid * ntid + tid",
    "threadgroup_position_in_grid": "ctaid",
    "thread_position_in_threadgroup": "tid",
    "thread_index_in_threadgroup": "tid",
    "thread_index_in_simdgroup": "tid % 32",
    "simdgroup_index_in_threadgroup": "tid / 32",
    "threads_per_threadgroup": "ntid",
    "dispatch_threads_per_threadgroup": "ntid",
    "threadgroups_per_grid": "nctaid",
    "threads_per_grid": "nctaid * ntid",
    "simdgroups_per_threadgroup": "(ntid + 31) / 32",
    "threads_per_simdgroup": "32",
}
"""What answers a kernel about its place, in PTX's registers; a threadgroup has one dimension."""


@dataclass(frozen=True)
class Usage:
    """What ptxas says about a kernel, in bytes but for the registers."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


def find_ptxas() -> str | None:
    return shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")


def assemble(path: Path, kernels: Sequence[str], constants: dict[str, int]) -> dict[str, Usage]:
    """Compiles kernels of a Metal file with these function constants; returns what each uses.

    Raises:
        CompileError: clang or ptxas rejects it.
        ValueError: the constants are not those of the shader.
    """
    translation = translate(clang("-E", *LANGUAGE, "-I", HERE / "include", path), name=path.stem)
    source = _source(translation, kernels, constants)
    ptxas = find_ptxas()
    tools = [_run(ptxas, "--version").stdout, clang("--version"), *_language()]
    key = "\0".join([source, Path(__file__).read_text(), *tools])
    stem = BUILD / "ptx" / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    report = stem.with_suffix(".txt")
    if not report.exists():
        stem.parent.mkdir(parents=True, exist_ok=True)
        # Test processes that run side by side may compile the same.
        with tempfile.TemporaryDirectory(dir=stem.parent) as folder:
            text = _assemble(ptxas, Path(folder), source)
            (Path(folder) / "report").write_text(text)
            (Path(folder) / "report").replace(report)
    return {kernel: _usage(report.read_text(), kernel) for kernel in kernels}


def _assemble(ptxas: str, folder: Path, source: str) -> str:
    code, ir, ptx = (folder / f"shader.{suffix}" for suffix in ("clcpp", "ll", "ptx"))
    code.write_text(source)
    clang(*_language(), *OPTIONS, "-w", "-S", "-emit-llvm", code, "-o", ir)
    ir.write_text(_place_memory(ir.read_text()))
    clang("-x", "ir", *TARGET, "-O2", "-S", ir, "-o", ptx)
    if left := re.findall(r"^(?:\.\w+ )*\.func .*", ptx.read_text(), re.MULTILINE):
        raise CompileError(f"not inlined, so not counted: {left}")
    return _run(ptxas, f"-arch={ARCHITECTURE}", "-v", ptx, "-o", folder / "shader.cubin").stderr


def _run(*command: str | Path) -> subprocess.CompletedProcess:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(done.stderr)
    return done


def _language() -> list[str]:
    at = LANGUAGE.index("-target")
    return [*LANGUAGE[:at], *TARGET, *LANGUAGE[at + 2 :]]


def _source(translation: Translation, kernels: Sequence[str], constants: dict[str, int]) -> str:
    """The translated shader as one file for the device, with an entry for each of the kernels."""
    code = translation.code
    names = {m[2] for m in FUNCTION_CONSTANT.finditer(code)}
    if names != constants.keys():
        raise ValueError(f"function constants differ: {sorted(names ^ constants.keys())}")
    code = FUNCTION_CONSTANT.sub(
        lambda m: f"constexpr __constant {m[1]} {m[2]} = {constants[m[2]]};", code
    )
    for pattern, replacement in REWRITES:
        code, count = re.subn(pattern, replacement, code, flags=re.DOTALL)
        if count == 0:
            raise ValueError(f"metal_stdlib has no {pattern}")
    buffers = range(MAX_BUFFERS)
    parameters = ", ".join(f"ulong b{i}" for i in buffers)
    place = ", ".join(
        re.sub(r"n?(?:cta|t)id", rf"__nvvm_read_ptx_sreg_\g<0>_{axis}()", f"uint({POSITION[b]})")
        for b in BUILTINS
        for axis in "xyz"
    )
    for k, kernel in enumerate(translation.kernels):
        # Only what an entry calls is compiled.
        code = re.sub(rf"\bvoid {kernel}\(", r"static \g<0>", code)
        if kernel in kernels:
            code += (
                f'extern "C" __kernel void ptx_{kernel}({parameters}) {{\n'
                f"  ulong b[] = {{{', '.join(f'b{i}' for i in buffers)}}};\n"
                f"  uint x[] = {{{place}}};\n"
                f"  metal_sim_kernel_{k}(b, b, x);\n}}\n"
            )
    return (HERE / "ptx_runtime.clcpp").read_text() + code


def _place_memory(ir: str) -> str:
    """Threadgroup variables become shared memory of their kernel, and ``constant`` plain memory."""
    ir = ir.replace("addrspace(4)", "addrspace(1)")
    # Clang splits a kernel into an entry and a function, which would be reported apart.
    ir = re.sub(
        r"(?m)^define dso_local ([^@\n]*@__clang_ocl_kern_imp_.*)(?= #\d)",
        r"define internal \1 alwaysinline",
        ir,
    )
    ir = re.sub(r"\bnoinline ", "", ir)
    head, *functions = re.split(r"(?m)^(?=define )", ir)
    variables = {}

    def place(function: int, match: re.Match) -> str:
        variable, size, align = match.groups()
        name = f"@threadgroup_{function}_{variable}"
        variables[name] = f"internal addrspace(3) global [{size} x i8] undef, align {align}"
        return f"getelementptr i8, ptr addrspace(3) {name}, i64 0"

    for i, function in enumerate(functions):
        functions[i] = THREADGROUP_VARIABLE.sub(lambda m, i=i: place(i, m), function)
    return head + "".join(f"{n} = {v}\n" for n, v in variables.items()) + "".join(functions)


def _usage(report: str, kernel: str) -> Usage:
    _, _, text = report.partition(f"Function properties for ptx_{kernel}\n")
    stack, stores, loads, registers = map(int, re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers", text,
    ).groups())  # fmt: skip
    line = re.search(r"Used .*", text)[0]
    shared = re.search(r"(\d+) bytes smem", line)
    return Usage(registers, stack, stores, loads, int(shared[1]) if shared else 0)
