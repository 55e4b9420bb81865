"""Static checks of Metal source: what clang's C++ for OpenCL accepts but Metal does not.

Clang enforces address spaces, const and types. The rest is read off its syntax tree. Section
numbers are those of the Metal Shading Language Specification 3.2.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator

from . import toolchain
from .toolchain import BUILD, LANGUAGE, clang, mlx_include, preprocess
from .translate import TranslationError, translate

SPECIFICATION = {
    "simd_is_first": "6.9.2",
    "simd_ballot": "6.9.2",
    "mulhi": "6.3",
    "rotate": "6.3",
    "ctz": "6.3",
    "mem_none": "6.9.1",
}
"""Names of Metal's library that MLX's shipped headers do not use, and who defines them."""

FORBIDDEN_NODES = {
    "GotoStmt": "goto (1.5.4)",
    "LambdaExpr": "a lambda expression (1.5.4)",
    "CXXNewExpr": "new (1.5.4)",
    "CXXDeleteExpr": "delete (1.5.4)",
    "CXXThrowExpr": "an exception (1.5.4)",
    "CXXTryStmt": "an exception (1.5.4)",
    "CXXTypeidExpr": "typeid (1.5.4)",
    "CXXDynamicCastExpr": "dynamic_cast (1.5.4)",
    "GCCAsmStmt": "assembly",
    "VAArgExpr": "variable arguments",
}
GENERIC_POINTER = re.compile(r"__generic [\w: <>,]*[*&]")
ADDRESS_SPACE = re.compile(r"\b__(?:private|local|global|constant|generic)\b")
NAMED_SPACE = re.compile(r"\b__(?:local|global|constant)\b")
COMPARISONS = ("<", ">", "<=", ">=", "==", "!=")


def check(source: str) -> list[str]:
    """What is wrong with Metal source: one line each, empty if nothing is.

    Checks that the text is ASCII, that clang accepts it with address spaces enforced, the rules of
    Metal that clang does not know, and that each function of Metal's library occurs in MLX's
    shipped headers or in ``SPECIFICATION``.
    """
    if not source.isascii():
        at = next(i for i, c in enumerate(source) if not c.isascii())
        return [f"line {source.count(chr(10), 0, at) + 1}: {source[at]!r} is not ASCII"]
    folder = BUILD / "lint" / hashlib.sha256(source.encode()).hexdigest()[:16]
    code = folder / "shader.clcpp"
    try:
        strict = translate(preprocess(source, folder / "shader.metal"), name="lint", strict=True)
        code.write_text(strict.code)
        warnings = _syntax(code)
    except (TranslationError, toolchain.CompileError) as error:
        return [line for line in str(error).splitlines() if "error" in line] or [str(error)]
    if warnings:
        return warnings
    tree = json.loads(clang(*LANGUAGE, "-w", "-fsyntax-only", "-Xclang", "-ast-dump=json", code))
    return sorted(set(_Walk(str(folder / "shader.metal")).run(tree)))


def _syntax(code) -> list[str]:
    """Raises CompileError for errors; returns warnings, which point at what Metal lacks."""
    command = [sys.executable, "-m", "ziglang", "clang", *LANGUAGE, "-Werror=vla"]
    done = subprocess.run(
        [*command, "-Wimplicit-fallthrough", "-fsyntax-only", str(code)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise toolchain.CompileError(done.stderr)
    return [line for line in done.stderr.splitlines() if "warning:" in line]


@functools.lru_cache
def mlx_names() -> frozenset[str]:
    """All words of the Metal headers in MLX's wheel."""
    folder = mlx_include() / "mlx" / "backend" / "metal" / "kernels"
    words: set[str] = set()
    for header in folder.rglob("*.h"):
        words.update(re.findall(r"\w+", header.read_text(errors="replace")))
    return frozenset(words)


class _Walk:
    """Visits clang's syntax tree in order, which is how its locations are to be read."""

    def __init__(self, path: str):
        self.path = path
        self.file = ""
        self.line = 0
        # Functions are known by their mangled name: declaration and definition are one.
        self.functions: dict[str, str] = {}  # mangled name by id
        self.calls: dict[str, set[str]] = {}  # ids of callees
        self.where: dict[str, str] = {}
        self.library: set[str] = set()  # ids of what the shim declares
        self.found: list[str] = []

    def run(self, tree: dict) -> list[str]:
        self.visit(tree, None, True, True)
        for function, place in self.where.items():
            if self._reaches_itself(function):
                self.found.append(f"{place} is recursive (1.5.4)")
        return self.found

    def _reaches_itself(self, function: str) -> bool:
        seen: set[str] = set()
        todo = list(self.calls.get(function, ()))
        while todo:
            callee = self.functions.get(todo.pop())
            if callee == function:
                return True
            if callee and callee not in seen:
                seen.add(callee)
                todo += self.calls.get(callee, ())
        return False

    def _move(self, location: dict) -> None:
        # Clang names a file or a line only where it changes.
        for part in (location.get("spellingLoc"), location.get("expansionLoc"), location):
            if part:
                self.file = part.get("presumedFile", part.get("file", self.file))
                self.line = part.get("presumedLine", part.get("line", self.line))

    def _locate(self, node: dict) -> None:
        self._move(node.get("loc", {}))
        here = self.file, self.line
        span = node.get("range", {})
        self._move(span.get("begin", {}))
        begin = self.file, self.line
        self._move(span.get("end", {}))
        self.node_file, self.node_line = here if node.get("loc") else begin

    def visit(self, node: dict, function: str | None, top: bool, written: bool) -> None:
        """``top``: at program scope; ``written``: not made up by the compiler or the simulator."""
        if not isinstance(node, dict):
            return
        self._locate(node)
        kind = node.get("kind", "")
        place = f"line {self.node_line}"
        written = written and not (kind.endswith("Decl") and node.get("isImplicit"))
        written = written and not (kind == "NamespaceDecl" and node.get("name") == "metal_sim")
        mine = written and self.node_file == self.path
        if written and kind.endswith("Decl") and self.node_file.endswith("metal_stdlib"):
            self.library.add(node["id"])
        if kind in ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl"):
            function = node.get("mangledName", node["id"])
            self.functions[node["id"]] = function
            if mine:
                self.where.setdefault(function, f"{place}: {node.get('name')}")
        if mine and not node.get("isImplicit"):
            self.found += [f"{place}: {problem}" for problem in self._problems(node, top)]
        callee = node.get("referencedDecl", {}).get("id") or node.get("referencedMemberDecl")
        if function and callee:
            self.calls.setdefault(function, set()).add(callee)
        top = top and kind in ("TranslationUnitDecl", "NamespaceDecl", "LinkageSpecDecl")
        for child in node.get("inner", ()):
            self.visit(child, function, top, written)

    def _problems(self, node: dict, top: bool) -> Iterator[str]:
        kind = node.get("kind")
        name = node.get("name")
        type_ = node.get("type", {}).get("qualType", "")
        if kind in FORBIDDEN_NODES:
            yield f"{FORBIDDEN_NODES[kind]} is not Metal"
        if kind in ("ParmVarDecl", "VarDecl", "FieldDecl") and GENERIC_POINTER.search(type_):
            yield f"{name}: a pointer or reference needs an address space (4)"
        if kind in ("FunctionDecl", "CXXMethodDecl") and GENERIC_POINTER.search(
            type_.split("(")[0]
        ):
            yield f"{name}: a returned pointer or reference needs an address space (4)"
        if kind == "CXXMethodDecl" and node.get("virtual"):
            yield f"{name}: virtual functions are not Metal (1.5.4)"
        if kind == "VarDecl" and "__constant" not in type_ and not node.get("constexpr"):
            if top:
                yield f"{name}: a variable at program scope must be constant (4.2)"
            elif node.get("storageClass") == "static":
                yield f"{name}: a static variable must be constant (4.2)"
        if kind == "VarDecl" and node.get("tls"):
            yield f"{name}: thread_local is not Metal (1.5.4)"
        if kind == "ImplicitCastExpr" and not node.get("isPartOfExplicitCast"):
            yield from self._conversion(node)
        if kind == "MemberExpr":
            yield from self._method_of_unnamed_space(node)
        if kind == "BinaryOperator" and node.get("opcode") in COMPARISONS:
            if "vector" in type_ or re.search(r"\bu?(?:char|short|int|long)[234]\b", type_):
                yield "comparing vectors gives bool vectors in Metal (2.2), integers here"
        referenced = node.get("referencedDecl", {})
        if referenced.get("id") in self.library:
            word = referenced.get("name", "")
            ours = word.startswith(("metal_sim_", "__builtin_"))  # the translation's, and macros'
            known = ours or word in mlx_names() or word in SPECIFICATION
            if word.isidentifier() and not known:
                yield f"{word}: neither in MLX's headers nor in lint.SPECIFICATION"

    @staticmethod
    def _conversion(node: dict) -> Iterator[str]:
        # bfloat converts implicitly to float and from nothing (2.1).
        def bare(type_: dict) -> str:
            text = type_.get("desugaredQualType", type_.get("qualType", ""))
            return ADDRESS_SPACE.sub("", text.replace("const", "")).strip()

        cast = node.get("castKind")
        if cast not in ("FloatingCast", "IntegralToFloating"):
            return
        to = bare(node.get("type", {}))
        inner = node.get("inner", [{}])[0]
        source = bare(inner.get("type", {}))
        if to in ("bfloat", "__bf16"):
            yield f"implicit conversion of {source} to bfloat (2.1)"
        if to == "half" and source in ("bfloat", "__bf16"):
            yield "implicit conversion of bfloat to half (2.1)"

    @staticmethod
    def _method_of_unnamed_space(node: dict) -> Iterator[str]:
        # A method without an address space is one of thread objects (4).
        inner = node.get("inner", [{}])[0]
        if inner.get("castKind") != "AddressSpaceConversion":
            return
        source = inner.get("inner", [{}])[0].get("type", {}).get("qualType", "")
        if NAMED_SPACE.search(source):
            yield f"{node.get('name')}: a method of thread objects, called on {source}"
