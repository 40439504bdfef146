"""The imports of a start: torch's library is loaded before torch, without the parts that the engine does not use."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

LOADS_THE_LIBRARY = """
import sys
from pathlib import Path
from backend import torch_library
loaded = torch_library.load_library()
print(loaded, loaded == ("libtorch_cpu.so" in Path("/proc/self/maps").read_text()), "torch" in sys.modules)
torch_library.LIBRARY = Path("lib", "missing.so")
print(torch_library.load_library())
"""
IMPORTS = """
import gc, sys
from backend import early_imports
print("torch" in sys.modules, gc.isenabled(), gc.get_freeze_count() > 10_000)
"""
# Which modules load a library while the thread that loads torch's is running.
WAITS = """
import threading
from importlib.machinery import ExtensionFileLoader

waiting, load = [], ExtensionFileLoader.create_module

def note(self, spec):
    if threading.active_count() > 1:
        waiting.append(spec.name)
    return load(self, spec)

ExtensionFileLoader.create_module = note
from backend import early_imports
print(*waiting)
"""
# Sampled tokens of the demo model and their log-probabilities, and which deferred modules are still deferred then.
GENERATES = """
import sys
from importlib.metadata import version
from backend import early_imports
from backend.__main__ import DEMO_DIR
from backend.deferred_imports import is_deferred
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams

engine = Engine.load(EngineConfig(model_dir=DEMO_DIR, device="cpu", num_threads=1, num_blocks=64))
engine.add(Request("1", [1, 2, 3], SamplingParams(max_tokens=4, seed=3, top_p=0.9, top_k=20, logprobs=2)))
tokens = []
while engine.has_unfinished:
    tokens += [token for output in engine.step() for token in output.new_token_ids]
assert len(tokens) == 4, tokens
deferred = [early_imports.UNTIL_A_GGUF_FILE, *early_imports.UNUSED_PARTS]
print(version("torch").startswith(early_imports.DEFERRED_VERSIONS))
print(*[name for name in deferred if name in sys.modules and not is_deferred(name)])
"""
USES_DEFERRED_PARTS = """
from backend import early_imports
from backend.deferred_imports import is_deferred
import torch
import gguf

print(gguf.GGMLQuantizationType.Q8_0.name, is_deferred("torch.ao"))
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.5)
(2 * parameter).sum().backward()
optimizer.step()
print(parameter.sum().item(), any(map(is_deferred, early_imports.UNUSED_PARTS)))
program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
print(program.module()(torch.ones(1, 2)).shape[1], torch.ao.quantization.__name__)
"""
COMPILES = """
from backend import early_imports
import torch
print(torch.compile(lambda x: x.logit(), backend="eager")(torch.full((1,), 0.5)).item())
"""


def output_of(program: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="the library is loaded early on Linux only")
def test_the_library_is_loaded_without_torch() -> None:
    loaded, is_mapped, has_torch, found_missing = output_of(LOADS_THE_LIBRARY)
    assert (is_mapped, has_torch, found_missing) == ("True", "False", "False")
    assert loaded == "True" or "+cpu" not in version("torch")


def test_the_collector_runs_again_and_skips_what_was_imported() -> None:
    assert output_of(IMPORTS) == ["True", "True", "True"]


def test_nothing_waits_for_the_thread_that_loads_the_library() -> None:
    assert output_of(WAITS) == [], "the system loads one library at a time, so import these before"


for_cpus = pytest.mark.skipif("+cpu" not in version("torch"), reason="parts are deferred of builds for CPUs only")


@for_cpus
def test_the_engine_generates_without_the_parts_that_are_deferred() -> None:
    is_tested, *imported = output_of(GENERATES)
    assert is_tested == "True", "see whether the new version of torch can be imported without these parts"
    assert imported == []


@for_cpus
def test_deferred_parts_can_be_used() -> None:
    found = output_of(USES_DEFERRED_PARTS)
    assert found == ["Q8_0", "True", "0.0", "False", "3", "torch.ao.quantization"]


@for_cpus
def test_functions_can_be_compiled() -> None:
    assert output_of(COMPILES) == ["0.0"]
