import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from gateway.cli import _MODULES, VERBS, app
from tests.gateway.cli.conftest import Warmpath

ROOT = Path(__file__).parents[3]
ESCAPE = "\x1b["


def on_a_terminal(*arguments: str, **env: str) -> str:
    """The output of `python -m gateway` if its stdout is a terminal."""
    ours, theirs = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WARMPATH_") and k not in ("NO_COLOR", "CI")}
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**clean, "TERM": "xterm-256color", **env},
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while chunk := os.read(ours, 65536):
                written += chunk
        except OSError:  # EIO: the other end of the terminal is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0, written
    return written.decode()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_is_a_typer_app(warmpath: Warmpath, verb: str) -> None:
    module = _MODULES.get(verb, verb.replace("-", "_"))
    assert isinstance(import_module(f"gateway.cli.{module}").app, typer.Typer)
    result = warmpath(verb, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: warmpath {verb}")


def test_the_help_lists_every_verb(warmpath: Warmpath) -> None:
    help_text = warmpath("--help").stdout
    assert all(f"  {verb} " in help_text for verb in VERBS)


def helps(name: str, command: Any, parent: Any = None) -> Iterator[tuple[str, str]]:
    """The help of a command and of all its subcommands, at the usual width, each after the command's name."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=80)
    yield context.command_path, command.get_help(context)
    if isinstance(command, TyperGroup):
        for each in command.list_commands(context):
            yield from helps(each, command.get_command(context, each), context)


@pytest.mark.parametrize(("command", "text"), list(helps("warmpath", get_command(app))))
def test_helps_name_values_by_what_they_are(command: str, text: str) -> None:
    """Typer's own names are those of Python's types: `<str>`, `<int range>`, `<list[Path]>`."""
    options = text.partition("Options:")[2].partition("Commands:")[0]
    assert not re.search(r"<(str|int|float|file|path|list|int range|float range)\b", options)


@pytest.mark.parametrize(("command", "text"), list(helps("warmpath", get_command(app))))
def test_commands_are_listed_with_a_complete_sentence(command: str, text: str) -> None:
    assert "..." not in text.partition("Commands:")[2]


def test_version(warmpath: Warmpath) -> None:
    assert warmpath("--version").stdout.startswith("warmpath ")


def test_an_unknown_verb_is_wrong_usage(warmpath: Warmpath) -> None:
    result = warmpath("chekc")
    assert result.exit_code == 2
    assert "No such command 'chekc'. Did you mean 'check'?" in result.stderr


def test_help_and_completion_import_no_verb() -> None:
    """They take a fraction of a second only if nothing of the gateway is imported for them."""
    script = (
        "import sys, atexit; from gateway.__main__ import main; sys.argv = ['warmpath', '--help']\n"
        "atexit.register(lambda: print(*(name for name in sys.modules if name.startswith('gateway.'))))\n"
        "main()"
    )
    for extra in ({}, {"_WARMPATH_COMPLETE": "complete_bash", "COMP_WORDS": "warmpath us", "COMP_CWORD": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **extra}
        )
        assert {*done.stdout.splitlines()[-1].split()} <= {
            "gateway.__main__", "gateway.cli", "gateway.cli.verb_app", "gateway.core", "gateway.core.private_files"
        }, done.stdout  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), [("warmpath us", "usage"), ("warmpath keys cr", "create")])
def test_shells_complete_verbs_and_subcommands(words: str, expected: str) -> None:
    env = {
        **os.environ,
        "_WARMPATH_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run([sys.executable, "-m", "gateway"], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.stdout.split() == [expected]


BASH = """
source "$1"
complete_words() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    _warmpath_completion warmpath
    echo "${COMPREPLY[@]}"
}
complete -p warmpath
complete_words warmpath us
complete_words warmpath usage --by ten
"""
FISH = """
source $argv[1]
complete --do-complete "warmpath us" | cut -f 1
complete --do-complete "warmpath usage --by ten" | cut -f 1
"""
# Outside of an editor's widget, zsh has no compdef and no _arguments. They are given each completion as 'word':'help'.
ZSH = """
compdef() { :; }
_arguments() { print -r -- "$1" | cut -d '"' -f 2; }
source $1
words=(warmpath us) CURRENT=2 && _warmpath_completion
words=(warmpath usage --by ten) CURRENT=4 && _warmpath_completion
"""


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", FISH), ("zsh", ZSH)])
def test_shells_complete_with_their_scripts(warmpath: Warmpath, tmp_path: Path, shell: str, script: str) -> None:
    """A real shell reads the script that `warmpath completion` prints, and is asked for completions."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(warmpath("completion", shell).stdout)
    (tmp_path / "ask").write_text(script)
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "xterm",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [shell, *(["-f"] if shell == "zsh" else []), str(tmp_path / "ask"), str(tmp_path / "script")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    words = [line.split()[-1] for line in done.stdout.splitlines() if line.strip()]
    assert words[-2:] == ["usage", "tenant"], (done.stdout, done.stderr)


def test_an_invalid_setting_is_wrong_usage_and_names_its_variable(warmpath: Warmpath) -> None:
    result = warmpath("check", WARMPATH_PORT="http", WARMPATH_POLICI="x")
    assert result.exit_code == 2
    assert "WARMPATH_PORT: should be a valid integer" in result.stderr
    assert "warning: WARMPATH_POLICI is not a setting; did you mean WARMPATH_POLICY?" in result.stderr
    assert result.stdout == ""


def test_colour_is_for_terminals_without_no_color(warmpath: Warmpath) -> None:
    assert ESCAPE in on_a_terminal("check")
    assert ESCAPE not in on_a_terminal("check", NO_COLOR="1").replace(f"{ESCAPE}1m", "").replace(f"{ESCAPE}0m", "")
    assert ESCAPE not in warmpath("check").stdout
