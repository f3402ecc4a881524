"""The house's walls: which module may import which, read from the source itself, and sizes that fit a screen.

Imports run one way: main -> cli -> bench -> engine -> models -> layers -> doors -> rooms -> errors.  Imports inside
functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mpillm"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 80

# Storeys from the top; a module may import its own storey and those below
STOREYS = (("main",), ("cli",), ("bench",), ("engine",), ("models",), ("layers",),
           ("partition", "collectives", "kernels", "plan", "cache", "experts", "latent",
            "latent_prompt", "turns", "io", "config", "log"),
           ("jit", "formats", "quant", "machine"), ("errors",))
LEVEL = {place: len(STOREYS) - depth for depth, storey in enumerate(STOREYS) for place in storey}

# Figures of a model that all but the rooms may read: a module of plain dataclasses
SHARED = "models.config"

# Only these places import these libraries
ONLY_IMPORTERS = {"mpi4py": ("collectives",), "numba": ("jit",), "llvmlite": ("jit",)}

# Beyond the storeys: what a place must not import although it lies at its level or below
FORBIDDEN = {
    "partition": ("collectives", "kernels", "io", "config", "log", "jit", "formats", "quant", "machine",
                  SHARED),
    "io": ("partition", "collectives"),
    "formats": ("partition", "collectives"),
    "models": ("collectives",),
}

# Reached on a login node, without MPI: nothing that starts it may be imported when they are
WITHOUT_MPI = ("cli.plan",)


@dataclass(frozen=True)
class Import:
    """``module`` (dotted, without the package's own name) imports ``target``, at line ``line``."""

    module: str
    target: str        # the same for targets inside, a top-level name for those outside
    inside: bool       # the package itself
    line: int
    late: bool         # in a function: not when the module is imported

    @property
    def where(self) -> str:
        return f"{self.module}:{self.line}"


@dataclass
class House:
    """The parsed modules of a package, by dotted name without the package's own."""

    name: str
    trees: dict[str, ast.Module]
    sources: dict[str, str]
    packages: frozenset[str]

    @staticmethod
    def of(root: Path) -> House:
        sources = {}
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
        packages = frozenset(".".join(p.relative_to(root).parts[:-1]) for p in root.rglob("__init__.py"))
        return House(root.name, {name: ast.parse(text) for name, text in sources.items()}, sources, packages)

    @cached_property
    def imports(self) -> list[Import]:
        return [found for name, tree in self.trees.items() for found in self._imports_of(name, tree)]

    def _imports_of(self, module: str, tree: ast.Module) -> list[Import]:
        late = {id(inner) for node in ast.walk(tree)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                for inner in ast.walk(node)}
        found = []
        for node in ast.walk(tree):
            for target in self._targets(module, node):
                head, _, rest = target.partition(".")
                inside = head == self.name
                found.append(Import(module, rest if inside else head, inside, node.lineno, id(node) in late))
        return found

    def _targets(self, module: str, node: ast.AST) -> list[str]:
        """Absolute names that a node imports; of ``from package import module`` the module's own name."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                home = [self.name, *(module.split(".") if module else [])]
                home = home if module in self.packages else home[:-1]
                home = home[:len(home) - node.level + 1]
                base = ".".join(home + ([base] if base else []))
            return [self._module_in(base, alias.name) for alias in node.names]
        if isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if called in ("import_module", "__import__") and isinstance(name, str):
                return [name]
        return []

    def _module_in(self, base: str, name: str) -> str:
        inner = f"{base}.{name}".removeprefix(self.name + ".")
        return f"{base}.{name}" if inner in self.trees and base.split(".")[0] == self.name else base


def place(module: str) -> str:
    """The door or room of a module; the package's own ``__init__`` is ``""``."""
    return module.split(".")[0]


def in_room(module: str, wall: str) -> bool:
    return module == wall or module.startswith(wall + ".")


def homeless(house: House) -> list[str]:
    """Modules that stand nowhere in the house."""
    return [f"{name} belongs to no storey: put it behind a door, or draw the house anew"
            for name in house.trees if name and place(name) not in LEVEL]


def upward_imports(house: House) -> list[str]:
    """Imports against the direction of the storeys."""
    wrong = []
    for i in house.imports:
        if not i.inside or not i.target or i.target not in house.trees:
            continue
        own, other = LEVEL.get(place(i.module), 0), LEVEL.get(place(i.target), 0)
        shared = i.target == SHARED and own > LEVEL["formats"]
        if other > own and not shared:
            wrong.append(f"{i.where} imports {i.target}, which lies above it")
    return wrong


def forbidden_imports(house: House) -> list[str]:
    """Imports that a wall within the storeys forbids, libraries outside their only importer included."""
    wrong = []
    for i in house.imports:
        walls = FORBIDDEN.get(place(i.module), ()) if i.inside else ()
        wrong += [f"{i.where} imports {i.target}" for wall in walls if in_room(i.target, wall)]
        if not i.inside and place(i.module) not in ONLY_IMPORTERS.get(i.target, (place(i.module),)):
            wrong.append(f"{i.where} imports {i.target}, which only {ONLY_IMPORTERS[i.target][0]} may")
        if place(i.module) == "partition" and not i.inside and i.target not in sys.stdlib_module_names:
            wrong.append(f"{i.where} imports {i.target}: partition has the standard library only")
    return wrong


def absent_imports(house: House) -> list[str]:
    """Imports of modules that the package does not have."""
    wrong = [f"{i.where} imports {i.target}, which is not there" for i in house.imports
             if i.inside and i.target and i.target not in house.trees]
    return list(dict.fromkeys(wrong))


def reachable(house: House, start: str, late: bool) -> dict[str, str]:
    """What importing ``start`` imports, each with its importer; with ``late``: imports in functions too."""
    edges: dict[str, set[str]] = {}
    for i in house.imports:
        if i.inside and (late or not i.late) and i.target != i.module:
            edges.setdefault(i.module, set()).add(i.target)
    seen, waiting = {}, [(start, "")]
    while waiting:
        module, importer = waiting.pop()
        for target in sorted(edges.get(module, ())):
            if target not in seen:
                seen[target] = module
                waiting.append((target, module))
    return seen


def cycles(house: House) -> list[str]:
    """Modules that import themselves by way of others, late imports included."""
    return [f"{name} imports itself by way of {reachable(house, name, True)[name]}"
            for name in house.trees if name and name in reachable(house, name, True)]


def mpi_on_import(house: House) -> list[str]:
    """Modules for login nodes whose import would start MPI."""
    wrong = []
    starters = {i.module for i in house.imports if i.target == "mpi4py" and not i.inside and not i.late}
    for name in WITHOUT_MPI:
        found = starters & set(reachable(house, name, False))
        wrong += [f"importing {name} starts MPI by way of {module}" for module in sorted(found)]
    return wrong


def too_long(house: House) -> list[str]:
    """Files and functions beyond the size that one reads in one go."""
    wrong = []
    for name, text in house.sources.items():
        lines = text.count("\n") + (not text.endswith("\n") and bool(text))
        if lines > MAX_FILE_LINES:
            wrong.append(f"{name}: {lines} lines, {MAX_FILE_LINES} are allowed")
        for node in ast.walk(house.trees[name]):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, "
                                 f"{MAX_FUNCTION_LINES} are allowed")
    return wrong


RULES = (homeless, absent_imports, upward_imports, forbidden_imports, cycles, mpi_on_import, too_long)


@pytest.fixture(scope="module")
def house() -> House:
    return House.of(PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_stands(house, rule):
    wrong = rule(house)
    assert not wrong, "\n".join(wrong)


def test_the_house_is_the_one_that_is_meant(house):
    """Guards the rules above against looking at nothing."""
    assert {"partition", "errors", "models.config"} <= set(house.trees)
    assert any(i.module == "partition" and i.target == "errors" for i in house.imports)


# The rules themselves, on small houses that break one each

def build(tmp_path: Path, files: dict[str, str]) -> House:
    root = tmp_path / "mpillm"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        for folder in (path.parent, *path.parent.parents):
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
    return House.of(root)


GOOD = {
    "errors.py": "class E(Exception): ...\n",
    "partition.py": "from math import gcd\nfrom mpillm.errors import E\n",
    "collectives.py": "from mpi4py import MPI\nfrom .machine import topology\n",
    "machine/topology.py": "from ..errors import E\n",
    "jit/gemm.py": "import numba\nfrom . import policy\n",
    "jit/policy.py": "import numba.core\nfrom mpillm import __version__\n",
    "kernels.py": "import numpy\nfrom mpillm.jit import gemm\nfrom mpillm.models.config import Figures\n",
    "formats/gguf.py": "import numpy\nfrom mpillm.errors import E\n",
    "models/config.py": "from dataclasses import dataclass\n",
    "models/llama.py": "from mpillm.models import config\nfrom mpillm.partition import Share\n",
    "engine/generate.py": "import mpillm.collectives\nfrom mpillm.models import llama\n",
    "cli/run.py": "from mpillm.engine import generate\n",
    "cli/plan.py": "from mpillm import partition\ndef f():\n    from mpillm.engine import generate\n",
    "main.py": "from mpillm.cli import run\n",
}


def test_a_good_house_has_no_faults(tmp_path):
    house = build(tmp_path, GOOD)
    assert [fault for rule in RULES for fault in rule(house)] == []
    assert {i.target for i in house.imports if i.module == "collectives"} == {"mpi4py", "machine.topology"}


@pytest.mark.parametrize(("rule", "name", "text", "message"), [
    (homeless, "helpers.py", "", "helpers belongs to no storey"),
    (absent_imports, "main.py", "from mpillm.cli.gone import run\n", "imports cli.gone, which is not there"),
    (upward_imports, "engine/generate.py", "from mpillm.cli import run\n", "generate:1 imports cli.run"),
    (upward_imports, "errors.py", "def f():\n    from . import partition\n", "errors:2 imports partition"),
    (upward_imports, "kernels.py", "import mpillm.models.llama as m\n", "kernels:1 imports models.llama"),
    (upward_imports, "formats/gguf.py", "from ..models.config import C\n", "gguf:1 imports models.config"),
    (upward_imports, "jit/policy.py", "import importlib as i\ni.import_module('mpillm.kernels')\n",
     "jit.policy:2 imports kernels"),
    (upward_imports, "machine/topology.py", "if TYPE_CHECKING:\n    from mpillm import log\n",
     "machine.topology:2 imports log"),
    (upward_imports, "__init__.py", "from mpillm import kernels\n", ":1 imports kernels"),
    (forbidden_imports, "partition.py", "import numpy\n", "partition:1 imports numpy"),
    (forbidden_imports, "partition.py", "from mpillm import kernels\n", "partition:1 imports kernels"),
    (forbidden_imports, "partition.py", "import mpillm.models.config\n", "partition:1 imports models.config"),
    (forbidden_imports, "models/llama.py", "from mpillm.collectives import World\n",
     "models.llama:1 imports collectives"),
    (forbidden_imports, "formats/gguf.py", "import mpillm.partition\n", "formats.gguf:1 imports partition"),
    (forbidden_imports, "io.py", "from mpillm import collectives as c\n", "io:1 imports collectives"),
    (forbidden_imports, "engine/generate.py", "def f():\n    import mpi4py.MPI\n",
     "engine.generate:2 imports mpi4py, which only collectives may"),
    (forbidden_imports, "kernels.py", "from numba import njit\n", "kernels:1 imports numba, which only jit"),
    (cycles, "machine/topology.py", "def f():\n    from mpillm import collectives\n",
     "collectives imports itself by way of machine.topology"),
    (mpi_on_import, "cli/plan.py", "from mpillm.engine import generate\n",
     "importing cli.plan starts MPI by way of collectives"),
    (too_long, "io.py", "x = 1\n" * 451, "io: 451 lines"),
    (too_long, "io.py", "def f():\n" + "    x = 1\n" * 80, "io:1: f has 81 lines"),
    (too_long, "io.py", "class C:\n    async def f(self):\n" + "        x = 1\n" * 80, "io:2: f has 81"),
])
def test_each_fault_is_found(tmp_path, rule, name, text, message):
    faults = rule(build(tmp_path, {**GOOD, "log.py": "", "io.py": "", name: text}))
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize(("name", "text"), [
    ("io.py", "x = 1\n" * 450), ("io.py", "@dec\n@dec\ndef f():\n" + "    x = 1\n" * 79)])
def test_sizes_at_the_border_are_allowed(tmp_path, name, text):
    assert too_long(build(tmp_path, {**GOOD, name: text})) == []
