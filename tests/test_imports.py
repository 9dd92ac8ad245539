"""The source as a whole: which module may import which, how large files are, and what nobody may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tierzero

PACKAGE = Path(tierzero.__file__).parent
# later rows may import earlier ones, never the other way round; inside a row only the arrows named in INSIDE
ROWS = [
    {
        "errors",
        "sizes",
        "units.layout",
        "paging.recorded",
        "paging.schedule",
        "paging.lookahead",
        "paging.waiting",
        "monitoring.clock",
        "monitoring.step_stats",
        "monitoring.watch",
        "monitoring.timeline",
        "monitoring.metrics",
        "monitoring.prometheus",
        "native",
        "storage.extents",
        "paging.loop",
        "paging.malloc",
        "storage.stripes",
        "hardware.endurance",
        "pace",
        "hardware.hugepages",
        "hardware.profiles",
        "hardware.drives",
        "hardware.cgroup",
        "sim.clock",
    },
    {"sim.links"},
    {"sim.model"},
    {"sim.stepper", "hardware.machine"},
    {"sim.updates"},
    {"sim.paging"},
    {"planning.simulate"},
    {
        "storage.checksum",
        "storage.lock",
        "storage.manifest",
        "storage.members",
        "hardware.tuning",
        "units.state_format",
    },
    {
        "tiers.base",
        "storage.directory",
        "storage.space",
        "storage.blocks",
        "tiers.host",
        "tiers.portable",
        "tiers.faulty",
        "tiers.nvme",
        "tiers.config",
        "tiers.readonly",
        "storage.versions",
        "storage.store",
    },
    {
        "units.paged",
        "units.grads",
        "units.records",
        "units.generic",
        "units.share",
        "units.live",
        "paging.pins",
        "paging.gate",
        "paging.states",
        "model.replaced",
        "model.meta",
        "units.source",
        "model.references",
        "autograd.tensors",
    },
    {"units.borrowed", "model.deferred"},
    {"units.unit", "units.partition", "planning.placement", "autograd.rows"},
    {"units.parts"},
    {"units.fit", "units.unit_sizes"},
    {"planning.phases"},
    {"planning.forecast"},
    {"planning.planned"},
    {
        "paging.updates",
        "paging.transfer",
        "units.homes",
        "units.state_homes",
        "model.model",
        "storage.room",
        "storage.spill",
    },
    {
        "paging.residency",
        "paging.pager",
        "autograd.saved",
        "monitoring.ranges",
        "autograd.mixing",
        "activations.activation_slots",
        "activations.activation_room",
        "activations.activation_pool",
    },
    {
        "autograd.hooks",
        "autograd.entrances",
        "autograd.backward",
        "autograd.lending",
        "autograd.changes",
        "autograd.arrivals",
        "autograd.modules",
        "autograd.microbatch",
        "activations.activations",
        "optim.norms",
        "optim.clip",
        "optim.overlap",
        "optim.shadow",
        "optim.streamed",
        "optim.resting",
    },
    {"optim.base", "optim.scaler", "optim.adamw"},
    {
        "optim.generic_recipe",
        "optim.generic_trial",
        "optim.generic_update",
        "optim.generic_load",
        "optim.generic",
    },
    {"units.refit"},
    {"engine"},
    {"hardware.measure"},
    {"model.initialize", "checkpoint.stored", "checkpoint.names", "checkpoint.given", "checkpoint.writer"},
    {
        "checkpoint.safetensors",
        "checkpoint.distributed",
        "checkpoint.frozen_unit",
        "checkpoint.frozen",
        "checkpoint.beside",
    },
    {"checkpoint.refill", "checkpoint.undo"},
    {"checkpoint.by_region"},
    {"checkpoint.snapshot", "checkpoint.weights", "planning.planner"},
    {"checkpoint.rollback"},
    {"api"},
    {
        "checkpoint.boxes",
        "checkpoint.container",
        "checkpoint.leftovers",
        "checkpoint.index",
        "checkpoint.metadata",
        "checkpoint.randomness",
        "checkpoint.place",
        "checkpoint.contents",
        "checkpoint.data_file",
        "checkpoint.verify",
        "checkpoint.pace",
        "checkpoint.reader",
    },
    {"checkpoint.shard"},
    {"checkpoint.callers", "checkpoint.saving", "checkpoint.export", "checkpoint.take"},
    {"checkpoint.save", "checkpoint.load"},
    {"monitoring.observe"},
    {"integrations.transformers", "integrations.lightning"},
    {"bench.scratch", "bench.fio", "bench.depths"},
    {"bench.stream"},
    {"bench.search"},
    {"bench.nvme"},
    {"bench.show"},
    {"doctor"},
    {"cli"},
]
INSIDE = {
    "paging.schedule": {"paging.recorded"},
    "paging.lookahead": {"paging.schedule"},
    "paging.waiting": {"paging.schedule"},
    "hardware.profiles": {"hardware.drives"},
    "units.layout": {"errors"},
    "monitoring.step_stats": {"monitoring.clock"},
    "monitoring.timeline": {"errors", "monitoring.watch"},
    "monitoring.metrics": {"monitoring.clock", "monitoring.step_stats", "monitoring.timeline", "monitoring.watch"},
    "monitoring.prometheus": {"monitoring.clock", "errors"},
    "storage.extents": {"units.layout"},
    "hardware.cgroup": {"hardware.drives"},
    "paging.loop": {"errors", "native"},
    "storage.checksum": set(),
    "storage.manifest": {"storage.checksum"},
    "storage.members": {"storage.manifest"},
    "storage.directory": set(),
    "tiers.host": {"tiers.base"},
    "tiers.portable": {"tiers.base"},
    "tiers.faulty": {"tiers.base"},
    "tiers.nvme": {"tiers.base"},
    "tiers.config": {"storage.directory"},
    "tiers.readonly": {"tiers.base"},
    "tiers.base": {"tiers.nvme", "tiers.portable"},  # chosen at run time, inside a function
    "storage.space": {"tiers.base"},
    "storage.blocks": {"tiers.base"},
    "storage.versions": {"storage.space", "storage.blocks", "tiers.base"},
    "storage.store": {"storage.versions", "storage.space", "storage.directory", "tiers.base"},
    "units.generic": {"units.records"},
    "paging.pager": {"paging.residency"},
    "activations.activation_room": {"activations.activation_slots"},
    "activations.activation_pool": {"activations.activation_slots", "activations.activation_room"},
    "activations.activations": {"autograd.backward"},
    "autograd.entrances": {"autograd.backward"},
    "units.paged": {"units.live"},
    "model.replaced": {"units.live"},
    "autograd.hooks": {
        "autograd.arrivals",
        "autograd.backward",
        "activations.activations",
        "autograd.changes",
        "autograd.entrances",
        "autograd.lending",
        "autograd.modules",
    },
    "autograd.microbatch": {"autograd.hooks"},
    "optim.clip": {"optim.norms"},
    "optim.streamed": {"optim.shadow"},
    "units.homes": {"units.state_homes"},
    "optim.scaler": {"optim.base"},
    "optim.adamw": {"optim.base"},
    "optim.generic_trial": {"optim.generic_recipe"},
    "optim.generic_update": {"optim.generic_recipe"},
    "optim.generic_load": {"optim.generic_recipe", "optim.generic_trial", "optim.generic_update"},
    "optim.generic": {
        "optim.generic_load",
        "optim.generic_recipe",
        "optim.generic_trial",
        "optim.generic_update",
    },
    "doctor.child": set(),
    "doctor.machine": {"doctor.finding"},
    "doctor.limits": {"doctor.finding", "doctor.machine"},
    "doctor.native": {"doctor.finding", "doctor.machine"},
    "doctor.filesystems": {"doctor.finding"},
    "doctor.direct": {"doctor.finding"},
    "doctor.paths": {"doctor.finding", "doctor.direct", "doctor.filesystems", "doctor.native"},
    "doctor.libraries": {"doctor.finding", "doctor.child", "doctor.machine"},
    "doctor.gpudirect": {"doctor.finding", "doctor.child", "doctor.machine"},
    "doctor.report": {
        "doctor.finding",
        "doctor.child",
        "doctor.machine",
        "doctor.limits",
        "doctor.native",
        "doctor.paths",
        "doctor.libraries",
        "doctor.gpudirect",
    },
    "doctor.gpudirect_trial": {"doctor.exercise", "doctor.backends"},
    "doctor.backends": {"doctor.finding", "doctor.exercise", "doctor.gpudirect_trial", "doctor.training"},
    "doctor.selftest": {"doctor.child"},
    "checkpoint.frozen": {"checkpoint.frozen_unit"},
    "checkpoint.metadata": {"checkpoint.index"},
    "checkpoint.place": {"checkpoint.index"},
    "checkpoint.data_file": {"checkpoint.boxes", "checkpoint.container", "checkpoint.contents", "checkpoint.index"},
    "checkpoint.verify": {"checkpoint.container", "checkpoint.index"},
    "checkpoint.reader": {"checkpoint.index", "checkpoint.verify"},
}
PURE = {  # no torch
    *(
        "paging.recorded",
        "paging.schedule",
        "paging.lookahead",
        "paging.waiting",
        "units.layout",
        "storage.extents",
        "errors",
        "sizes",
        "monitoring.metrics",
        "units.state_format",
    ),
    *("monitoring.clock", "monitoring.step_stats", "monitoring.watch", "monitoring.timeline", "monitoring.prometheus"),
    *(
        "storage.stripes",
        "hardware.endurance",
        "hardware.hugepages",
        "hardware.profiles",
        "hardware.drives",
        "hardware.cgroup",
        "paging.pins",
        "paging.gate",
        "paging.states",
        "pace",
    ),
    *("sim.clock", "sim.links", "sim.model", "sim.stepper", "sim.updates", "sim.paging", "planning.simulate"),
    "checkpoint.boxes",
    *(
        "hardware.machine",
        "planning.phases",
        "planning.forecast",
        "planning.planned",
        "units.fit",
        "planning.placement",
    ),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, top_only: bool = False) -> set[str]:
    """Modules that a file imports at run time; what only type checkers see does not count."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def own_imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Files of the package that a file imports, by their names in it."""
    known = {name_of(other) for other in FILES} - {""}
    found = {
        name.removeprefix("tierzero.") for name in imports_of(path, top_only=top_only) if name.startswith("tierzero.")
    }
    return {name for name in found if name in known and not (PACKAGE / name.replace(".", "/")).is_dir()}


def row_of(name: str) -> int:
    for index, row in enumerate(ROWS):
        if name in row or name.split(".")[0] in row:
            return index
    raise AssertionError(f"tierzero/{name.replace('.', '/')}.py has no place in the table of this test: give it one")


@pytest.mark.parametrize("path", [path for path in FILES if name_of(path) and path.name != "__init__.py"], ids=name_of)
def test_arrows(path: Path) -> None:
    """Imports go one way only."""
    name = name_of(path)
    row = row_of(name)
    if ROWS[row] == {"cli"}:
        return
    for other in own_imports(path):
        allowed = row_of(other) < row or other in INSIDE.get(name, set())
        assert allowed, f"{name} must not import {other}"


def test_no_cycles() -> None:
    """No module imports itself through others when it is loaded."""
    graph = {name_of(path): own_imports(path, top_only=True) for path in FILES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_small_files(path: Path) -> None:
    """One idea a file."""
    assert len(path.read_text().splitlines()) <= 350


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules(name: str) -> None:
    """Arithmetic needs no torch."""
    assert not {found.split(".")[0] for found in imports_of(PACKAGE / f"{name.replace('.', '/')}.py")} & {
        "torch",
        "numpy",
    }


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_assigned_into_torch(path: Path) -> None:
    """No attribute of torch, of nn.Module or of a user's class is ever set; instances only."""
    for node in ast.walk(ast.parse(path.read_text())):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AugAssign | ast.AnnAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute):
                base = ast.unparse(target.value)
                assert base.split(".")[0] not in ("torch", "nn", "F"), f"line {node.lineno} assigns into {base}"
                assert "__class__" not in base
                assert not base.startswith("type("), f"line {node.lineno} assigns into a class"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            assert ast.unparse(node.args[0]).split(".")[0] not in ("torch", "nn", "F")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_left_undone(path: Path) -> None:
    """No stubs, and no note of work to come."""
    text = path.read_text()
    for word in ("TODO", "FIXME", "XXX", "NotImplementedError"):
        assert word not in text, word


def test_importing_the_package_needs_no_torch() -> None:
    """`import tierzero` alone is quick: help and version work without loading torch."""
    code = "import sys, tierzero; assert tierzero.__version__; assert 'torch' not in sys.modules; dir(tierzero)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE.parent)})


def test_every_public_name_exists() -> None:
    """Lazy names resolve, and an unknown one is an AttributeError."""
    for name in tierzero.__all__:
        assert getattr(tierzero, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tierzero.nothing  # noqa: B018
