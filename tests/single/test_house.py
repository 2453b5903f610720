"""The house keeps its shape: short functions in the engine, who imports whom, one protocol for what reduces."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.frontends.carrier import Carrier
from horovod_aps.frontends.reducer import Reducer
from horovod_aps.kernels import FLOAT32, CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "horovod_aps"
FRONTENDS = ("torch", "tensorflow", "keras", "ddp", "fsdp")
ON_HOROVOD = FRONTENDS[:3]
FOR_TORCH = (
    "activations",
    "for_torch",
    "group",
    "group_operations",
    "messages",
    "methods",
    "tensors",
    "worker",
    "works",
)  # modules of other rooms that need torch
MAX_LINES = 60

# Run without Horovod and with torch alone: what studies formats, predicts, and reduces among emulated ranks.
ONLY_TORCH = """
import importlib, importlib.machinery, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        raise ModuleNotFoundError(f"{spec.name} is blocked", name=spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Blocked())
import horovod_aps
for module in pkgutil.walk_packages(horovod_aps.__path__, "horovod_aps."):
    if module.name.split(".")[1] not in (*SKIPPED, "_cpu", "_torch") and module.name.split(".")[-1] not in SKIPPED:
        importlib.import_module(module.name)
from horovod_aps import FloatFormat, perfmodel
from horovod_aps.tools import cli
assert cli.main(["predict", "--model", "resnet50", "--ranks", "4", "--bandwidth", "1gbit"]) == 0
assert perfmodel.predict_exchange([1000], 2, perfmodel.Network(1e9), perfmodel.Machine(), 4, 3).total > 0
assert FloatFormat(4, 3).max == 240
"""
EMULATE = """
import torch
from horovod_aps.simulate import EmulatedOptimizer, float_quantize
assert float_quantize(torch.tensor([1.06]), 4, 3) == 1.0
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = EmulatedOptimizer(torch.optim.SGD([weight], 1.0), 2, {"e": 4, "m": 3})
optimizer.step(lambda rank: (weight * (1 + rank)).sum())
assert weight.tolist() == [-1.5] * 3
"""


def functions(folder: Path) -> dict[str, int]:
    """The lines of every function under a folder."""
    return {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@pytest.mark.parametrize("room", ["engine", "kernels", "transports", "formats"])
def test_no_function_is_longer_than_a_page(room):
    found = functions(PACKAGE / room)
    assert found
    assert {name: n for name, n in found.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("blocked", "skipped", "more"),
    [
        (("horovod", "tensorflow", "keras", "mpi4py"), ON_HOROVOD, EMULATE),
        (("horovod", "torch", "tensorflow", "keras", "mpi4py"), (*FRONTENDS, *FOR_TORCH, "simulate"), ""),
    ],
    ids=["only torch", "no torch"],
)
def test_all_but_frontends_work_without_horovod(blocked, skipped, more):
    code = f"BLOCKED, SKIPPED = {blocked!r}, {skipped!r}\n{ONLY_TORCH}{more}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def imported(path: Path) -> set[str]:
    """Modules that a file imports, at its top or later; not those that it only takes types from."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize(
    ("room", "others"),
    [
        ("formats", ("engine", "transports", "frontends", "tools", *FRONTENDS)),
        ("kernels", ("engine", "frontends", "tools", *FRONTENDS)),
        ("transports", ("engine", "formats", "frontends", "tools", *FRONTENDS)),
        ("engine", ("frontends", "tools", *FRONTENDS)),
        ("frontends", FRONTENDS),
    ],
)
def test_rooms_use_only_those_below_them(room, others):
    """Oracle: the arrows of docs/images/rooms.svg."""
    above = tuple(f"horovod_aps.{other}" for other in others)
    for path in (PACKAGE / room).rglob("*.py"):
        names = imported(path)
        assert not {name for name in names if name in above or name.startswith(tuple(f"{one}." for one in above))}, path
        if room != "frontends" and path.stem not in FOR_TORCH:
            assert not {name for name in names if name.partition(".")[0] in ("horovod", "torch", "tensorflow")}, path


def test_exchange_and_carrier_are_reducers():
    """All that the protocol names is there, with the same arguments; a carrier leaves `wait` to its framework."""
    wanted = {name: value for name, value in vars(Reducer).items() if inspect.isfunction(value) and name[0] != "_"}
    assert set(wanted) >= {"submit", "wait", "state", "load_state", "forget", "change", "close"}
    for name, function in wanted.items():
        for one in (Exchange, Carrier):
            if (one, name) != (Carrier, "wait"):
                assert inspect.signature(getattr(one, name)) == inspect.signature(function), (one, name)
    exchange = Exchange(CpuKernels(), None, Options(4, 3))
    carrier = Carrier(Options(4, 3, transport="allreduce"), 2, over_gloo=False)
    assert set(exchange.state()) == set(carrier.state())
    assert type(exchange.statistics) is type(carrier.statistics) and exchange.chosen is carrier.chosen is None


def test_group_submitted_at_once_equals_one_after_the_other():
    """Oracle: the same layers, submitted one by one."""
    results = []
    for together in (True, False):
        exchanges = [Exchange(CpuKernels(), transport, Options(4, 3)) for transport in LocalTransport.world(2)]
        outputs = []
        for rank, exchange in enumerate(exchanges):
            gradients = [np.random.default_rng([rank, i]).standard_normal(100 + i).astype(np.float32) for i in range(5)]
            layers = [
                Layer(f"l{i}", one.shape, FLOAT32, one.ctypes.data, one.ctypes.data, 0.5, one)
                for i, one in enumerate(gradients)
            ]
            if together:
                exchange.submit(*layers)
            else:
                for layer in layers:
                    exchange.submit(layer)
            outputs.append(gradients)
        running = [exchange.steps() for exchange in exchanges]
        while running:
            running = [steps for steps in running if next(steps, None) is not None]
        results.append(np.concatenate([one for gradients in outputs for one in gradients]))
    assert results[0].tobytes() == results[1].tobytes()
