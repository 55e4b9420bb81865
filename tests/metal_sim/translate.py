"""Rewrites Metal source into C++ for OpenCL that clang compiles for the CPU.

The preprocessor runs first, with ``include/metal_stdlib`` in the place of Metal's own library. What
is left to rewrite is what no declaration can express:

* kernels lose their marker and the attributes of their parameters, which become rows of a table;
* a threadgroup variable becomes a reference into the memory of the running threadgroup;
* ``[[host_name("...")]]`` instantiations become thunks, one per name;
* a function constant becomes an external variable that the runtime sets;
* ``float4(...)`` becomes a function call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

BUILTINS = (
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
)
"""What a kernel may ask about its place in the grid; runtime.cpp fills them in this order."""

SCALARS = "char uchar short ushort int uint long ulong half bfloat float".split()
VECTORS = frozenset(scalar + n for scalar in SCALARS for n in "234")

LAYOUT = ("size", "align", "scalar", "writable", "reference")

TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<word>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<mark>::|->|.)""",
    re.VERBOSE,
)
LINE_MARKER = re.compile(r"^#[^\n]*$", re.MULTILINE)

OPEN = {"(": ")", "[": "]", "{": "}"}


class TranslationError(ValueError):
    """Source outside the subset that the simulator runs."""


@dataclass
class Parameter:
    """How a kernel parameter is bound: ``buffer``, ``threadgroup`` or ``builtin``.

    ``index`` is a constant expression of the shader, or the place in ``BUILTINS``.
    """

    kind: str
    index: str
    name: str


@dataclass
class Translation:
    """C++ for OpenCL, and the C++ table that registers what it defines."""

    code: str
    table: str
    kernels: list[str]


@dataclass
class _Kernel:
    name: str
    parameters: list[Parameter]
    is_template: bool
    host_names: list[str]


@dataclass
class _Tokens:
    """The code tokens of a text; blanks and line markers stay in the gaps in front of them."""

    text: list[str] = field(default_factory=list)
    gap: list[str] = field(default_factory=list)
    tail: str = ""

    @classmethod
    def of(cls, source: str) -> _Tokens:
        tokens = cls()
        gap = ""
        at = 0
        while at < len(source):
            marker = LINE_MARKER.match(source, at) if source[at] == "#" else None
            match = marker or TOKEN.match(source, at)
            at = match.end()
            if marker or match.lastgroup == "space":
                gap += match.group()
            else:
                tokens.text.append(match.group())
                tokens.gap.append(gap)
                gap = ""
        tokens.tail = gap
        return tokens

    def close(self, i: int) -> int:
        """Index of the bracket that closes the one at ``i``."""
        expected = []
        for j in range(i, len(self.text)):
            t = self.text[j]
            if t in OPEN:
                expected.append(OPEN[t])
            elif expected and t == expected[-1]:
                expected.pop()
                if not expected:
                    return j
        raise TranslationError(f"unbalanced {self.text[i]}")

    def close_angle(self, i: int) -> int:
        depth = 0
        j = i
        while j < len(self.text):
            t = self.text[j]
            if t in OPEN:
                j = self.close(j)
            elif t == "<":
                depth += 1
            elif t == ">":
                depth -= 1
                if depth == 0:
                    return j
            j += 1
        raise TranslationError("unbalanced <")

    def is_attribute(self, i: int) -> bool:
        return self.text[i : i + 2] == ["[", "["]

    def join(self, start: int, end: int) -> str:
        return " ".join(t for t in self.text[start:end] if t)

    def erase(self, start: int, end: int) -> None:
        for i in range(start, end):
            self.text[i] = ""

    def source(self) -> str:
        return "".join(g + t for g, t in zip(self.gap, self.text)) + self.tail


def translate(
    source: str, *, name: str, strict: bool = False, foreign: bool = False
) -> Translation:
    """Translates preprocessed Metal source.

    Args:
        source: what the preprocessor left, line markers included.
        name: of the library, for reports.
        strict: for static checks: function constants stay ``constant``, and there are no thunks. In
            the code that runs they are references into memory that the host sets, so that each read
            is seen.
        foreign: MLX's kernels, which take two more rewrites.

    Raises:
        TranslationError: the source is outside the supported subset.
    """
    tokens = _Tokens.of(source)
    kernels: dict[str, _Kernel] = {}
    instances: list[tuple[str, str, str]] = []  # host name, kernel, expression that names it
    constants: list[tuple[str, str, str]] = []  # index, type, name
    variables: list[str] = []  # names of the threadgroup variables
    _rewrite_function_constants(tokens, constants, strict)
    i = 0
    while i < len(tokens.text):
        if tokens.text[i] == "kernel":
            i = _rewrite_kernel(tokens, i, kernels, instances, variables)
        i += 1
    _rewrite_vector_constructors(tokens)
    if foreign:
        _rewrite_foreign(tokens)
    for kernel in kernels.values():
        if not kernel.is_template:
            instances += [(n, kernel.name, kernel.name) for n in kernel.host_names or [kernel.name]]
    if strict:
        return Translation(tokens.source(), "", [n for n, _, _ in instances])
    return _emit(tokens.source(), name, kernels, instances, constants, variables)


def _statement_start(tokens: _Tokens, i: int) -> int:
    while i > 0 and tokens.text[i - 1] not in (";", "{", "}"):
        i -= 1
    return i


def _rewrite_function_constants(tokens: _Tokens, constants: list, strict: bool) -> None:
    for i, text in enumerate(tokens.text):
        if text != "function_constant" or not tokens.is_attribute(i - 2):
            continue
        start = _statement_start(tokens, i)
        end = tokens.close(i + 1) + 3
        words = [
            t for t in tokens.text[start : i - 2] if t not in ("static", "__constant", "const")
        ]
        if len(words) != 2 or tokens.text[end] != ";":
            raise TranslationError(f"function constant: cannot read {tokens.join(start, end)}")
        kind, name = words
        index = tokens.join(i + 2, tokens.close(i + 1))
        constants.append((index, kind, name))
        tokens.erase(start, end)
        tokens.text[start] = (
            f"extern __constant {kind} {name}"
            if strict
            else f"static __global {kind}& {name} = "
            f"*(__global {kind}*)(metal_sim_function_constants + ({index}))"
        )


def _rewrite_kernel(
    tokens: _Tokens, i: int, kernels: dict, instances: list, variables: list
) -> int:
    """Rewrites the declaration around the word ``kernel`` at ``i``; returns where to go on."""
    start = _statement_start(tokens, i)
    host_names = []
    after = i + 1
    j = start
    while j < i:
        if tokens.is_attribute(j):
            if tokens.text[j + 2] == "host_name":
                inside = tokens.text[j + 4 : tokens.close(j + 3)]
                host_names.append("".join(t[1:-1] for t in inside))
                end = tokens.close(j) + 1
                tokens.erase(j, end)
                j = end
                continue
        j += 1
    if tokens.is_attribute(i - 2):
        after = i + 3
        tokens.erase(i - 2, after)
    tokens.text[i] = ""
    template = tokens.text[start] == "template"
    first = next(t for t in tokens.text[start + 1 : after + 1] if t)
    if template and first != "<":
        return _read_instantiation(tokens, start, after, host_names, instances)

    paren = after
    while tokens.text[paren] != "(":
        paren += 1
    if tokens.join(after, paren - 1) != "void":
        raise TranslationError(f"kernel {tokens.text[paren - 1]} must return void")
    name = tokens.text[paren - 1]
    end = tokens.close(paren)
    if tokens.text[end + 1] != "{":
        raise TranslationError(f"kernel {name}: declare kernels where they are defined")
    if name in kernels:
        raise TranslationError(f"kernel {name} is defined twice")
    parameters = _read_parameters(tokens, name, paren, end)
    kernels[name] = _Kernel(name, parameters, template, host_names)
    body_end = tokens.close(end + 1)
    _rewrite_threadgroup_variables(tokens, name, end + 1, body_end, variables)
    return body_end


def _read_instantiation(tokens, start, after, host_names, instances) -> int:
    if len(host_names) != 1:
        raise TranslationError("an instantiation of a kernel needs one host_name")
    end = after
    while tokens.text[end] != ";":
        end = tokens.close(end) + 1 if tokens.text[end] in OPEN else end + 1
    if tokens.text[after] == "decltype":
        expression = tokens.join(after + 2, tokens.close(after + 1))
    elif tokens.text[after] == "void":
        last = after + 1
        while tokens.text[last] != "(":
            last = tokens.close_angle(last) + 1 if tokens.text[last] == "<" else last + 1
        expression = tokens.join(after + 1, last)
    else:
        raise TranslationError(f"instantiation {host_names[0]}: expected void or decltype")
    name = re.match(r"(?:\w+ :: )*(\w+)", expression).group(1)
    instances.append((host_names[0], name, expression))
    tokens.erase(start, end)  # the semicolon still separates statements
    return end


def _read_parameters(tokens: _Tokens, kernel: str, paren: int, end: int) -> list[Parameter]:
    parameters: list[Parameter | None] = []
    names = []
    i = paren + 1
    binding = None
    last_word = ""
    depth = 0
    while i <= end:
        text = tokens.text[i]
        if tokens.is_attribute(i):
            close = tokens.close(i) + 1
            word = tokens.text[i + 2]
            if word in ("buffer", "threadgroup", "__local"):
                kind = "buffer" if word == "buffer" else "threadgroup"
                binding = (kind, tokens.join(i + 4, tokens.close(i + 3)))
            elif word in BUILTINS:
                binding = ("builtin", str(BUILTINS.index(word)))
            else:
                raise TranslationError(f"kernel {kernel}: attribute {word} is not supported")
            tokens.erase(i, close)
            i = close
            continue
        if depth == 0 and (text == "," or i == end):
            if last_word:
                names.append(last_word)
                parameters.append(Parameter(*binding, last_word) if binding else None)
            binding, last_word = None, ""
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
        elif re.match(r"[A-Za-z_]", text):
            last_word = text
        i += 1
    # Parameters without an attribute take the free buffer indices in order.
    used = {p.index for p in parameters if p and p.kind == "buffer"}
    if None in parameters and not all(index.isdigit() for index in used):
        raise TranslationError(f"kernel {kernel}: give all buffers an index, or only literal ones")
    free = (str(n) for n in range(31) if str(n) not in used)
    return [p or Parameter("buffer", next(free), n) for p, n in zip(parameters, names)]


def _rewrite_threadgroup_variables(
    tokens: _Tokens, kernel: str, begin: int, end: int, variables: list
) -> None:
    i = begin
    while i < end:
        if tokens.text[i] != "__local" or tokens.text[i - 1] not in (";", "{", "}"):
            i += 1
            continue
        stop = i
        while tokens.text[stop] != ";":
            stop += 1
        out = ""
        kind = None
        for first, last in _declarators(tokens, i + 1, stop):
            bracket = first
            while bracket < last and tokens.text[bracket] != "[":
                bracket += 1
            if any(tokens.text[k] in ("*", "&") for k in range(first, bracket)):
                break  # a pointer into threadgroup memory, not a variable in it
            if "=" in tokens.text[first:last]:
                raise TranslationError(
                    f"kernel {kernel}: a threadgroup variable has no initialiser"
                )
            if kind is None:
                kind = tokens.join(first, bracket - 1)
            name = tokens.text[bracket - 1]
            dims = tokens.join(bracket, last)
            out += (
                f"__local {kind} (&{name}){dims} = *(__local {kind} (*){dims})"
                f"metal_sim_threadgroup_variable({len(variables)}, "
                f"sizeof({kind}{dims}), alignof({kind}), metal_sim::granule<{kind}>());"
            )
            variables.append(name)
        if kind is not None:
            tokens.erase(i, stop)
            tokens.text[i] = out.removesuffix(";")
        i = stop


def _declarators(tokens: _Tokens, first: int, stop: int) -> list[tuple[int, int]]:
    ranges = []
    depth = 0
    start = first
    i = first
    while i < stop:
        text = tokens.text[i]
        if text in OPEN:
            i = tokens.close(i)
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
        elif text == "," and depth == 0:
            ranges.append((start, i))
            start = i + 1
        i += 1
    ranges.append((start, stop))
    return ranges


def _rewrite_vector_constructors(tokens: _Tokens) -> None:
    live = [i for i, t in enumerate(tokens.text) if t]
    for before, i, after in zip(live, live[1:], live[2:]):
        if tokens.text[i] in VECTORS and tokens.text[after] == "(":
            if tokens.text[before] == "operator":
                continue
            if tokens.text[before] == "::":
                raise TranslationError(f"write {tokens.text[i]}(...) without a namespace")
            tokens.text[i] = f"metal_sim::make<{tokens.text[i]}>"


def _rewrite_foreign(tokens: _Tokens) -> None:
    for i, text in enumerate(tokens.text):
        before = tokens.text[i - 1]
        if text == "__private" and (
            before == ")" or (before == "const" and tokens.text[i - 2] == ")")
        ):
            # A method of thread objects: OpenCL has temporaries in no address space.
            tokens.text[i] = ""
        elif text == "vec" and tokens.text[i + 1] == "<" and before != "operator":
            end = tokens.close_angle(i + 1)
            if tokens.text[end + 1] == "(":
                tokens.text[i] = "metal_sim::make<vec"
                tokens.text[end] = ">>"


def _emit(
    code: str, name: str, kernels: dict, instances: list, constants: list, variables: list
) -> Translation:
    # The type of a function counts as its address.
    code += '\n# 1 "<thunks>" 1\n#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable\n'
    table = [
        '#include "runtime.h"',
        "using namespace metal_sim;",
        "namespace {",
    ]
    rows = []
    for k, (host_name, kernel_name, expression) in enumerate(instances):
        if kernel_name not in kernels:
            raise TranslationError(f"{host_name} instantiates an unknown kernel {kernel_name}")
        parameters = kernels[kernel_name].parameters
        arguments = []
        layout = []
        for j, p in enumerate(parameters):
            kind = f"metal_sim_type_{k}_{j}"
            code += f"typedef metal_sim::parameter<{j}, decltype({expression})>::type {kind};\n"
            if p.kind == "builtin":
                arguments.append(f"metal_sim::builtin<{kind}>(x + 3 * {p.index})")
                layout.append("{}")
            else:
                source = "b" if p.kind == "buffer" else "t"
                arguments.append(f"metal_sim::argument<{kind}>::get({source}[{p.index}])")
                members = [f"uint({p.index})"] + [f"metal_sim::layout<{kind}>::{m}" for m in LAYOUT]
                layout.append(", ".join(members).join("{}"))
        code += f"""extern "C" __constant const uint metal_sim_layout_{k}[][{1 + len(LAYOUT)}] = {{
  {", ".join(layout)}}};
extern "C" void metal_sim_kernel_{k}(
    __private const ulong* b, __private const ulong* t, __private const uint* x) {{
  {expression}({", ".join(arguments)});
}}
"""
        kinds = ", ".join(f'{{"{p.name}", Binding::{p.kind}}}' for p in parameters)
        table.append(f"""extern "C" const uint32_t metal_sim_layout_{k}[][{1 + len(LAYOUT)}];
extern "C" void metal_sim_kernel_{k}(const uint64_t*, const uint64_t*, const uint32_t*);
const Parameter parameters_{k}[] = {{{kinds}}};""")
        rows.append(
            f'{{"{host_name}", metal_sim_kernel_{k}, parameters_{k}, metal_sim_layout_{k}, '
            f"{len(parameters)}}}"
        )
    indices = ", ".join(f"uint({index})" for index, _, _ in constants)
    code += f'extern "C" __constant const uint metal_sim_constant_indices[] = {{{indices or 0}}};\n'
    table.append('extern "C" const uint32_t metal_sim_constant_indices[];')
    table.append(f"const Kernel kernels[] = {{{', '.join(rows)}}};")
    listed = ", ".join(
        f'{{&metal_sim_constant_indices[{i}], "{kind}", "{n}"}}'
        for i, (_, kind, n) in enumerate(constants)
    )
    table.append(f"const FunctionConstant constants[] = {{{listed or '{}'}}};")
    named = ", ".join(f'"{v}"' for v in variables)
    table.append(f"const char* const variables[] = {{{named or 'nullptr'}}};")
    table.append("} // namespace")
    table.append(
        'extern "C" __attribute__((visibility("default"))) const Library metal_sim_library = '
        f'{{"{name}", kernels, {len(rows)}, constants, {len(constants)}, variables}};'
    )
    return Translation(code, "\n".join(table) + "\n", [n for n, _, _ in instances])
