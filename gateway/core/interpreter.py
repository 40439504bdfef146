"""Says how the Python interpreter was built. Without profile-guided optimisation, a request costs a fifth more CPU.

CPython's `configure` optimises only with `--enable-optimizations`, and records its arguments. pyenv and a plain
`./configure && make` omit the option. Docker's `python` images, uv, conda, Homebrew, Fedora and Arch set it. Debian and
Ubuntu optimise in another way, which is not recorded, so an interpreter that was configured for `/usr` is not reported.
"""

from __future__ import annotations

import platform
import re
import shlex
import sysconfig

_OPTIMISED = re.compile(r"--enable-optimizations(=yes)?|.*-fprofile-(instr-)?use.*")


def is_unoptimised(configure_arguments: str | None) -> bool:
    """Whether an interpreter is known to be built without profile-guided optimisation.

    `configure_arguments` are CPython's `CONFIG_ARGS`. None, as on Windows: unknown, so False.
    """
    if configure_arguments is None:
        return False
    arguments = shlex.split(configure_arguments)
    return "--prefix=/usr" not in arguments and not any(map(_OPTIMISED.fullmatch, arguments))


def this_is_unoptimised() -> bool:
    """Whether the interpreter that runs this is known to be built without profile-guided optimisation."""
    return platform.python_implementation() == "CPython" and is_unoptimised(_configure_arguments())


def describe() -> dict[str, object]:
    """The version and the build of this interpreter, for the results of benchmarks."""
    arguments = shlex.split(_configure_arguments() or "")
    return {
        "version": platform.python_version(),
        "compiler": platform.python_compiler(),
        "configured": [each for each in arguments if each.startswith(("--enable-", "--with-"))],  # no paths
        "unoptimised": this_is_unoptimised(),
    }


def _configure_arguments() -> str | None:
    arguments = sysconfig.get_config_var("CONFIG_ARGS")
    return arguments if isinstance(arguments, str) else None
