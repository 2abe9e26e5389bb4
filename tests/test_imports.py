"""Who may import whom. One walk over every import statement of every room."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("harness", "reference", "gates", "candidates", "tests")
FORBIDDEN = {
    "harness": {"reference", "gates", "candidates", "tests"},
    "reference": {"harness", "gates", "candidates", "tests"},
    "gates": {"candidates", "tests"},
    "candidates": {"gates", "tests"},
    "candidates/tilelang": set(ROOMS),
    "candidates/ascend": set(ROOMS),
    "candidates/distributed": set(ROOMS),
}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_what_it_may(room):
    own = room.replace("/", ".")
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / room).rglob("*.py")
        if file.parent.name != "bench"  # which stands beside the kernels, and times the peers too
        for name in imports(file)
        if name.partition(".")[0] in FORBIDDEN[room] and not f"{name}.".startswith(f"{own}.")
    }
    assert not wrong


def test_no_kernel_imports_the_benchmark():
    kernels = (ROOT / "candidates" / "tilelang").glob("*.py")
    assert not [f for f in kernels for name in imports(f) if name.endswith("bench")]


def test_the_walk_sees_imports_wherever_they_stand(tmp_path):
    file = tmp_path / "room.py"
    file.write_text("def f():\n    import gates.ladder as l\n    from reference.ops import rope\n")
    assert list(imports(file)) == ["gates.ladder", "reference.ops.rope"]


def test_the_top_holds_only_the_rooms():
    entries = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__"))}
    made_by_runs = {"evidence", "build", "touchstone.egg-info"}
    files = {"pyproject.toml", "README.md", "Makefile", "requirements.lock"}
    assert entries - made_by_runs <= {*ROOMS, *files}
