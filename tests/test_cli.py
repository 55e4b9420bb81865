"""The command line, on a tiny model in a folder; test_real_model.py runs it on a real one."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from exactspec import Sampling, __version__, cli, heads, models
from exactspec import generate as generate_module
from exactspec.drafters import DraftModel, MTPDrafter, PromptLookup
from exactspec.generate import generate
from exactspec.models import load
from mlx import nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.llama import Model
from mlx_lm.utils import save_model as save_mlx_model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from toy_models import (
    ARCHITECTURES,
    LLAMA_CONFIG,
    save_head,
    tiny_llama,
    tiny_model,
    toy_tokenizer,
)
from transformers import PreTrainedTokenizerFast
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
    assert result.stdout == text.text
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
        (["--model", ""], r"--model: expected a folder or a name, got an empty one"),
        (["--model", "{target}", "--draft-model", "{other}"], r".* expected the target's tokeniz"),
        (["", "--model", "{target}"], r"prompt: expected some text, got none"),
        (["w1", "--seed", -1, "--model", "{target}"], r"--seed: expected a value in .*, got -1"),
        (["w1", "--drafter", "none", "--compare"], r"--compare: expected a drafter to compare"),
        (["--drafter", "head", "--num-draft-tokens", 0], r"--num-draft-tokens: .*, got 0"),
        (["--drafter", "head", "--draft-model", "x"], r"drafter: expected --drafter or"),
        (["--drafter", "head", "--num-branches", 2], r"--num-branches: expected prompt lookup"),
        (["a\udcff"], r"prompt: expected text in UTF-8"),
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
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 20)
    text = expected(folders["target"], max_tokens=20).tokens
    for drafter, options, name, most in (
        ("lookup+head", [], "prompt lookup, else draft head", 4),
        ("lookup+head", ["--num-branches", 2], "prompt lookup of 2 branches, else draft head", 4),
        ("lookup+head", ["--adaptive"], "prompt lookup, else draft head, adaptive", 4),
        ("lookup+head", ["--num-draft-tokens", 1], "prompt lookup, else draft head", 1),
        ("head", [], "draft head", 1),
        ("head", ["--adaptive"], "draft head, adaptive", 4),
        ("head", ["--num-draft-tokens", 2], "draft head", 2),
    ):
        report = run_json(*arguments, "--drafter", drafter, *options)
        assert report["tokens"] == text and report["drafter"] == name
        assert 1 <= len(report["statistics"]["slot_drafted"]) <= most
    # The head alone: every draft is its own.
    drafter = MTPDrafter(heads.load_default_head(model), 2)
    alone = expected(folders["target"], max_tokens=20, drafter=drafter).statistics
    assert report["statistics"]["slot_accepted"] == alone.slot_accepted


@pytest.mark.parametrize("drafter", ["head", "lookup+head"])
def test_a_head_of_another_model_is_refused_before_loading_it(folders, drafter, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    result = invoke(PROMPT, "--model", folders["other"], "--drafter", drafter, code=1)
    line = r"error: the draft head: expected SmolLM2.*, of hidden_size 576, got a llama of 32\n"
    assert re.fullmatch(line, result.stderr)


def test_the_configuration_of_a_model_on_a_hub_is_enough_to_refuse_a_head(tmp_path, monkeypatch):
    downloaded = []

    def download(name, file):
        downloaded.append((name, file))
        (tmp_path / file).write_text(json.dumps(LLAMA_CONFIG))
        return str(tmp_path / file)

    monkeypatch.setattr(models, "hf_hub_download", download)
    monkeypatch.setattr(models, "load", None)
    result = invoke(PROMPT, "--model", "some/model", "--drafter", "head", code=1)
    assert result.stderr.startswith("error: the draft head: expected SmolLM2")
    assert downloaded == [("some/model", "config.json")]


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


# Text in and out, byte for byte

ODD_WORDS = ["a\tb", "\r\n", "\x07\x1b]0;title\x07", "\U0001f600", "\x0b\x0c\x08", "\x85\x7f"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A model that says what terminals interpret."""
    folder = save_model(tmp_path_factory.mktemp("odd"))
    said = dict.fromkeys(expected(folder, max_tokens=30).tokens)
    words = {f"w{i}": i for i in (1, 4, 5, 7)}
    others = [i for i in [*said, *range(32)] if i not in (0, *words.values())]
    words |= {f"{ODD_WORDS[at % 6]}{i}": i for at, i in enumerate(dict.fromkeys(others))}
    tokenizer = Tokenizer(WordLevel({"</s>": 0, **words}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return folder


def test_what_a_model_says_is_not_altered(odd):
    text = expected(odd, max_tokens=30).text
    assert all(word in text for word in ODD_WORDS)
    arguments = (PROMPT, "--model", odd, "--max-tokens", 30)
    assert invoke(*arguments).stdout_bytes == text.encode()
    assert run_json(*arguments)["text"] == text


def test_a_terminal_obeys_no_control_characters_of_a_model(odd):
    arguments = (PROMPT, "--model", odd, "--max-tokens", 30)
    text = expected(odd, max_tokens=30).text
    shown = invoke(*arguments, env={"FORCE_COLOR": "1"}).stdout_bytes.decode()
    shown = re.sub(r"\x1b\[(3[236]|0)m", "", shown)
    assert shown[-1] == "\n" and "a\tb" in shown
    assert "\u2407\u241b]0;title\u2407" in shown and "\u240d\n" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert len(shown) == len(text) + 1


def test_a_prompt_is_taken_byte_for_byte(folders, tmp_path, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        cli, "_encode", lambda prompt, tokenizer, chat: prompts.append(prompt) or [5]
    )
    arguments = ("--model", folders["target"], "--max-tokens", 1)
    file = tmp_path / "prompt.txt"
    for data, text in (
        (b"def f(x):\n", "def f(x):\n"),
        (b"a\r\n\tb \n\n", "a\r\n\tb \n\n"),
        (b"\xef\xbb\xbfa\n", "a\n"),  # a byte order mark
        (b"a\xef\xbb\xbf", "a\ufeff"),
    ):
        file.write_bytes(data)
        invoke("--prompt-file", file, *arguments)
        invoke(*arguments, stdin=data)
        invoke(text, *arguments)
        assert prompts == [text] * 3
        prompts.clear()
    file.write_bytes(b"a\xff")
    result = invoke("--prompt-file", file, *arguments, code=1)
    assert re.fullmatch(r"error: --prompt-file: .*: expected text in UTF-8\n", result.stderr)
    result = invoke(*arguments, stdin=b"a\xff", code=1)
    assert result.stderr == "error: standard input: expected text in UTF-8\n"


def run_main(monkeypatch, stdout, *arguments):
    """The command in this process, on a standard output of its own: exit status, and notes."""
    notes = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["exactspec", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", notes)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0, notes.getvalue()


def test_an_ascii_terminal_shows_what_it_can(odd, monkeypatch):
    buffer = io.BytesIO()
    stdout = io.TextIOWrapper(buffer, encoding="ascii")
    code, _ = run_main(monkeypatch, stdout, "generate", PROMPT, "--model", odd, "--max-tokens", 30)
    assert code == 0
    assert buffer.getvalue() == expected(odd, max_tokens=30).text.encode("ascii", "replace")
    assert cli._bar(0.5, "ascii") == "#" * 12 + " " * 12
    assert cli._bar(0.51, "utf-8") == "\u2588" * 12 + "\u258e" + " " * 11


COMMANDS = [["--version"], ["generate", "--help"], ["generate", "w1 w2", "--max-tokens", 5]]


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize("command", COMMANDS, ids=["version", "help", "text"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_an_error_line(folders, monkeypatch, command, as_json):
    if command[-1] == 5:
        command = [*command, "--model", folders["target"], *as_json]
    code, notes = run_main(monkeypatch, open("/dev/full", "w"), *command)
    assert code == 1
    assert notes.splitlines()[-1] == f"error: standard output: {os.strerror(errno.ENOSPC)}"


@pytest.mark.parametrize("command", [*COMMANDS, [*COMMANDS[2], "--json"]], ids=str)
def test_a_reader_that_has_gone_away_ends_the_command_quietly(folders, monkeypatch, command):
    reading, writing = os.pipe()
    os.close(reading)
    if "generate" in command and "--help" not in command:
        command = [*command, "--model", folders["target"]]
    code, notes = run_main(monkeypatch, open(writing, "w"), *command)
    assert code == 141  # as shells have it: 128 + SIGPIPE
    assert "rror" not in notes and "text " not in notes


def test_standard_streams_that_are_closed(folders):
    command = f"exec {Path(sys.executable).with_name('exactspec')} generate --max-tokens 3"
    command += f" --json --model {folders['target']}"
    for closed in ("<&-", "<&- 2>&-"):
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        # Without standard input, as with /dev/null, the prompt is the example.
        assert json.loads(done.stdout)["statistics"]["prompt_tokens"] > 50
    done = subprocess.run(["sh", "-c", f"{command} <&- >&-"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: expected an open one, got a closed one\n"


# What is wrong with a model's files


@pytest.fixture
def spoilt(folders, tmp_path):
    def spoil(file, content):
        folder = tmp_path / "model"
        shutil.copytree(folders["chat"], folder, dirs_exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps({**json.loads((folder / file).read_text()), **content})
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder

    return spoil


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "model.safetensors",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
            "model.safetensors: expected weights, got a git-lfs pointer; run `git lfs pull`",
        ),
        ("model.safetensors", "", "model.safetensors: expected safetensors, got another"),
        ("model.safetensors", b"PK\3\4" + bytes(99), "model.safetensors: expected safetensors"),
        ("model.safetensors", b"\0\1\0\0\0\0\0\0{}", "model.safetensors: expected safetensors"),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0{}", "Missing"),
        ("config.json", "[]", "config.json: expected an object with a model_type, got a list"),
        ("config.json", "{}", "config.json: expected an object with a model_type, got an object"),
        ("config.json", "{", "config.json: expected JSON, got an error"),
        ("config.json", {"model_type": "magic"}, "Model type magic not supported"),
        ("config.json", {"num_hidden_layers": 9}, "Missing"),
        ("config.json", {"hidden_size": "many"}, ""),
        # mlx-lm takes these, transformers refuses them.
        ("config.json", {"initializer_range": "wide"}, "StrictDataclassFieldValidationError"),
        ("tokenizer.json", "{", ""),
        ("tokenizer.json", "{}", ""),
    ],
)
def test_broken_model_files_are_an_error_line(spoilt, file, content, message):
    folder = spoilt(file, content)
    for arguments in (["--model", folder], ["--draft-model", folder]):
        result = invoke("w1", *arguments, code=1)
        pattern = rf"(note:.*\n)*error: cannot load {folder}: {re.escape(message)}.*\n"
        assert re.fullmatch(pattern, result.stderr), result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "TemplateSyntaxError: "),
        ("{{ raise_exception('no users') }}", "TemplateError: no users"),
        ("{{ messages.nothing.more }}", "UndefinedError: "),
    ],
)
def test_a_broken_chat_template_is_an_error_line(spoilt, template, message):
    folder = spoilt("chat_template.jinja", template)
    result = invoke("w1", "--model", folder, code=1)
    start = "error: cannot apply the model's chat template: "
    assert result.stderr.startswith(start + message) and result.stderr.count("\n") == 1
    assert result.stderr.endswith("; --no-chat goes without it\n")
    invoke("w1", "--model", folder, "--no-chat", "--max-tokens", 1)


# Layout


def test_a_narrow_terminal_does_not_cut_the_summary_up(folders):
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 30)
    narrow, wide = (
        invoke(*arguments, env={"COLUMNS": width}).stderr.splitlines() for width in ("20", "200")
    )
    assert len(narrow) == len(wide)
    assert any(line.startswith("cycles ") and line.endswith("accepted drafts") for line in narrow)


@pytest.mark.parametrize("width", ["30", "46", "80", "200"])
def test_help_shows_whole_names(width):
    shown = invoke("--help", env={"COLUMNS": width}).stdout
    names = ("--draft-model", "--num-draft-tokens", "--drafter", "--prompt-file", "--dequantize")
    assert all(re.search(rf"^ *{name} ", shown, re.MULTILINE) for name in names)
    assert "..." not in shown and shown.isascii()


# The record


def test_a_run_can_be_repeated_from_its_record(folders):
    arguments = [PROMPT + "\n", "--draft-model", folders["draft"], "--model", folders["chat"]]
    arguments += ["--temperature", 0.9, "--top-k", 20, "--top-p", 0.97, "--min-p", 0.001]
    arguments += ["--max-tokens", 15, "--num-draft-tokens", 2, "--rule", "block", "--no-chat"]
    report = run_json(*arguments)
    assert set(report["versions"]) == {"exactspec", "mlx", "mlx-lm"}
    assert report["versions"]["exactspec"] == __version__
    again = [report["prompt"], "--json"]
    for name, value in report["options"].items():
        option = f"--{name.replace('_', '-')}"
        if value is False and name != "chat":
            continue
        if isinstance(value, bool):
            again.append(option if value else f"--no-{name}")
        elif value is not None:
            again += [option, value]
    second = json.loads(invoke(*again).stdout)
    for field in ("tokens", "options", "prompt", "model", "drafter", "versions", "rule"):
        assert second[field] == report[field]
    # A seed of its own for each run.
    assert run_json(*arguments)["options"]["seed"] != report["options"]["seed"]


def test_a_drawn_seed_is_shown(folders):
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 12, "--temperature", 1)
    first = invoke(*arguments)
    seed = re.search(r"^seed +(\d+)$", first.stderr, re.MULTILINE)[1]
    assert invoke(*arguments, "--seed", seed).stdout == first.stdout
    assert "seed" not in invoke(*arguments[:-1], 0).stderr  # a greedy text has none


# Ctrl-C


@pytest.fixture
def ctrl_c(monkeypatch):
    """``ctrl_c(n, text)``: Ctrl-C after n tokens of the first or second text."""

    def set_up(count, text=0):
        texts = iter(range(9))

        def interrupted(*args, **options):
            number = next(texts)
            stream = generate_module_stream(*args, **options)
            for at, item in enumerate(stream):
                if (number, at) == (text, count):
                    raise KeyboardInterrupt
                yield item

        generate_module_stream = generate_module.stream_generate
        monkeypatch.setattr(generate_module, "stream_generate", interrupted)

    return set_up


@pytest.mark.parametrize("count", [0, 5])
def test_ctrl_c_sums_up_what_there_is(folders, ctrl_c, count):
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 30, "--compare")
    text = expected(folders["target"], max_tokens=30)
    ctrl_c(count)
    result = invoke(*arguments, code=130)
    assert text.text.startswith(result.stdout) and bool(result.stdout) == bool(count)
    assert re.search(r"^text .* ended by Ctrl-C$", result.stderr, re.MULTILINE)
    assert "plain" not in result.stderr
    ctrl_c(count)
    report = json.loads(invoke(*arguments, "--json", code=130).stdout)
    assert report["finish_reason"] == "interrupted" and report["plain"] is None
    assert report["tokens"] == text.tokens[:count]


def test_ctrl_c_in_the_plain_text_keeps_the_first_one(folders, ctrl_c):
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 30, "--compare")
    ctrl_c(3, text=1)
    report = json.loads(invoke(*arguments, "--json", code=130).stdout)
    assert report["finish_reason"] == "stop" and report["plain"]["finish_reason"] == "interrupted"
    ctrl_c(3, text=1)
    notes = invoke(*arguments, code=130).stderr
    assert "ended by a stop token" in notes and "plain  " not in notes


# Quantised weights


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    def save(mode, bits, group_size):
        folder = tmp_path_factory.mktemp(mode)
        save_model(folder)
        (folder / "model.safetensors").unlink()
        model = Model(type(tiny_llama().args)(**{**LLAMA_CONFIG, "vocab_size": 32}))
        model.update(tiny_llama().parameters())
        nn.quantize(model, group_size, bits, mode=mode)
        save_mlx_model(folder, model)
        config = json.loads((folder / "config.json").read_text())
        config["quantization"] = {"group_size": group_size, "bits": bits, "mode": mode}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return save


@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("mxfp4", 4), ("mxfp8", 8)])
def test_quantised_weights_are_slow_on_a_cpu_and_can_be_unpacked(
    quantized, folders, monkeypatch, mode, bits
):
    folder = quantized(mode, bits, 32)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    arguments = ("w1 w2", "--model", folder, "--max-tokens", 3)
    note = rf"^note: the weights of {folder} are quantised, .*--dequantize unpacks them"
    packed = invoke(*arguments, "--json")
    unpacked = invoke(*arguments, "--json", "--dequantize")
    assert re.search(note, packed.stderr, re.MULTILINE) and unpacked.stderr == ""
    assert "quantised" not in invoke("w1", "--model", folders["target"]).stderr
    model, _ = load(folder)
    assert models.is_quantized(model)
    logits = model(mx.array([[1, 2, 3]]))
    models.unpack(model)
    assert not models.is_quantized(model)
    assert {p.dtype for _, p in nn.utils.tree_flatten(model.parameters())} == {mx.float32}
    # The same weights, multiplied in another order.
    assert mx.allclose(model(mx.array([[1, 2, 3]])), logits, rtol=1e-3, atol=1e-3)
    # The draft model too.
    notes = invoke("w1", "--model", folders["target"], "--draft-model", folder).stderr
    assert re.search(note, notes, re.MULTILINE)


# Caches that cannot be rolled back


def rotating(window):
    return lambda self: [RotatingKVCache(max_size=window, keep=0) for _ in self.layers]


def test_a_model_that_cannot_be_rolled_back_decodes_plainly_with_a_note(folders, monkeypatch):
    monkeypatch.setattr(Model, "make_cache", rotating(16), raising=False)
    arguments = (PROMPT, "--model", folders["target"], "--max-tokens", 30)
    text = expected(folders["target"], max_tokens=30)
    for further in ([], ["--compare"]):
        report = invoke(*arguments, *further, "--json")
        assert json.loads(report.stdout)["tokens"] == text.tokens
        assert json.loads(report.stdout)["drafter"] == "none"
        note = "note: the cache of this model cannot be rolled back: decoding without a drafter\n"
        assert report.stderr == note
    # One that was asked for is refused before any text.
    for options in (
        ["--drafter", "lookup"],
        ["--draft-model", folders["draft"]],
        ["--num-draft-tokens", 2],
        ["--adaptive"],
        ["--num-branches", 2],
    ):
        result = invoke(*arguments, *options, code=1)
        assert result.stdout == ""
        assert re.search(r"^error: .*got RotatingKVCache", result.stderr, re.MULTILINE)


def test_a_recurrent_model_decodes_plainly_with_a_note(folders, tmp_path):
    folder = shutil.copytree(folders["target"], tmp_path / "mamba")
    tiny_model("mamba").save_weights(str(folder / "model.safetensors"))
    config = {"model_type": "mamba", **ARCHITECTURES["mamba"]}
    (folder / "config.json").write_text(json.dumps(config))
    report = invoke(PROMPT, "--model", folder, "--max-tokens", 9, "--json")
    assert json.loads(report.stdout)["tokens"] == expected(folder, max_tokens=9).tokens
    assert json.loads(report.stdout)["drafter"] == "none"
    assert "decoding without a drafter" in report.stderr
    result = invoke(PROMPT, "--model", folder, "--drafter", "lookup", code=1)
    assert re.search(r"^error: .*got ArraysCache", result.stderr, re.MULTILINE)


def test_a_rotating_cache_is_drafted_with_while_the_text_fits_into_it(folders, monkeypatch):
    monkeypatch.setattr(Model, "make_cache", rotating(100), raising=False)
    arguments = (PROMPT, "--model", folders["target"])
    report = run_json(*arguments, "--max-tokens", 30)
    assert report["drafter"] == "prompt lookup" and report["statistics"]["slot_drafted"]
    assert report["tokens"] == expected(folders["target"], max_tokens=30).tokens
    report = run_json(*arguments, "--max-tokens", 100)
    assert report["drafter"] == "none"
