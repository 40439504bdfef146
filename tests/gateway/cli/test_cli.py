import os
import pty
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from gateway.cli import VERBS
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
    assert isinstance(import_module(f"gateway.cli.{verb.replace('-', '_')}").app, typer.Typer)
    result = warmpath(verb, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: warmpath {verb}")


def test_the_help_lists_every_verb(warmpath: Warmpath) -> None:
    help_text = warmpath("--help").stdout
    assert all(f"  {verb} " in help_text for verb in VERBS)


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


@pytest.mark.parametrize(("shell", "marker"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete ")])
def test_completion_scripts(warmpath: Warmpath, shell: str, marker: str) -> None:
    script = warmpath("completion", shell).stdout
    assert marker in script and "_WARMPATH_COMPLETE" in script


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
