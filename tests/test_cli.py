"""The command line, on a tiny model in a folder; test_real_model.py runs it on a real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from exactspec import Sampling, __version__, cli, heads, models
from exactspec.drafters import DraftModel, PromptLookup
from exactspec.generate import generate
from exactspec.models import load
from toy_models import LLAMA_CONFIG, save_head, tiny_llama, toy_tokenizer
from typer.testing import CliRunner

CHAT_TEMPLATE = "{% for m in messages %}w9 {{ m.content }} w8{% endfor %}"
PROMPT = "w5 w7 w1 w4 w5 w7 w1"  # its greedy text has tokens of all sources, and an end


def save_model(folder: Path, *, vocab_size: int = 32, noise: float = 0, chat: bool = False) -> str:
    tiny_llama(vocab_size, noise=noise).save_weights(str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "vocab_size": vocab_size}))
    tokenizer = toy_tokenizer(vocab_size)._tokenizer
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    def folder(name, **options):
        return save_model(tmp_path_factory.mktemp(name), **options)

    return {
        "target": folder("target"),
        "draft": folder("draft", noise=0.02),
        "chat": folder("chat", chat=True),
        "other": folder("other", vocab_size=31),
    }


def invoke(*arguments, stdin="", code=0, **options):
    result = CliRunner().invoke(cli.app, ["generate", *map(str, arguments)], stdin, **options)
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments, **options):
    return json.loads(invoke(*arguments, "--json", **options).stdout)


def expected(folder, prompt=PROMPT, **options):
    model, tokenizer = load(folder)
    options = {"sampling": Sampling(temperature=0), "max_tokens": 256, **options}
    return generate(model, tokenizer, prompt, **options)


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.stdout == f"exactspec {__version__}\n" and result.exit_code == 0


def test_help_does_not_wait_for_mlx_lm():
    code = "import sys, exactspec.cli; sys.exit('mlx_lm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_text_goes_to_standard_output_and_notes_to_standard_error(folders):
    result = invoke(PROMPT, "--model", folders["target"], "--max-tokens", 30, "--compare")
    text = expected(folders["target"], max_tokens=30)
    assert result.stdout == text.text + "\n"
    notes = result.stderr
    assert re.search(rf"^model +{re.escape(folders['target'])}$", notes, re.MULTILINE)
    assert re.search(r"^drafter +prompt lookup$", notes, re.MULTILINE)
    assert re.search(r"^blas +(\S.*BLAS|Accelerate)", notes, re.MULTILINE)
    for pattern in (
        r"prompt +7 tokens, [\d.]+ tokens/s",
        rf"text +{len(text.tokens)} tokens, [\d.]+ tokens/s, ended by a stop token",
        r"cycles +\d+, of \d\.\d\d tokens each, \d\.\d\d of them accepted drafts",
        r"accepted +\d+% of \d+ draft tokens",
        r"slot 1 .* \d+%",
        r"time +draft [\d.]+%, target [\d.]+%, verify [\d.]+%",
        rf"plain +{len(text.tokens)} tokens, [\d.]+ tokens/s; drafting is [\d.]+ times as fast",
        r"the same text",
    ):
        assert re.search(pattern, notes), f"{pattern!r} not in\n{notes}"
    assert not re.search(r"[ \t]$", notes, re.MULTILINE)


@pytest.mark.parametrize("rule", ["token", "coupled", "typical"])
def test_what_the_summary_says_of_a_sampled_plain_text(folders, rule):
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 12, "--compare")
    notes = invoke(*arguments, "--temperature", 0.8, "--rule", rule, "--seed", 5).stderr
    assert ("another sample of the same distribution" in notes) == (rule == "token")
    assert ("the same text" in notes) == (rule == "coupled")
    assert ("the text is not a sample of the target" in notes) == (rule == "typical")


def test_token_limit_and_plain_decoding_in_the_summary(folders):
    notes = invoke(
        PROMPT, "--model", folders["target"], "--max-tokens", 5, "--drafter", "none"
    ).stderr
    assert re.search(r"drafter +none", notes) and "ended by --max-tokens" in notes
    assert "accepted" not in notes and "slot" not in notes


def test_colours_show_the_sources(folders):
    result = invoke(
        PROMPT, "--model", folders["target"], "--max-tokens", 30, env={"FORCE_COLOR": "1"}
    )
    text = expected(folders["target"], max_tokens=30, drafter=PromptLookup())
    shown = re.findall(r"\x1b\[(\d+)m([^\x1b]*)\x1b\[0m", result.stdout)
    colours = {"draft": "32", "residual": "33", "bonus": "36"}
    assert [colour for colour, _ in shown] == [colours[s] for s in text.sources[: len(shown)]]
    assert "".join(segment for _, segment in shown) == text.text
    assert "in place of a rejected draft" in result.stderr
    plain = invoke(
        PROMPT, "--model", folders["target"], "--drafter", "none", env={"FORCE_COLOR": "1"}
    )
    assert "\x1b" not in plain.stdout and "in place of" not in plain.stderr


def test_prompt_from_a_file_from_standard_input_and_from_the_package(folders, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    text = expected(folders["target"], max_tokens=9).tokens
    arguments = ("--model", folders["target"], "--max-tokens", 9)
    assert run_json("--prompt-file", file, *arguments)["tokens"] == text
    assert run_json(*arguments, stdin=PROMPT + "\n")["tokens"] == text
    # An argument wins over a pipe.
    assert run_json(PROMPT, *arguments, stdin="w2")["tokens"] == text
    # An empty pipe is a mistake, not a wish for the example; /dev/null is no input at all.
    command = [sys.executable, "-m", "exactspec.cli", "generate", *map(str, arguments)]
    empty = subprocess.run(command, input="", capture_output=True, text=True)
    assert empty.returncode == 1
    assert empty.stderr == "error: prompt: expected some text, got none\n"
    example = Path(cli.__file__).with_name("data") / "prompt.txt"
    words = len(example.read_text().split())
    assert run_json(*arguments)["statistics"]["prompt_tokens"] == words > 50


def test_chat_template(folders):
    arguments = (PROMPT, "--model", folders["chat"], "--max-tokens", 5)
    wrapped = expected(folders["chat"], f"w9 {PROMPT} w8", max_tokens=5).tokens
    assert run_json(*arguments)["tokens"] == wrapped
    assert run_json(*arguments, "--chat")["tokens"] == wrapped
    bare = expected(folders["chat"], max_tokens=5).tokens
    assert run_json(*arguments, "--no-chat")["tokens"] == bare != wrapped


@pytest.mark.parametrize("kind", ["lookup", "draft model", "none"])
def test_json(folders, kind):
    options = {
        "lookup": ["--drafter", "lookup", "--num-draft-tokens", 3],
        "draft model": ["--draft-model", folders["draft"], "--num-draft-tokens", 3],
        "none": ["--drafter", "none"],
    }[kind]
    drafter = {
        "lookup": lambda: PromptLookup(3),
        "draft model": lambda: DraftModel(*load(folders["draft"]), 3),
        "none": lambda: None,
    }[kind]()
    sampling = Sampling(temperature=0.8, top_k=9, top_p=0.95, min_p=0.01)
    filters = ["--temperature", 0.8, "--top-k", 9, "--top-p", 0.95, "--min-p", 0.01]
    arguments = ["--model", folders["target"], *options, *filters, "--max-tokens", 12, "--seed", 5]
    compare = [] if kind == "none" else ["--compare"]
    report = run_json(PROMPT, *arguments, *compare)
    text = expected(folders["target"], sampling=sampling, drafter=drafter, max_tokens=12, seed=5)
    for field in ("text", "tokens", "sources", "finish_reason"):
        assert report[field] == getattr(text, field)
    assert report["model"] == folders["target"]
    assert (
        report["drafter"]
        == {
            "lookup": "prompt lookup",
            "draft model": folders["draft"],
            "none": "none",
        }[kind]
    )
    assert "BLAS" in report["blas"] or report["blas"] == "Accelerate"
    statistics = report["statistics"]
    assert statistics["generated_tokens"] == len(text.tokens)
    assert statistics["slot_accepted"] == text.statistics.slot_accepted
    assert statistics["tokens_per_second"] > 0
    assert statistics["target_time"] > 0
    if compare:
        plain = expected(folders["target"], sampling=sampling, max_tokens=12, seed=5)
        assert report["plain"]["tokens"] == plain.tokens
        report = run_json(PROMPT, *arguments)
    assert report["plain"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-file", "/no/such/file"], r"--prompt-file: .*No such file"),
        (["hi", "--prompt-file", "x"], r"prompt: expected PROMPT or --prompt-file, got both"),
        (["--model", "/no/such/model"], r"cannot load /no/such/model: "),
        (["--draft-model", "/no/such/model"], r"cannot load /no/such/model: "),
        (["--draft-model", "{draft}", "--drafter", "lookup"], r"drafter: expected --drafter or"),
        (["--drafter", "none", "--num-draft-tokens", 2], r"--num-draft-tokens: expected a drafter"),
        (["--drafter", "none", "--adaptive"], r"--adaptive: expected a drafter with it, got"),
        (["--num-draft-tokens", 0], r"--num-draft-tokens: expected 1 to 254, got 0"),
        (["--model", "{target}", "--chat"], r"--chat: expected a model with a chat template"),
        (["--top-p", 2], r"--top-p: expected a value in \[0, 1\], got 2.0"),
        (["--min-p", -1], r"--min-p: expected a value in \[0, 1\], got -1.0"),
        (["--top-k", 10**400], r"--top-k: expected a value .*, got an integer of 1329 bits"),
        (["--temperature", 1e300], r"--temperature: expected a value .*, got 1e\+300"),
        (["--model", "{target}", "--max-tokens", 0], r"--max-tokens: expected at least 1, got 0"),
        (["--model", "{target}", "--draft-model", "{other}"], r".* expected the target's tokeniz"),
        (["", "--model", "{target}"], r"prompt: expected some text, got none"),
        (["w1", "--seed", -1, "--model", "{target}"], r"--seed: expected a value in .*, got -1"),
        (["w1", "--drafter", "none", "--compare"], r"--compare: expected a drafter to compare"),
        (["--drafter", "head", "--num-draft-tokens", 0], r"--num-draft-tokens: .*, got 0"),
        (["--drafter", "head", "--draft-model", "x"], r"drafter: expected --drafter or"),
        (["w1", "--model", "/no/such/folder"], r"cannot load /no/such/folder: no such folder"),
    ],
)
def test_errors_are_one_line(folders, arguments, message):
    arguments = [str(argument).format(**folders) for argument in arguments]
    result = invoke(*arguments, "--json", code=1)
    assert result.stdout == ""
    assert re.fullmatch(rf"error: {message}.*\n", result.stderr), result.stderr


def test_adaptive_draft_length(folders):
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 20, "--adaptive")
    text = expected(folders["target"], max_tokens=20).tokens
    for options, name, most in (
        ([], "prompt lookup, adaptive", 8),
        (["--draft-model", folders["draft"]], f"{folders['draft']}, adaptive", 8),
        (["--num-draft-tokens", 1], "prompt lookup, adaptive", 1),
    ):
        report = run_json(*arguments, *options)
        assert report["tokens"] == text and report["drafter"] == name
        assert 1 <= len(report["statistics"]["slot_drafted"]) <= most


def test_draft_head(folders, tmp_path, monkeypatch):
    model, _ = load(folders["target"])
    head = tmp_path / "head.safetensors"
    save_head(head, model, [3, 1, 9, 20])
    monkeypatch.setattr(heads, "DEFAULT_HEAD", head)
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 20, "--drafter", "head")
    text = expected(folders["target"], max_tokens=20).tokens
    for options, name, most in (
        ([], "prompt lookup, else draft head", 4),
        (["--num-branches", 2], "prompt lookup of 2 branches, else draft head", 4),
        (["--adaptive"], "prompt lookup, else draft head, adaptive", 4),
        (["--num-draft-tokens", 1], "prompt lookup, else draft head", 1),
    ):
        report = run_json(*arguments, *options)
        assert report["tokens"] == text and report["drafter"] == name
        assert 1 <= len(report["statistics"]["slot_drafted"]) <= most
    result = invoke(PROMPT, "--model", folders["other"], "--drafter", "head", code=1)
    assert re.fullmatch(r"error: .* model: expected a llama, .*\n", result.stderr)


def test_missing_default_model(monkeypatch):
    missing = models.DEFAULT_MODEL._replace(package="a_package_that_does_not_exist")
    monkeypatch.setattr(models, "DEFAULT_MODEL", missing)
    result = invoke(PROMPT, code=1)
    assert "run `pip install" in result.stderr and result.stderr.count("\n") == 1


def test_usage_errors(folders):
    for arguments in (["--temperature", "warm"], ["--drafter", "magic"], ["--no-such-option"]):
        result = invoke(*arguments, code=2)
        assert "Traceback" not in result.stderr and "Usage" in result.stderr


def test_nan_logits_end_with_an_error(folders, tmp_path):
    folder = save_model(tmp_path)
    weights = mx.load(f"{folder}/model.safetensors")
    weights["model.norm.weight"] *= mx.nan
    mx.save_safetensors(f"{folder}/model.safetensors", weights)
    result = invoke(PROMPT, "--model", folder, code=1)
    assert result.stderr.splitlines()[-1].startswith("error: [stream_generate] target logits")


def test_installed_command(folders):
    command = [Path(sys.executable).with_name("exactspec"), "generate", "--max-tokens", "9"]
    command += ["--model", folders["target"], "--json"]
    done = subprocess.run(command, input=PROMPT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tokens"] == expected(folders["target"], max_tokens=9).tokens
