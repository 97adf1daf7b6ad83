# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The linter for kernels. Lines of the bad fixtures say which rules they break; what they do not say must not be found."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from nki3d.lint import RULES, Finding, lint_file, lint_source

FOLDER = pathlib.Path(__file__).parent / "data" / "lint"
BAD, GOOD = sorted(FOLDER.glob("bad_*.py")), sorted(FOLDER.glob("good_*.py"))
HEADER = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n"


def expected(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    return {(number, code) for number, line in lines for code in re.findall(r"NKI\d+", line.partition("# expect:")[2])}


def codes(source):
    return [finding.code for finding in lint_source(HEADER + source)]


def kernel(*lines, decorator="@nki.jit"):
    return "\n".join([decorator, "def kernel(x, n=1):", *(f"    {line}" for line in lines), "    return x", ""])


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_finds_what_is_marked_and_no_more(path):
    found = {(finding.line, finding.code) for finding in lint_file(path)}
    assert found == expected(path)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_finds_nothing_in_good_kernels(path):
    assert lint_file(path) == []


def test_the_good_kernels_are_read_as_kernels():
    for path in GOOD:
        text = path.read_text()
        spoiled = text.replace(".shape[0]", ".shape[0 if nl is nl else 0]").replace("reg = nisa", "reg = nl is nl or nisa")
        assert {finding.code for finding in lint_source(spoiled)} == {"NKI001"}


def test_every_rule_is_exercised():
    assert {code for path in BAD for _, code in expected(path)} == set(RULES)


def test_every_finding_has_a_message_and_a_cure():
    findings = [finding for path in BAD for finding in lint_file(path)]
    for text in (*(finding.message for finding in findings), *(finding.cure for finding in findings)):
        assert re.fullmatch(r"[A-Z0-9n`].*\.", text, re.DOTALL), text
    verbs = (
        "Add|Assign|Call|Check|Compare|Compute|Define|Derive|Import|Keep|Leave|Look|Loop|Make|Move|Name|Pass|Remove|Return|Set|"
        "Slice|Use|Write"
    )
    for cure in (*(finding.cure for finding in findings), *(rule.cure for rule in RULES.values())):
        assert re.match(rf"({verbs})\b", cure), cure
    for path in BAD:
        assert lint_file(path) == sorted(lint_file(path))


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("nisa.tensor_cpy(x, x)", "Write nisa.tensor_copy."),
        ("nisa.ndarray((1, 1), nl.int8)", "Write nl.ndarray."),
        ("nki.memset(x, 0)", "Write nisa.memset."),
        ("nisa.memset(x, 0, engine=nisa.engine.vecto)", "Write nisa.engine.vector."),
        ("print(nl.tile_size.pmx)", "Write nl.tile_size.pmax."),
        ("nl.utterly_unlike()", "Look the name up in nki_api.json."),
        ("for i in nl.range(n): print(i)", "Write range."),
        ("nisa.tensor_copy(x, x, engin=1)", "Write engine=."),
        ("nisa.tensor_copy(x)", "Add `src`."),
        ("nl.ndarray((1, 1), nl.int8, buffer='psum')", "Pass nl.psum."),
    ],
)
def test_cures_name_what_is_meant(line, cure):
    (finding,) = lint_source(HEADER + kernel(line))
    assert finding.cure == cure


def test_places():
    (finding,) = lint_source("import nki\n\n\n@nki.jit\ndef kernel(x):\n    return 1, x is None\n", "folder/kernel.py")
    assert finding == Finding("folder/kernel.py", 6, 15, "NKI001", finding.message, finding.cure)
    assert str(finding).startswith("folder/kernel.py:6:15: NKI001 ")


@pytest.mark.parametrize(
    "decorator",
    [
        "@nki.jit",
        "@nki.jit()",
        "@nki.jit(debug=True)",
        "import nki as n\n@n.jit",
        "from nki import jit\n@jit",
        "from nki import jit as compiled\n@compiled()",
        "from a._nki import nki as n\n@n.jit",
        "from . import _nki\n@_nki.nki.jit",
        "from ._nki import nki\n@nki.jit",
        "jit = nki.jit\n@jit",
        "from functools import partial\n@partial(nki.jit, debug=True)",
    ],
)
def test_ways_to_make_a_kernel(decorator):
    assert codes(kernel("y = x is n", decorator=decorator)) == ["NKI001"]


@pytest.mark.parametrize("decorator", ["import jax\n@jax.jit", "from jax import jit\n@jit", ""])
def test_other_functions_are_host_code(decorator):
    assert codes(kernel("y = x is n", decorator=decorator)) == []


@pytest.mark.parametrize(
    "call", ["run = nki.jit(kernel)", "nki.jit(debug=True)(kernel)(1)", "def host():\n    return nki.jit(kernel)(1)"]
)
def test_a_function_given_to_jit_is_a_kernel(call):
    assert codes(kernel("y = x is n", decorator="") + call) == ["NKI001"]


def test_helpers_are_reached_through_helpers_tables_and_other_names():
    source = """
def far(x):
    return x is None

def near(x):
    return far(x)

def listed(x):
    return x is None

def host(x):
    return x is None

TABLE = (listed, len)
other = near

@nki.jit
def kernel(x):
    def nested(y):
        return other(y)
    return nested(x), TABLE[0](x)
"""
    lines = [finding.line - 3 for finding in lint_source(HEADER + source)]
    assert lines == [3, 9]


@pytest.mark.parametrize(
    ("mark", "count"),
    [("# nki: host", 0), ("#nki: host", 0), ("# nki: host, as it plans", 0), ("# noqa", 1), ("# nki: kernel", 1), ("", 1)],
)
def test_the_mark_of_host_code(mark, count):
    assert len(codes(f"def helper(x):  {mark}\n    return x is None\n" + kernel("helper(x)"))) == count


@pytest.mark.parametrize(
    "lines",
    [
        ["enumerate = range", "enumerate(3)"],  # a name of the file's own
        ["a = nl.ndarray((1, 1), nl.int8)", "a = n", "a += 1"],  # no longer a tensor
        ["a = []", "a = x", "a.sort()"],  # no longer a list
        ["n = 1 << 16", "n *= 2", "m = n * 65536"],  # of unknown value
        ["total = 1 << 30", "m = -total - total"],
        ["a = a + a", "b = c * 2", "c = b * 2"],
        ["a = 1 // 0", "b = 2 ** -1", "c = 1 << -1"],
        ["for nl in (1, 2):", "    print(nl.zeroes)"],
        ["print(f'{x!r:>{n}}', __name__, undefined, ...)"],
        ["x[..., None, 0:2, ::2] = nl.load(x)"],
        ["while n < 3 and not x: n += 1"],
        ["print(nki.some_module.name)"],
        ["'''is not None'''", "# lambda: {}"],
    ],
)
def test_no_false_alarm(lines):
    assert codes(kernel(*lines)) == []


def test_what_a_nested_function_changes_has_no_known_value():
    lines = ["a, b = [], 65536", "def body(i):", "    nonlocal a, b", "    a, b = x, 2", "a.sort()", "c = b * b"]
    assert codes("b = 1\n" + kernel(*lines) + kernel("print(b)")) == ["NKI010"]


def test_classes_that_derive_from_each_other():
    assert codes("class A(B): pass\nclass B(A): pass\n" + kernel("A(), B()")) == ["NKI045", "NKI045"]
    assert codes("class A(nl.NKIObject): pass\nclass B(A): pass\nclass A(B): pass\n" + kernel("A(), B()")) == []


def test_a_star_import_may_bind_any_name():
    assert codes("from nki.language import *\n" + kernel("y = abs(sum(x, 1))")) == []


def test_names_that_depend_on_each_other_take_no_time():
    chain = [f"a{i} = a{i + 1} + a{i + 1}" for i in range(60)]
    assert codes(kernel(*chain, "a60 = 1")) == ["NKI025"]  # where 2**31 is reached first


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "nki3d.lint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_command_line():
    result = run(FOLDER)
    assert result.returncode == 1
    assert not result.stderr
    places = [re.match(r"(.*):(\d+):(\d+): (NKI\d+) ", line) for line in result.stdout.splitlines()]
    assert {(pathlib.Path(place[1]), int(place[2]), place[4]) for place in places} == {
        (path, line, code) for path in BAD for line, code in expected(path)
    }


def test_exit_statuses(tmp_path, capsys):
    from nki3d.lint.__main__ import main

    (tmp_path / ".hidden").mkdir()
    for name in ("broken.py", ".hidden/broken.py"):
        (tmp_path / name).write_text("def f(:\n")
    (tmp_path / "nul.py").write_bytes(b"x = '\0'\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "text.txt").write_text(HEADER)
    assert main([str(GOOD[0]), str(tmp_path / "text.txt")]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([str(BAD[0]), str(GOOD[0])]) == 1
    for name in ("broken.py", "nul.py", "latin.py", "absent.py"):
        assert main([str(tmp_path / name), str(BAD[0])]) == 2
        out, err = capsys.readouterr()
        assert name in err
        assert "NKI" in out
    assert main([str(tmp_path)]) == 2
    assert ".hidden" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    capsys.readouterr()
    assert main(["--explain"]) == 0
    out = capsys.readouterr().out
    assert all(rule.code in out and rule.construct in out and rule.cure in out for rule in RULES.values())
