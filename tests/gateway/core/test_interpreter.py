import pytest

from gateway.core.interpreter import is_unoptimised


@pytest.mark.parametrize(
    ("arguments", "unoptimised"),
    [
        # pyenv, without PYTHON_CONFIGURE_OPTS
        ("'--prefix=/root/.pyenv/versions/3.11.7' '--enable-shared' 'LDFLAGS=-L/root/lib -Wl,-rpath,/root/lib'", True),
        ("", True),  # ./configure && make
        ("'--prefix=/opt/python' '--enable-optimizations=no'", True),
        ("'--prefix=/opt/python' '--disable-optimizations'", True),
        # Docker's images, pyenv with PYTHON_CONFIGURE_OPTS, Fedora
        ("'--build=x86_64-linux-gnu' '--enable-optimizations' '--with-lto' '--enable-shared'", False),
        ("'--prefix=/root/.pyenv/versions/3.14.0' '--enable-optimizations=yes'", False),
        # Debian optimises in its own build, and does not say so
        ("'--enable-shared' '--prefix=/usr' '--libdir=/usr/lib/x86_64-linux-gnu' '--with-computed-gotos'", False),
        ("'--prefix=/opt/python' 'CFLAGS_NODIST=-O3 -fprofile-use -fprofile-correction'", False),
        ("'--prefix=/opt/python' 'CFLAGS_NODIST=-fprofile-instr-use=code.profclangd'", False),
        (None, False),  # Windows and other implementations
    ],
)
def test_only_a_build_that_was_not_optimised_is_reported(arguments: str | None, unoptimised: bool) -> None:
    assert is_unoptimised(arguments) is unoptimised
