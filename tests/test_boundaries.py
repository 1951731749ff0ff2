"""Who may import whom, what loads when, and that the three descriptions of the native library are one."""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsxfer import _native

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hsxfer"
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Modules of hsxfer that each may import; what is not listed is no part of the core and may use what is public.
CORE = {
    "errors": set(),
    "config": {"errors"},
    "ranks": {"errors"},
    "handle": {"errors"},
    "layout": {"errors", "handle"},
    "foreign": {"errors"},
    "tensors": {"errors", "foreign", "handle"},
    "_native": {"errors"},
    "arena": {"errors", "_native"},
    "ticket": {"errors", "encoding", "_native", "handle", "layout", "ranks", "tensors"},
    "describe": {"errors", "handle"},
    "outbox": {"errors", "foreign", "_native", "arena", "tensors", "ticket"},
    "sink": {
        "errors",
        "_native",
        "describe",
        "config",
        "handle",
        "layout",
        "ranks",
        "tensors",
        "arena",
        "ticket",
        "outbox",
    }
    | {"transports"},
    "tensors_cuda": {"errors", "foreign", "tensors"},
    "encoding": {"errors", "_native", "foreign", "layout", "tensors", "tensors_cuda"},
    "fetch": {"errors", "_native", "arena"},
    "sample": {"errors", "encoding", "_native", "handle", "layout", "tensors", "tensors_cuda", "arena"},
    "delivery": {"errors", "encoding", "layout", "arena", "fetch", "handle", "sample", "tensors_cuda"},
    "prefetch": {"errors", "sample"},
    "source": {
        "errors",
        "config",
        "delivery",
        "prefetch",
        "foreign",
        "tensors_cuda",
        "handle",
        "tensors",
        "arena",
        "sample",
        "transports",
    },
    "transports": {"errors", "config", "transports.base", "transports.shm"},
    "transports.base": {"arena", "config"},
    "transports.shm": {"errors", "arena", "config"},
}
HEAVY = {"torch", "numpy", "cupy", "ml_dtypes"}


def imports(path: Path, module: str) -> Iterator[tuple[str, bool]]:
    """Full names of what a file imports, and whether that happens when it is itself imported."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()  # for type checkers only
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(inner for child in node.body for inner in ast.walk(child))
    late = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    package = ["hsxfer", *module.split(".")] if module else ["hsxfer"]
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            inner = [f"{stem}.{alias.name}" for alias in node.names]
            known = [name for name in inner if name.removeprefix("hsxfer.") in FILES]
            yield from ((name, node not in late) for name in known or [stem])


def own(module: str) -> set[str]:
    found = {name for name, _ in imports(FILES[module], module) if name.split(".")[0] == "hsxfer"}
    return {name.removeprefix("hsxfer").removeprefix(".") for name in found}


def foreign(module: str) -> set[str]:
    names = {name.split(".")[0] for name, _ in imports(FILES[module], module)}
    return names - set(sys.stdlib_module_names) - {"hsxfer"}


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_what_it_may(module: str) -> None:
    assert own(module) <= CORE[module]


def test_every_file_is_of_the_core_or_of_its_rim() -> None:
    rim = {"", "engines", "trainers", "testing", "data", "metrics", "cli", "demo", "transports"}
    assert {module for module in FILES if module not in CORE and module.split(".")[0] not in rim} == set()


def test_nobody_imports_the_rim_from_inside() -> None:
    for module in FILES:
        for name in own(module):
            top = name.split(".")[0]
            if top in ("engines", "trainers", "testing", "demo", "cli"):
                runs = module.split(".")[0] == "cli" and top == "demo"  # `hsxfer demo`
                asks = (module, name) == ("cli.health", "engines.sglang.setup")  # which versions have an adapter
                assert module.split(".")[0] in {top, "demo"} or runs or asks, f"{module} imports {name}"
    engines = {module.split(".")[1] for module in FILES if module.startswith("engines.")}
    for module in FILES:
        for name in own(module):
            if module.startswith("engines.") and name.startswith("engines."):
                assert name.split(".")[1] == module.split(".")[1], f"engine {module} imports {name}"
    assert engines


def test_tensors_is_the_one_place_of_the_core_for_foreign_packages_and_imports_them_late() -> None:
    assert {module for module in CORE if foreign(module)} == {"tensors", "tensors_cuda"}
    assert foreign("tensors") | foreign("tensors_cuda") <= HEAVY
    for name, at_import in imports(FILES["tensors"], "tensors"):
        assert not (at_import and name.split(".")[0] in HEAVY), f"tensors imports {name} when it is imported"


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return {name.split(".")[0] for name in out.split()}


@pytest.mark.parametrize("statement", ["import hsxfer", "import hsxfer.engines.sglang"])
def test_importing_loads_the_standard_library_only(statement: str) -> None:
    extra = loaded_by(statement) - loaded_by("pass") - set(sys.stdlib_module_names)
    assert extra == {"hsxfer"}


def test_nothing_reads_the_environment_at_import() -> None:
    for module, path in FILES.items():
        tree = ast.parse(path.read_text())
        late = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
        reads = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and node not in late
        ]
        assert not reads, f"{module}: lines {reads}"


def test_one_broad_except_in_the_package_at_the_hook() -> None:
    found = []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            caught = node.type if isinstance(node, ast.ExceptHandler) else None
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                caught = ast.Tuple(node.args)
            names = {inner.id for inner in ast.walk(caught) if isinstance(inner, ast.Name)} if caught else set()
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            if isinstance(node, ast.ExceptHandler) and ast.unparse(node.body[-1]) == "raise":
                continue  # it tidies up and swallows nothing
            if bare or names & {"Exception", "BaseException"}:
                found.append(module)
    assert len(found) <= 1, found
    assert all(module.startswith("engines.") for module in found), found


def test_the_library_needs_neither_torch_nor_cuda_nor_python() -> None:
    def readelf(option: str) -> str:
        return subprocess.run(
            ["readelf", "-W", option, str(_native.load().path)], check=True, capture_output=True, text=True
        ).stdout

    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d"))
    assert set(needed) <= {
        *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"),
        *("libgcc_s.so.1", "libstdc++.so.6", "ld-linux-aarch64.so.1"),
    }
    symbols = [line.split() for line in readelf("--dyn-syms").splitlines() if re.match(r"\s*\d+:", line)]
    undefined = {fields[7].split("@")[0] for fields in symbols if fields[6] == "UND" and len(fields) > 7}
    assert not {name for name in undefined if re.match(r"_?Py[A-Z_]|cu[A-Z]|cuda|nccl", name)}
    defined = {fields[7].split("@")[0] for fields in symbols if fields[6] != "UND"}
    assert {name for name in defined if name.startswith("hsx_")} == set(HEADER.functions)
    assert not {name for name in defined if not name.startswith(("hsx_", "HSX"))}, "nothing else can collide"


class Header:
    """csrc/hsxfer.h, read with regular expressions: one declaration per statement."""

    def __init__(self) -> None:
        text = re.sub(r"//.*", "", (ROOT / "csrc/hsxfer.h").read_text())
        self.functions = {
            name: [self._type(argument) for argument in arguments.split(",") if argument.strip() != "void"]
            for name, arguments in re.findall(r"\b(hsx_\w+)\(([^)]*)\);", text)
        }
        self.structs = {
            name: [field for line in body.split(";") if line.strip() for field in self._fields(line)]
            for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.DOTALL)
        }
        self.codes = {name: int(value) for name, value in re.findall(r"\bHSX_(?:E_)?(\w+) = (\d+)", text)}
        self.defines = dict(re.findall(r"#define (HSX_\w+) (\w+)\n", text))

    @staticmethod
    def _type(argument: str) -> str:
        """`pointer`, or the name of the type."""
        return "pointer" if "*" in argument else re.sub(r"\bconst\b|\w+$", "", argument.strip()).strip()

    def _fields(self, line: str) -> list[tuple[str, str]]:
        first, *rest = [part.strip() for part in line.split(",")]
        kind = self._type(first)
        return [(re.split(r"[ *]", name)[-1], kind) for name in (first, *rest)]


HEADER = Header()
C_TYPES = {
    "uint64_t": ctypes.c_uint64,
    "uint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "hsx_slot": _native.Slot,
}
STRUCTS = {
    "hsx_arena_options": _native.ArenaOptions,
    "hsx_slot": _native.Slot,
    "hsx_sample_spec": _native.SampleSpec,
    "hsx_copy": _native.Copy,
    "hsx_stats": _native.Stats,
    "hsx_lease": _native.Lease,
    "hsx_fetch_op": _native.FetchOp,
    "hsx_probe_info": _native.ProbeInfo,
}


def same(kind: str, ours: type) -> bool:
    if kind == "pointer":
        return ours in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(ours, ctypes._Pointer)
    return C_TYPES[kind] is ours


def test_header_and_python_agree_on_every_function() -> None:
    assert len(HEADER.functions) > 15
    bare = {"hsx_abi_version", "hsx_last_error", "hsx_kernels_missing"}
    assert set(HEADER.functions) == set(_native._SIGNATURES) | bare
    for name, ours in _native._SIGNATURES.items():
        theirs = HEADER.functions[name]
        assert len(ours) == len(theirs), name
        for position, (kind, mine) in enumerate(zip(theirs, ours, strict=True)):
            assert same(kind, mine), f"{name}, argument {position}: {kind} in the header, {mine.__name__} in Python"
    assert all(HEADER.functions[name] == [] for name in bare)


@pytest.mark.parametrize("name", STRUCTS)
def test_header_and_python_agree_on_every_field_in_order(name: str) -> None:
    theirs, ours = HEADER.structs[name], STRUCTS[name]._fields_
    assert [field for field, _ in theirs] == [field[0] for field in ours]
    for (field, kind), mine in zip(theirs, ours, strict=True):
        assert same(kind, mine[1]), f"{name}.{field}: {kind} in the header, {mine[1].__name__} in Python"


def test_every_struct_of_the_header_is_compared() -> None:
    assert set(HEADER.structs) == set(STRUCTS)


def test_header_and_python_agree_on_codes_and_constants() -> None:
    assert {name: getattr(_native, name) for name in HEADER.codes} == HEADER.codes
    assert len(HEADER.codes) == 11
    assert int(HEADER.defines["HSX_ABI_VERSION"]) == _native.ABI_VERSION
    assert HEADER.defines["HSX_NO_DIGEST"] == "UINT64_MAX"
    assert _native.NO_DIGEST == 2**64 - 1


def test_the_fates_are_those_of_the_native_layout() -> None:
    layout = (ROOT / "csrc/layout.h").read_text()
    (body,) = re.findall(r"enum Fate : \w+ \{(.*?)\}", layout)
    fates = {
        int(value): re.sub(r"(?<!^)([A-Z])", r" \1", name).lower()
        for name, value in re.findall(r"k(\w+) = (\d+)", body)
    }
    assert fates == _native.FATES
