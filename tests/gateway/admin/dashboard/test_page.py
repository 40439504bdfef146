"""Properties of the dashboard's files: no external resources, no text parsed as markup, sufficient contrast."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[4] / "gateway" / "admin" / "dashboard"
MODULES = sorted(FOLDER.rglob("*.js"))
STYLE = (FOLDER / "style.css").read_text()

TEXT, MARKS = 4.5, 3.0  # WCAG 2.2, AA: contrast of text, and of other marks


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_text_never_becomes_markup_or_code(file: Path) -> None:
    code = file.read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "Function(",
                "createContextualFragment", "setHTML", "srcdoc", "javascript:"):  # fmt: skip
        assert way not in code, way
    assert not re.search(r"\bstyle: ", code), "a style attribute, which the page's policy forbids"


@pytest.mark.parametrize(
    "file", sorted(path for path in FOLDER.rglob("*") if path.is_file()), ids=lambda file: file.name
)
def test_no_external_resources(file: Path) -> None:
    named = re.findall(r"[\"'`(=]((?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*)", file.read_text())
    assert set(named) <= {"http://www.w3.org/2000/svg"}, "the namespace of SVG, which is not fetched"


def test_the_page_has_no_inline_script_or_style() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert "<style" not in page
    assert not re.search(r"\s(style|on\w+)=", page)


def test_imports_name_existing_modules_of_the_dashboard() -> None:
    for file in MODULES:
        for name in re.findall(r"""(?:from|import\()\s*"([^"]+)\"""", file.read_text()):
            assert (file.parent / name).resolve().is_relative_to(FOLDER), f"{file}: {name}"
            assert (file.parent / name).is_file(), f"{file}: {name}"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_modules_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 250


def colours(scheme: str) -> dict[str, str]:
    """The page's colours by name."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    return found | (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark)) if scheme == "dark" else {})


def contrast(one: str, other: str) -> float:
    """Contrast as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    has = colours(scheme)
    assert len(has) > 20
    text = [(ink, on) for ink in ("ink", "dim", "accent", "good", "warn", "bad") for on in ("panel", "ground", "hover")]
    text += [(ink, "chosen") for ink in ("ink", "dim", "accent", "bad")] + [
        ("ink", "bad-ground"),
        ("dim", "bad-ground"),
    ]
    text += [("accent-ink", "accent"), ("panel", "bad")]
    series = [name for name in has if name.startswith("series-")]
    marks = [
        (mark, on) for mark in (*series, "own", "wait", "server", "rule-strong", "focus") for on in ("panel", "ground")
    ]
    for ink, on in text:
        assert contrast(has[ink], has[on]) >= TEXT, f"{ink} on {on}"
    for mark, on in marks:
        assert contrast(has[mark], has[on]) >= MARKS, f"{mark} on {on}"


def test_both_schemes_define_the_same_colours() -> None:
    light, dark = (re.findall(r"--([\w-]+):", block) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL))
    assert set(light) == set(dark)
    assert set(re.findall(r"var\(--([\w-]+)\)", STYLE)) == set(light)
