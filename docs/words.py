"""Finds words that Warmpath's texts avoid: `python -m docs.words`, a part of `make lint`.

`docs/style/words.yaml` lists the words, each with what to say instead, and the files that are not rewritten yet. The
tool reads what people read: the prose of Markdown pages, and the comments, docstrings and messages of code. Messages
are the string literals that contain a space. Names and code spans are exempt.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORDS = ROOT / "docs" / "style" / "words.yaml"

Text = tuple[int, str]  # the line at which a text begins, and the text


@dataclass(frozen=True)
class Word:
    """A pattern that texts avoid, the phrases in which it is right, and what to say instead."""

    avoid: re.Pattern[str]
    unless: re.Pattern[str] | None
    say: str

    def found_in(self, text: str) -> Iterator[re.Match[str]]:
        allowed = [match.span() for match in self.unless.finditer(text)] if self.unless else []
        for match in self.avoid.finditer(text):
            if not any(start < match.end() and match.start() < end for start, end in allowed):
                yield match


@dataclass(frozen=True)
class Hit:
    file: str
    line: int
    found: str
    word: Word

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.found!r}, instead: {self.word.say}"


@dataclass(frozen=True)
class Style:
    """The words to avoid, and the patterns of the paths in which they may stand, for good or for now."""

    words: list[Word]
    exempt: list[str]
    unclean: list[str]

    @classmethod
    def load(cls) -> Style:
        config = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
        return cls([_word(**row) for row in config["words"]], config["exempt"], config["unclean"])

    def files(self) -> list[str]:
        """The files that git tracks, that have a reader, and that are not exempt."""
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        names = [
            name
            for name in dict.fromkeys(listed.splitlines())
            if Path(name).suffix in READERS and (ROOT / name).is_file()
        ]
        return [name for name in names if not _matches(name, self.exempt)]

    def clean_files(self) -> list[str]:
        return [name for name in self.files() if not _matches(name, self.unclean)]


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _word(avoid: str, say: str, unless: str | None = None) -> Word:
    return Word(_pattern(avoid), _pattern(unless) if unless else None, say)


def _pattern(text: str) -> re.Pattern[str]:
    """Spaces match line breaks too, with the comment sign of the next line."""
    return re.compile(text.replace(" ", r"[\s#*/]+"), re.IGNORECASE)


def markdown(source: str) -> Iterator[Text]:
    """Prose: without fenced blocks, code spans, comments and the targets of links."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    source = re.sub(r"^( *)```.*?^ *```$", blank, source, flags=re.MULTILINE | re.DOTALL)
    source = re.sub(r"<!--.*?-->", blank, source, flags=re.DOTALL)
    source = _without_code(source)
    source = re.sub(r"(\[[^\]]*\])\([^)]*\)", r"\1", source)
    yield 1, source


def python(source: str) -> Iterator[Text]:
    """Comments, and string literals that contain a space."""
    comments = {
        token.start[0]: token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    block: list[str] = []  # the lines of one comment
    for number, token in comments.items():
        block.append(token.string)
        follows = comments.get(number + 1)
        if follows is None or follows.start[1] != token.start[1]:
            yield number - len(block) + 1, _without_code("\n".join(block))
            block = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, _without_code(node.value)


def hashed(source: str) -> Iterator[Text]:
    """Comments that begin with #, each line with its own; code between them leaves an empty line."""
    comments = [re.search(r"(?:^|\s)#(.*)", line) for line in source.splitlines()]
    yield 1, _without_code("\n".join(found[1] if found else "" for found in comments))


def javascript(source: str) -> Iterator[Text]:
    """Comments, string literals that contain a space, and the text of HTML."""
    pattern = r"/\*.*?\*/|//[^\n]*(?:\n\s*//[^\n]*)*|\"[^\"\n]* [^\"\n]*\"|`[^`]* [^`]*`|>[^<>{}]+<"
    for found in re.finditer(pattern, source, re.DOTALL):
        text = _without_code(found[0]) if found[0].startswith("/") else found[0]
        yield source.count("\n", 0, found.start()) + 1, text


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]+`", "`code`", text)


def c(source: str) -> Iterator[Text]:
    """Comments. A run of // lines is one text."""
    for found in re.finditer(r"/\*.*?\*/|//[^\n]*(?:\n\s*//[^\n]*)*", source, re.DOTALL):
        yield source.count("\n", 0, found.start()) + 1, _without_code(found[0])


READERS: dict[str, Callable[[str], Iterator[Text]]] = {
    ".md": markdown,
    ".py": python,
    ".yaml": hashed,
    ".yml": hashed,
    ".toml": hashed,
    ".sh": hashed,
    "": hashed,  # Makefile, Dockerfile
    ".js": javascript,
    ".html": javascript,
    ".cpp": c,
    ".h": c,
}


def hits(file: str, words: list[Word]) -> list[Hit]:
    """Every use of one of the words in a file of the repository."""
    source = (ROOT / file).read_text(encoding="utf-8")
    return [
        Hit(file, line + text.count("\n", 0, match.start()), " ".join(match[0].split()), word)
        for line, text in READERS[Path(file).suffix](source)
        for word in words
        for match in word.found_in(text)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.words", description="Finds words that our texts avoid.")
    parser.add_argument("path", nargs="*", help="look at these files and folders; omitted: at all files that are clean")
    parser.add_argument("--count", action="store_true", help="count the words in all files, and list nothing")
    arguments = parser.parse_args()
    style = Style.load()
    if arguments.count:
        print(_counted([hit for file in style.files() for hit in hits(file, style.words)]))
        return 0
    wanted = style.clean_files()
    if arguments.path:
        chosen = [str(Path(path).resolve().relative_to(ROOT)) for path in arguments.path]
        wanted = [file for file in style.files() if any(f"{file}/".startswith(f"{path}/") for path in chosen)]
    found = [hit for file in wanted for hit in hits(file, style.words)]
    for hit in found:
        print(hit)
    print(f"{len(wanted)} files, {len(found)} words to avoid", file=sys.stderr)
    return 1 if found else 0


def _counted(found: list[Hit]) -> str:
    """A table of hits by word, the most frequent first, and the sums by folder."""
    by_word = Counter(hit.word.avoid.pattern.replace(r"[\s#*/]+", " ") for hit in found)
    by_folder = Counter(hit.file.split("/")[0] if "/" in hit.file else "top level" for hit in found)
    lines = [
        f"{count:6}  {name}" for counter in (by_word, by_folder) for name, count in [*counter.most_common(), (0, "")]
    ]
    return "\n".join([*(line if line.strip() != "0" else "" for line in lines), f"{len(found):6}  in all"])


if __name__ == "__main__":
    sys.exit(main())
