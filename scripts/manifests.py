"""Renders the Helm chart into the plain manifests of deploy/kubernetes, by Helm's own engine.

    make manifests

Each file of deploy/helm/examples gives one manifest of the same name. rbac.yaml has only what discovery needs.
"""

from __future__ import annotations

from pathlib import Path

import helm_python
import yaml

CHART = Path("deploy/helm/warmpath")
EXAMPLES = Path("deploy/helm/examples")
MANIFESTS = Path("deploy/kubernetes")
NAMESPACE = RELEASE = "warmpath"
HEADER = "# Generated from deploy/helm by `make manifests`. {}\n"
ABOUT = {
    "gateway": "Gateways in front of vLLM; deploy/helm/examples/gateway.yaml has the values.",
    "everything": "With every option of the chart; deploy/helm/examples/everything.yaml has the values.",
    "rbac": "A service account that may discover servers in the namespace warmpath.",
}


def rendered(values: dict[str, object]) -> dict[str, str]:
    """The chart's templates with these values, by their path in the chart."""
    with helm_python.Chart.load(CHART) as chart:
        found = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return {name.removeprefix("warmpath/templates/"): text for name, text in sorted(found.items())}


def manifests() -> dict[str, str]:
    """The content of each file in deploy/kubernetes."""
    made = {}
    for path in sorted(EXAMPLES.glob("*.yaml")):
        made[path.stem] = rendered(yaml.safe_load(path.read_text()))
    made["rbac"] = {"rbac.yaml": rendered({"secret": {"existingSecret": "none"}})["rbac.yaml"]}
    return {f"{name}.yaml": HEADER.format(ABOUT[name]) + _documents(parts) for name, parts in made.items()}


def _documents(parts: dict[str, str]) -> str:
    texts = [text.strip() for name, text in parts.items() if name.endswith(".yaml") and text.strip()]
    return "---\n" + "\n---\n".join(texts) + "\n"


def main() -> None:
    MANIFESTS.mkdir(exist_ok=True)
    for name, text in manifests().items():
        (MANIFESTS / name).write_text(text)
        print(f"{MANIFESTS / name} written")


if __name__ == "__main__":
    main()
