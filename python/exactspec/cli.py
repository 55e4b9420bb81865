"""The command line: ``exactspec generate``, ``exactspec bench`` and ``exactspec doctor``."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from importlib.metadata import version as installed_version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.text import Text

from . import Sampling, __version__
from .blas import blas_in_use
from .rules import EXACT_RULES, Cascade, Rule, Typical, check_rule
from .sampling import is_greedy

# mlx-lm takes seconds to import, so the functions that need it do that: --help must not wait.
if TYPE_CHECKING:
    from .drafters import Drafter
    from .generate import GeneratedToken, Generation, Statistics

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut names off where the terminal is narrow
)

# The colour, its ANSI code, and what it means.
SOURCES = {
    "draft": ("green", 32, "accepted draft"),
    "residual": ("yellow", 33, "drawn in place of a rejected draft"),
    "bonus": ("cyan", 36, "drawn after the drafts"),
}

# Exit statuses as shells have them: 128 and the number of the signal.
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141

# What a model says must not move a terminal's cursor or set its title: there, control characters
# but tab and newline are shown as pictures.
CONTROL_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
CONTROL_PICTURES |= {127: "\u2421", **dict.fromkeys(range(128, 160), "\ufffd")}


class Level(str, Enum):
    """What to benchmark."""

    operation = "operation"
    loop = "loop"


class DrafterName(str, Enum):
    """Drafters that need no other model."""

    lookup = "lookup"
    head = "head"
    lookup_head = "lookup+head"
    none = "none"


def main() -> None:
    """Run the command line."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    sys.stderr = _Stream(sys.stderr, None)
    if sys.stdout is None:
        print("error: standard output: expected an open one, got a closed one", file=sys.stderr)
        sys.exit(1)
    # What a terminal cannot show becomes a question mark.
    sys.stdout.reconfigure(errors="replace")
    sys.stdout = _Stream(sys.stdout, "standard output")
    try:
        app(prog_name="exactspec")
    finally:
        sys.stdout.flush()


class _Stream:
    """A standard stream whose write errors are no tracebacks.

    Args:
        stream: what is written to.
        name: of one that the command cannot do without; an error ends it.
    """

    def __init__(self, stream: TextIO, name: str | None):
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # What is still in the buffer goes nowhere, also when the interpreter flushes it at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._name is None:
            return
        if isinstance(error, BrokenPipeError):
            sys.exit(EXIT_BROKEN_PIPE)
        print(f"error: {self._name}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"exactspec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Exact speculative sampling for MLX."""


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Taken as it is. Default: standard input if it is a pipe, else an example."
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Read the prompt from a file in UTF-8, the newline at its end included."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face name. Default: a packaged SmolLM2.")
    ] = None,
    drafter: Annotated[
        DrafterName | None,
        typer.Option(
            help="'lookup' drafts what followed the same tokens earlier in the text, 'head' drafts "
            "with the packaged model's own head, 'lookup+head' does the first after three such "
            "tokens and else the second, 'none' is plain decoding. Default: lookup+head, but "
            "lookup with --model, or none where its cache cannot be rolled back."
        ),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Draft with this smaller model of the same tokenizer.")
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens drafted per cycle, at most. Default: 4, or 8 with --adaptive; with the "
            "head it drafts 1, or 4 with --adaptive, and lookup 4. A number counts for both."
        ),
    ] = None,
    num_branches: Annotated[
        int | None,
        typer.Option(help="Continuations looked up per cycle, as a tree. Default: 1."),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            help="With --draft-model: draft a tree of the likeliest tokens, such as 3,2,1: three, "
            "two after each of them, one after each of those."
        ),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            help="How drafts are accepted: token, block or coupled; lossy are "
            "typical[:EPSILON[:DELTA]] (0.09, 0.3) and, with --draft-model, cascade[:ALPHA] (0). "
            "Trees of drafts need token."
        ),
    ] = "token",
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive", help="In each cycle draft as many tokens as pay, up to that number."
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 or less is off.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Keep the likeliest tokens of this total probability; 0 and 1 are off."),
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens of this share of the likeliest's; 0 is off.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same text, unless --adaptive. Default: drawn, and shown."
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Wrap the prompt in the model's chat template. Default: if it has one.",
        ),
    ] = None,
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize", help="Unpack quantised weights to float32: more memory, faster on CPUs."
        ),
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then generate by plain decoding as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Generate text, coloured by where each token came from.

    The text goes to standard output, byte for byte if that is no terminal, and everything else to
    standard error. Ctrl-C ends the text; what was generated is summed up, and the exit status is
    130.
    """
    prompt = _read_prompt(prompt, prompt_file)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    drafting = (drafter, draft_model, num_draft_tokens, num_branches, widths, adaptive or None)
    # A drafter that nobody asked for gives way where the model cannot do with it.
    is_optional = all(value is None for value in drafting)
    try:
        for option, name in (("--model", model), ("--draft-model", draft_model)):
            if name == "":
                raise ValueError(f"{option}: expected a folder or a name, got an empty one")
        if compare and drafter is DrafterName.none:
            raise ValueError("--compare: expected a drafter to compare, got --drafter none")
        acceptance = _parse_rule(rule)
        is_tree = widths is not None or (num_branches or 1) > 1
        if is_tree and acceptance != "token":
            raise ValueError(f"--rule: expected token for a tree of drafts, got {rule!r}")
        if isinstance(acceptance, Cascade) and draft_model is None and not is_greedy(temperature):
            raise ValueError(f"--rule: expected --draft-model with it, got {rule!r} without")
        from .generate import check_options, stream_generate

        # Before the model, which takes seconds to load.
        check_options(None, sampling, acceptance, max_tokens, seed)
        if seed is None:
            seed = secrets.randbits(32)
        if drafter is None and draft_model is None:
            drafter = DrafterName.lookup_head if model is None else DrafterName.lookup
        make_drafter, drafter_name = _plan_drafter(
            *(drafter, model, draft_model, num_draft_tokens, num_branches, widths, adaptive),
            dequantize,
        )
        target, tokenizer, model_name = _load(model, dequantize)
        encoded = _encode(prompt, tokenizer, chat)
        if is_optional and not _can_draft(target, tokenizer, encoded, max_tokens):
            _note("the cache of this model cannot be rolled back: decoding without a drafter")
            make_drafter, drafter_name, compare = lambda _: None, "none", False
        proposer = make_drafter(target)
        options = {
            "prompt": encoded,
            "sampling": sampling,
            "rule": acceptance,
            "max_tokens": max_tokens,
            "seed": seed,
            "profile": True,
        }
        setup = {"model": model_name, "drafter": drafter_name, "blas": blas_in_use()}
        if rule != "token":
            setup["rule"] = rule
        stream = stream_generate(target, tokenizer, drafter=proposer, **options)
        if as_json:
            result = _collect(stream)
        else:
            shown = setup if temperature == 0 else {**setup, "seed": str(seed)}
            result = _show(stream, shown, plain=proposer is None)
        plain = None
        is_interrupted = result.finish_reason is None
        if compare and not is_interrupted:
            plain = _collect(stream_generate(target, tokenizer, **options))
            is_interrupted = plain.finish_reason is None
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        _fail(_name_options(str(error)))
    if as_json:
        record = {
            "prompt": prompt,
            "options": {
                **{"model": model, "drafter": drafter and drafter.value},
                **{"draft_model": draft_model, "num_draft_tokens": num_draft_tokens},
                **{"num_branches": num_branches, "widths": widths, "adaptive": adaptive},
                **{"rule": rule, "temperature": temperature, "top_k": top_k, "top_p": top_p},
                **{"min_p": min_p, "max_tokens": max_tokens, "seed": seed, "chat": chat},
                "dequantize": dequantize,
            },
            "versions": {name: installed_version(name) for name in ("exactspec", "mlx", "mlx-lm")},
        }
        report = {**setup, **record, **_report(result), "plain": plain and _report(plain)}
        print(json.dumps(report))
    else:
        _summarise(result, plain, same_text=temperature == 0 or rule == "coupled")
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def bench(
    level: Annotated[
        Level | None, typer.Argument(help="Default: both, the operation and the decode loop.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="B,K,V: sequences, draft tokens, vocabulary. May be repeated."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Such as 'top_k and top_p'. May be repeated. Default: all four."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Of the logits. May be repeated. Default: float32 and bfloat16."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(help="On the CPU. May be repeated. Default: 1 and all cores."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Timed calls of each peer. Default: 15, the loop 3.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face name. Default: a packaged SmolLM2.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Default: the model with weights rounded to 4 bits.")
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted per cycle. Default: 4.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Per text. Default: 96.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few sizes, rounds and tokens: less than a minute.")
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(help="Also vary V, K and B, and draw plots (SVG) into this folder."),
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(help="Draw this result of bench_rules.py --json into --plots only."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Time the operation and the decode loop beside other ways to do the same.

    Every peer is verified before it is timed; exactspec[bench] installs them, and the plots.
    Ctrl-C ends the measuring; what was measured so far is shown, and the exit status is 130.
    """
    from .bench.plan import Options, run
    from .bench.report import INTERRUPTED, plot, tables

    if acceptance is not None:
        measured = (level, size, setting, dtype, threads, rounds, model, draft_model)
        measured += (num_draft_tokens, max_tokens, quick or None, as_json or None)
        return _draw_acceptance(acceptance, plots, any(x is not None for x in measured))
    options = Options(
        operation=level is not Level.loop,
        loop=level is not Level.operation,
        sizes=size,
        settings=setting,
        dtypes=dtype,
        threads=threads,
        rounds=rounds,
        model=model,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        quick=quick,
        sweep=plots is not None,
    )
    try:
        # Before the measurements, which take minutes and must not be lost.
        if plots is not None:
            plot({}, None, plots)
        result = run(options, Console(stderr=True))
    except (ValueError, OSError, ImportError) as error:
        _fail(_name_options(str(error)))
    if as_json:
        print(json.dumps(result))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
        for item in tables(result):
            console.print(item, soft_wrap=isinstance(item, str), markup=not isinstance(item, str))
    if plots is not None:
        for path in plot(result, None, plots):
            print(f"wrote {path}", file=sys.stderr)
    # Nothing is measured after a level that stopped.
    last = result["loop"] if "loop" in result else result["operation"]
    if reason := last["stopped"]:
        print(f"{reason}: this is what was measured before", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED if reason == INTERRUPTED else 1)


def _draw_acceptance(path: Path, plots: Path | None, measures: bool) -> None:
    from .bench.report import plot

    try:
        if plots is None or measures:
            got = "none" if plots is None else "options of a measurement"
            raise ValueError(f"--acceptance: expected --plots with it and nothing else, got {got}")
        [written] = plot({}, _read_acceptance(path), plots)
    except (ValueError, OSError, ImportError) as error:
        _fail(str(error))
    print(f"wrote {written}", file=sys.stderr)


def _read_acceptance(path: Path) -> list[dict[str, Any]]:
    names = ("drafter", "rule", "temperature", "mean_accepted_length", "interval", "within_noise")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [{name: row[name] for name in names} for row in rows]
    except (ValueError, KeyError, TypeError):
        expected = "the result of bench_rules.py --json"
        raise ValueError(f"--acceptance: expected {expected}, got {path}") from None


@app.command()
def doctor() -> None:
    """Check this installation: versions, then a self-test of the operations on every device.

    Its output belongs into a bug report. The exit status is 1 if a check fails.
    """
    from .doctor import run_checks, versions

    console = Console(highlight=False)
    for name, value in versions().items():
        console.print(Text(f"{name:10}", "bold"), value, sep="", soft_wrap=True, markup=False)
    failed = 0
    for check in run_checks():
        mark = Text("ok    ", "green") if check.ok else Text("FAILED", "red")
        console.print(mark, f" {check.name}: {check.detail}", sep="", soft_wrap=True, markup=False)
        failed += not check.ok
    if failed:
        raise typer.Exit(1)


def _name_options(message: str) -> str:
    """Have an error about a parameter name the option that was typed instead."""
    parameters = (
        "temperature|top_k|top_p|min_p|max_tokens|seed|num_draft_tokens|num_branches|widths|rule"
    )
    return re.sub(
        rf"^\[\w+\] (?:sampling\.)?({parameters})(?:\.\w+)?:",
        lambda match: f"--{match[1].replace('_', '-')}:",
        message,
    )


def _fail(message: str) -> NoReturn:
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise typer.Exit(1)


def _note(message: str) -> None:
    print("note:", message, file=sys.stderr)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt, character for character."""
    if prompt is not None and prompt_file is not None:
        _fail("prompt: expected PROMPT or --prompt-file, got both")
    if prompt_file is not None:
        try:
            prompt = _decode(prompt_file.read_bytes(), f"--prompt-file: {prompt_file}")
        except OSError as error:
            _fail(f"--prompt-file: {prompt_file}: {error.strerror}")
    if prompt is None:
        prompt = _read_stdin()
    if prompt is None:
        example = files("exactspec").joinpath("data/prompt.txt")
        prompt = example.read_text(encoding="utf-8").rstrip("\n")
    if not prompt.strip():
        _fail("prompt: expected some text, got none")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python marks an argument's bytes that it cannot read
        _fail("prompt: expected text in UTF-8")
    return prompt


def _decode(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError:
        _fail(f"{origin}: expected text in UTF-8")


def _read_stdin() -> str | None:
    """Standard input if it is a pipe or a file; None for a terminal, /dev/null or a closed one."""
    if sys.stdin is None:
        return None
    is_memory = False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        is_memory, mode = True, 0
    if stat.S_ISCHR(mode):
        return None
    text = _decode(sys.stdin.buffer.read(), "standard input")
    return None if is_memory and not text else text


def _parse_rule(text: str) -> Rule:
    name, *numbers = text.split(":")
    lossy = {"typical": Typical, "cascade": Cascade}.get(name)
    if lossy is None and numbers:
        raise ValueError(f"--rule: expected no parameters for {name}, got {text!r}")
    try:
        rule = name if lossy is None else lossy(*map(float, numbers))
    except (ValueError, TypeError):
        expected = ":".join(lossy._fields)
        raise ValueError(f"--rule: expected {name}[:{expected}] in numbers, got {text!r}") from None
    if lossy is None and name not in EXACT_RULES:
        expected = ", ".join((*EXACT_RULES, "typical", "cascade"))
        raise ValueError(f"--rule: expected one of {expected}, got {text!r}")
    check_rule("generate", rule, EXACT_RULES)
    return rule


def _plan_drafter(
    name: DrafterName | None,
    model: str | None,
    draft_model: str | None,
    num_draft_tokens: int | None,
    num_branches: int | None,
    widths: str | None,
    adaptive: bool,
    dequantize: bool,
) -> tuple[Callable[[Any], Drafter | None], str]:
    """What makes the drafter, given the target, and the drafter's name."""
    if name is not None and draft_model is not None:
        raise ValueError("drafter: expected --drafter or --draft-model, got both")
    if name is DrafterName.none:
        given = {
            "--num-draft-tokens": num_draft_tokens,
            "--num-branches": num_branches,
            "--widths": widths,
            "--adaptive": adaptive or None,
        }
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option}: expected a drafter with it, got --drafter none")
        return lambda _: None, "none"
    from .drafters import Adaptive, DraftModel, DraftTree, Hybrid, MTPDrafter, PromptLookup

    if draft_model is None and widths is not None:
        raise ValueError("--widths: expected --draft-model with it, got none")
    if draft_model is not None and num_branches is not None:
        raise ValueError("--num-branches: expected prompt lookup with it, got --draft-model")
    if widths is not None and num_draft_tokens is not None:
        raise ValueError("--widths: expected no --num-draft-tokens with it, got both")
    if name is DrafterName.head and num_branches is not None:
        raise ValueError("--num-branches: expected prompt lookup with it, got --drafter head")
    branches = 1 if num_branches is None else num_branches
    lookup_name = "prompt lookup" + f" of {branches} branches" * (branches > 1)
    if name in (DrafterName.head, DrafterName.lookup_head):
        from .heads import check_default_head, load_default_head
        from .models import read_config

        if model is not None:
            with _loading(model):
                config = read_config(model)
            check_default_head(config)
        defaults = (4, 4 if adaptive else 1)
        lookups, drafts = defaults if num_draft_tokens is None else (num_draft_tokens,) * 2
        # After a match of two tokens the head is right more often.
        lookup = PromptLookup(lookups, num_branches=branches, min_ngram=3)

        def make(target: Any) -> Drafter:
            drafter = MTPDrafter(load_default_head(target), drafts)
            drafter = Adaptive(drafter) if adaptive else drafter
            return drafter if name is DrafterName.head else Hybrid(lookup, drafter)

        drafter_name = "draft head" + ", adaptive" * adaptive
        if name is DrafterName.lookup_head:
            drafter_name = f"{lookup_name}, else {drafter_name}"
        return make, drafter_name
    if num_draft_tokens is None:
        num_draft_tokens = 8 if adaptive else 4
    if draft_model is None:
        drafter_name = lookup_name
        drafter = PromptLookup(num_draft_tokens, num_branches=branches)
    else:
        parsed = None if widths is None else _parse_widths(widths)
        loaded, tokenizer, drafter_name = _load(draft_model, dequantize)
        if parsed is None:
            drafter = DraftModel(loaded, tokenizer, num_draft_tokens)
        else:
            drafter = DraftTree(loaded, tokenizer, parsed)
            drafter_name += ", as a tree"
    if adaptive:
        return lambda _: Adaptive(drafter), f"{drafter_name}, adaptive"
    return lambda _: drafter, drafter_name


def _parse_widths(text: str) -> list[int]:
    try:
        return [int(width) for width in text.split(",")]
    except ValueError:
        raise ValueError(f"--widths: expected numbers such as 3,2,1, got {text!r}") from None


@contextmanager
def _loading(name: str | None) -> Iterator[None]:
    """Makes one line of whatever is wrong with a model's files."""
    from .models import DEFAULT_MODEL

    if name and os.path.sep in name and not name[0].isalnum() and not Path(name).exists():
        _fail(f"cannot load {name}: no such folder")
    try:
        yield
    except Exception as error:  # the libraries that read them raise of every kind
        is_usual = isinstance(error, (OSError, ValueError, ImportError)) and str(error)
        reason = str(error) if is_usual else f"{type(error).__name__}: {error}"
        _fail(f"cannot load {name or DEFAULT_MODEL.name}: {reason}")


def _load(name: str | None, dequantize: bool) -> tuple[Any, Any, str]:
    import mlx.core as mx

    from .models import DEFAULT_MODEL, is_quantized, load, unpack

    shown = name or DEFAULT_MODEL.name
    with _loading(name):
        model, tokenizer = load(name)
        if is_quantized(model):
            if dequantize:
                unpack(model)
            elif sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu):
                _note(
                    f"the weights of {shown} are quantised, which takes up to 12 times as long on "
                    "a CPU; --dequantize unpacks them, if there is memory for float32"
                )
    return model, tokenizer, shown


def _encode(prompt: str, tokenizer: Any, chat: bool | None) -> str | list[int]:
    if chat and not tokenizer.has_chat_template:
        raise ValueError("--chat: expected a model with a chat template, got one without")
    if chat is False or not tokenizer.has_chat_template:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except Exception as error:  # it is a program of the model's
        raise ValueError(
            f"cannot apply the model's chat template: {type(error).__name__}: {error}; --no-chat "
            "goes without it"
        ) from error


def _can_draft(target: Any, tokenizer: Any, prompt: str | list[int], max_tokens: int) -> bool:
    """Whether the model's cache can be rolled back anywhere in the text."""
    from .cached_model import CachedModel

    length = len(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    try:
        CachedModel(target).check_trimmable("generate", length + max_tokens)
    except ValueError:
        return False
    return True


def _collect(
    stream: Iterable[GeneratedToken], show: Callable[[GeneratedToken], None] = lambda _: None
) -> Generation:
    """All of a text; without a ``finish_reason`` if Ctrl-C ended it."""
    from .generate import Generation, Statistics

    items = []
    try:
        for item in stream:
            items.append(item)
            show(item)
    except KeyboardInterrupt:
        if not items:
            return Generation("", [], [], None, None, Statistics())
    return Generation.join(items)


def _show(stream: Iterable[GeneratedToken], setup: dict[str, str], plain: bool) -> Generation:
    """Print the tokens as they come."""
    output, notes = Console(), Console(stderr=True, highlight=False)
    is_coloured = not plain and output.color_system is not None and not output.no_color
    for name, value in setup.items():
        # A library's path is for --json.
        shown = value.split(" (")[0] if name == "blas" else value
        notes.print(Text(f"{name:8} ", "bold"), shown, sep="", soft_wrap=True, markup=False)
    if is_coloured:
        legend = "  ".join(f"[{colour}]{meaning}[/]" for colour, _, meaning in SOURCES.values())
        notes.print(f"[bold]{'colours':8}[/] {legend}", soft_wrap=True)
    notes.print()

    def show(item: GeneratedToken) -> None:
        text = item.text
        if output.is_terminal:
            text = text.translate(CONTROL_PICTURES)
        if text and is_coloured:
            text = f"\x1b[{SOURCES[item.source][1]}m{text}\x1b[0m"
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        return _collect(stream, show)
    finally:
        if output.is_terminal:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _summarise(result: Generation, plain: Generation | None, same_text: bool) -> None:
    statistics = result.statistics
    notes = Console(stderr=True, highlight=False)

    def line(name: str, value: str) -> None:
        # A narrow terminal breaks a line where it ends; columns would be narrower still.
        notes.print(f"[bold]{name:8}[/]  {value}", soft_wrap=True)

    notes.print()
    line("prompt", _speed(statistics.prompt_tokens, statistics.prompt_tokens_per_second))
    endings = {"stop": "a stop token", "length": "--max-tokens", None: "Ctrl-C"}
    speed = _speed(statistics.generated_tokens, statistics.tokens_per_second)
    line("text", f"{speed}, ended by {endings[result.finish_reason]}")
    if statistics.drafted:
        line(
            "cycles",
            f"{statistics.cycles}, of {statistics.tokens_per_cycle:.2f} tokens each, "
            f"{statistics.mean_accepted_length:.2f} of them accepted drafts",
        )
        line("accepted", f"{statistics.acceptance_rate:.0%} of {statistics.drafted} draft tokens")
        for slot, rate in enumerate(statistics.slot_acceptance_rates):
            line(f"  slot {slot + 1}", f"[green]{_bar(rate, notes.encoding)}[/] {rate:.0%}")
    if statistics.generation_time:
        line("time", _time_shares(statistics))
    if not statistics.exact:
        line("lossy", "[red]the text is not a sample of the target[/]")
    if plain is not None and plain.finish_reason is not None:
        speed = _speed(plain.statistics.generated_tokens, plain.statistics.tokens_per_second)
        speedup = statistics.tokens_per_second / plain.statistics.tokens_per_second
        line("plain", f"{speed}; drafting is {speedup:.2f} times as fast")
        if same_text:
            line("", _difference(result.tokens, plain.tokens))
        elif statistics.exact:
            line("", "another sample of the same distribution; --rule coupled gives the same")


def _bar(rate: float, encoding: str, width: int = 24) -> str:
    """A bar of eighths of a letter, or of # where the terminal has no such letters."""
    whole, eighths = divmod(round(8 * width * rate), 8)
    parts = ("", *"\u258f\u258e\u258d\u258c\u258b\u258a\u2589")
    bar = "\u2588" * whole + parts[eighths]
    try:
        bar.encode(encoding)
    except UnicodeEncodeError:
        bar = "#" * whole
    return f"{bar:{width}}"


def _speed(tokens: int, tokens_per_second: float) -> str:
    return f"{tokens} tokens, {tokens_per_second:.1f} tokens/s"


def _time_shares(statistics: Statistics) -> str:
    phases = {
        "draft": statistics.draft_time,
        "target": statistics.target_time,
        "verify": statistics.verify_time,
    }
    shares = (
        f"{name} {seconds / statistics.generation_time:.1%}" for name, seconds in phases.items()
    )
    return ", ".join(shares)


def _difference(tokens: list[int], plain: list[int]) -> str:
    if tokens == plain:
        return "[green]the same text[/]"
    same = 0
    while tokens[same : same + 1] == plain[same : same + 1] != []:
        same += 1
    return f"[red]another text from token {same + 1} on[/]"


def _report(result: Generation) -> dict[str, Any]:
    statistics = result.statistics
    return {
        "text": result.text,
        "tokens": result.tokens,
        "sources": result.sources,
        "finish_reason": result.finish_reason or "interrupted",
        "statistics": {
            **asdict(statistics),
            "tokens_per_second": statistics.tokens_per_second,
            "prompt_tokens_per_second": statistics.prompt_tokens_per_second,
            "tokens_per_cycle": statistics.tokens_per_cycle,
            "mean_accepted_length": statistics.mean_accepted_length,
            "acceptance_rate": statistics.acceptance_rate,
            "slot_acceptance_rates": statistics.slot_acceptance_rates,
        },
    }


if __name__ == "__main__":
    main()
