"""The command line: ``exactspec generate``, ``exactspec bench`` and ``exactspec doctor``."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import Sampling, __version__
from .blas import blas_in_use
from .rules import EXACT_RULES, Cascade, Rule, Typical, check_rule

# mlx-lm takes seconds to import, so the functions that need it do that: --help must not wait.
if TYPE_CHECKING:
    from .drafters import Drafter
    from .generate import GeneratedToken, Generation, Statistics

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

SOURCES = {
    "draft": ("green", "accepted draft"),
    "residual": ("yellow", "drawn in place of a rejected draft"),
    "bonus": ("cyan", "drawn after the drafts"),
}


class Level(str, Enum):
    """What to benchmark."""

    operation = "operation"
    loop = "loop"


class DrafterName(str, Enum):
    """Drafters that need no other model."""

    head = "head"
    lookup = "lookup"
    none = "none"


def main() -> None:
    """Run the command line."""
    app(prog_name="exactspec")


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
        typer.Argument(help="Default: standard input if it is a pipe, else an example."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face name. Default: a packaged SmolLM2.")
    ] = None,
    drafter: Annotated[
        DrafterName | None,
        typer.Option(
            help="'lookup' drafts what followed the same tokens earlier in the text, 'head' does "
            "so after three of them and else drafts with the packaged model's own head, 'none' is "
            "plain decoding. Default: head, but lookup with --model."
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
        int | None, typer.Option(help="The same seed gives the same text, unless --adaptive.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Wrap the prompt in the model's chat template. Default: if it has one.",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then generate by plain decoding as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Generate text, coloured by where each token came from.

    The text goes to standard output, everything else to standard error.
    """
    prompt = _read_prompt(prompt, prompt_file)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    try:
        if compare and drafter is DrafterName.none:
            raise ValueError("--compare: expected a drafter to compare, got --drafter none")
        acceptance = _parse_rule(rule)
        is_tree = widths is not None or (num_branches or 1) > 1
        if is_tree and acceptance != "token":
            raise ValueError(f"--rule: expected token for a tree of drafts, got {rule!r}")
        if isinstance(acceptance, Cascade) and draft_model is None:
            raise ValueError(f"--rule: expected --draft-model with it, got {rule!r} without")
        from .generate import Generation, check_options, stream_generate

        # Before the model, which takes seconds to load.
        check_options(None, sampling, acceptance, max_tokens, seed)
        if compare and acceptance == "coupled" and seed is None:
            seed = secrets.randbits(32)  # both texts are made of the same noise
        if drafter is None and draft_model is None:
            drafter = DrafterName.head if model is None else DrafterName.lookup
        make_drafter, drafter_name = _plan_drafter(
            drafter, draft_model, num_draft_tokens, num_branches, widths, adaptive
        )
        target, tokenizer, model_name = _load(model)
        proposer = make_drafter(target)
        options = {
            "prompt": _encode(prompt, tokenizer, chat),
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
            result = Generation.join(list(stream))
        else:
            result = _show(stream, setup, plain=proposer is None)
        plain = None
        if compare:
            plain = Generation.join(list(stream_generate(target, tokenizer, **options)))
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        _fail(_name_options(str(error)))
    if as_json:
        print(json.dumps({**setup, **_report(result), "plain": plain and _report(plain)}))
    else:
        _summarise(result, plain, same_text=temperature == 0 or rule == "coupled")


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

    Every peer is verified before it is timed; exactspec\\[bench] installs them, and the plots.
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
        raise typer.Exit(130 if reason == INTERRUPTED else 1)  # 128 + SIGINT, as shells have it


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


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        _fail("prompt: expected PROMPT or --prompt-file, got both")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            _fail(f"--prompt-file: {prompt_file}: {error.strerror}")
        except UnicodeDecodeError:
            _fail(f"--prompt-file: {prompt_file}: expected text in UTF-8")
    if prompt is None:
        prompt = _read_stdin()
    if prompt is None:
        prompt = files("exactspec").joinpath("data/prompt.txt").read_text(encoding="utf-8")
    if not prompt.strip():
        _fail("prompt: expected some text, got none")
    return prompt.rstrip("\n")


def _read_stdin() -> str | None:
    """Standard input if it is a pipe or a file; None for a terminal or /dev/null."""
    if sys.stdin is None:
        return None
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return sys.stdin.read() or None  # it is in memory
    return None if stat.S_ISCHR(mode) else sys.stdin.read()


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
    draft_model: str | None,
    num_draft_tokens: int | None,
    num_branches: int | None,
    widths: str | None,
    adaptive: bool,
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
    branches = 1 if num_branches is None else num_branches
    lookup_name = "prompt lookup" + f" of {branches} branches" * (branches > 1)
    if name is DrafterName.head:
        from .heads import load_default_head

        defaults = (4, 4 if adaptive else 1)
        lookups, drafts = defaults if num_draft_tokens is None else (num_draft_tokens,) * 2
        # After a match of two tokens the head is right more often.
        lookup = PromptLookup(lookups, num_branches=branches, min_ngram=3)

        def make(target: Any) -> Drafter:
            drafter = MTPDrafter(load_default_head(target), drafts)
            return Hybrid(lookup, Adaptive(drafter) if adaptive else drafter)

        return make, f"{lookup_name}, else draft head" + ", adaptive" * adaptive
    if num_draft_tokens is None:
        num_draft_tokens = 8 if adaptive else 4
    if draft_model is None:
        drafter_name = lookup_name
        drafter = PromptLookup(num_draft_tokens, num_branches=branches)
    else:
        model, tokenizer, drafter_name = _load(draft_model)
        if widths is None:
            drafter = DraftModel(model, tokenizer, num_draft_tokens)
        else:
            drafter = DraftTree(model, tokenizer, _parse_widths(widths))
            drafter_name += ", as a tree"
    if adaptive:
        return lambda _: Adaptive(drafter), f"{drafter_name}, adaptive"
    return lambda _: drafter, drafter_name


def _parse_widths(text: str) -> list[int]:
    try:
        return [int(width) for width in text.split(",")]
    except ValueError:
        raise ValueError(f"--widths: expected numbers such as 3,2,1, got {text!r}") from None


def _load(name: str | None) -> tuple[Any, Any, str]:
    from .models import DEFAULT_MODEL, load

    if name and os.path.sep in name and not name[0].isalnum() and not Path(name).exists():
        _fail(f"cannot load {name}: no such folder")
    try:
        return *load(name), name or DEFAULT_MODEL.name
    except (OSError, ValueError, KeyError, ImportError) as error:
        _fail(f"cannot load {name or DEFAULT_MODEL.name}: {error}")


def _encode(prompt: str, tokenizer: Any, chat: bool | None) -> str | list[int]:
    if chat and not tokenizer.has_chat_template:
        raise ValueError("--chat: expected a model with a chat template, got one without")
    if chat is False or not tokenizer.has_chat_template:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def _show(stream: Iterable[GeneratedToken], setup: dict[str, str], plain: bool) -> Generation:
    """Print the tokens as they come."""
    from .generate import Generation

    output, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    for name, value in setup.items():
        # A library's path is for --json.
        shown = value.split(" (")[0] if name == "blas" else value
        notes.print(Text(f"{name:8} ", "bold"), shown, sep="", soft_wrap=True, markup=False)
    if not plain and output.is_terminal:
        legend = "  ".join(f"[{style}]{meaning}[/]" for style, meaning in SOURCES.values())
        notes.print(f"[bold]{'colours':8}[/] {legend}", soft_wrap=True)
    notes.print()
    items = []
    try:
        for item in stream:
            items.append(item)
            style = "" if plain else SOURCES[item.source][0]
            output.print(Text(item.text, style), end="", soft_wrap=True)
    finally:
        output.print()
    return Generation.join(items)


def _summarise(result: Generation, plain: Generation | None, same_text: bool) -> None:
    statistics = result.statistics
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    table.add_row("prompt", _speed(statistics.prompt_tokens, statistics.prompt_tokens_per_second))
    ending = {"stop": "a stop token", "length": "--max-tokens"}[result.finish_reason]
    table.add_row(
        "text",
        f"{_speed(statistics.generated_tokens, statistics.tokens_per_second)}, ended by {ending}",
    )
    if statistics.drafted:
        table.add_row(
            "cycles",
            f"{statistics.cycles}, of {statistics.tokens_per_cycle:.2f} tokens each, "
            f"{statistics.mean_accepted_length:.2f} of them accepted drafts",
        )
        table.add_row(
            "accepted", f"{statistics.acceptance_rate:.0%} of {statistics.drafted} draft tokens"
        )
        for slot, rate in enumerate(statistics.slot_acceptance_rates):
            bar = Table.grid(padding=(0, 1))
            bar.add_row(Bar(1, 0, rate, width=24, color="green"), f"{rate:.0%}")
            table.add_row(f"  slot {slot + 1}", bar)
    table.add_row("time", _time_shares(statistics))
    if not statistics.exact:
        table.add_row("lossy", "[red]the text is not a sample of the target[/]")
    if plain is not None:
        speedup = statistics.tokens_per_second / plain.statistics.tokens_per_second
        table.add_row(
            "plain",
            f"{_speed(plain.statistics.generated_tokens, plain.statistics.tokens_per_second)}; "
            f"drafting is {speedup:.2f} times as fast",
        )
        if same_text:
            table.add_row("", _difference(result.tokens, plain.tokens))
        elif statistics.exact:
            table.add_row(
                "", "another sample of the same distribution; --rule coupled gives the same"
            )
    notes = Console(stderr=True, highlight=False)
    notes.print()
    with notes.capture() as rendered:
        notes.print(table)
    for line in rendered.get().splitlines():  # the table fills its lines with spaces
        print(line.rstrip(), file=notes.file)


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
        "finish_reason": result.finish_reason,
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
