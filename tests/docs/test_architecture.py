import re
import tomllib
from pathlib import Path

from tests.docs.markdown import ROOT, blocks, code_spans, section

PAGE = ROOT / "ARCHITECTURE.md"
PACKAGES = {"The gateway's packages": "gateway", "The engine's packages": "backend"}


def entries(title: str) -> list[str]:
    """The path in the first cell of each row of a section's table."""
    return re.findall(r"^\| `([^`]+)` \|", section(PAGE, title), re.MULTILINE)


def modules(package: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py") if path.stat().st_size]


def test_every_module_is_listed_once_or_is_in_a_folder_that_is() -> None:
    for title, package in PACKAGES.items():
        named = entries(title)
        assert len(named) == len(set(named))
        for module in modules(package):
            covering = [name for name in named if name == str(module) or str(module).startswith(name)]
            own = module.parent == Path(package) and module.name == "__init__.py"
            assert len(covering) == 1 or own, f"{module} is covered by {covering} in {title!r}"


def test_every_path_on_the_page_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in code_spans(text):
        if re.fullmatch(r"(gateway|backend|docs)/[\w./]*", name):
            assert (ROOT / name).exists(), name
            assert name.endswith("/") == (ROOT / name).is_dir(), name


def test_the_layers_are_those_that_are_checked() -> None:
    (layers,) = (block.text.split("\n")[:-1] for block in blocks(PAGE) if block.text.startswith("__main__"))
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (checked,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert layers == [layer.replace("gateway.", "") for layer in checked]


def test_every_module_has_its_layer() -> None:
    (layers,) = (block.text.split() for block in blocks(PAGE) if block.text.startswith("__main__"))
    found = {path.relative_to("gateway").parts[0].removesuffix(".py") for path in modules("gateway")} - {"__init__"}
    assert found == set(layers) - {"|"}


def test_the_phases_are_in_the_order_of_the_story() -> None:
    documented = re.findall(r"^\d+\. \*\*(\w+)\*\*", section(PAGE, "A request's life"), re.MULTILINE)
    story = (ROOT / "gateway" / "serve.py").read_text()
    entered = [name.rpartition(".")[2] for name in re.findall(r'timings\.enter\("([\w.]+)"\)', story)]
    assert [name for name in documented if name in entered] == [name for name in entered if name != "chat"]


def test_the_phases_have_the_numbers_that_their_files_give_them() -> None:
    documented = re.findall(r"^(\d)\. \*\*\w+\*\*, `([^`]+\.py)`", section(PAGE, "A request's life"), re.MULTILINE)
    assert len(documented) > 5
    for number, file in documented:
        assert re.search(rf"\bphase {number}: ", (ROOT / file).read_text(), re.IGNORECASE), file
