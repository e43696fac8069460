"""python experiments/mutation/run.py PACKAGE ... [--sample N] [--seed S] [-j N]

Change one operator, constant or statement of the source at a time and see whether the tests of that package notice.
Mutants are drawn at random from all there are; a mutant that has a result in results/PACKAGE.json is not run again, and
its result is dropped when its file changed. Survivors are printed last, each with its line before and after.

A mutant counts as killed when a test fails, or when the tests take five times as long as without it, and five minutes.
Survivors that change nothing observable are listed, with the reason, in equivalent.json.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = {
    "rows": (["eaglelab/data/rows.py"], ["tests/data/test_rows.py"]),
    "objectives": (["eaglelab/objectives/*.py"], ["tests/objectives", "tests/variants/test_eagle3.py"]),
    "rollout": (
        ["eaglelab/drafters/[!r_]*.py", "eaglelab/variants/view.py", "eaglelab/variants/hass.py"],
        ["tests/drafters", "tests/variants"],
    ),
    "decoding": (
        ["eaglelab/decoding/*.py", "eaglelab/decoding/policies/*.py", "eaglelab/drafters/runtime.py"],
        ["tests/decoding"],
    ),
}
"""Sources and the tests that answer for them."""
PRELOADED = ["torch", "lightning", "transformers", "datasets", "hypothesis", "pytest"]


# ---- mutants of a source -----------------------------------------------------------------------------------------

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmax": "argmin", "tril": "triu", "triu": "tril"}


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What can be observed: no annotations, docstrings, decorators, texts, or imports for type checkers."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "msg"):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for child in value if isinstance(value, list) else [value]:
            skipped = ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom
            text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not isinstance(child, skipped) and not text:
                yield child


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in _children(node):
        yield from _walk(child)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every replacement of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        other = copy.deepcopy(node)
        other.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
        yield other
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        other = copy.deepcopy(node)
        other.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        if not isinstance(node.operand, ast.Constant):  # -1 is mostly the last axis, and 1 the same one
            yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        other = copy.deepcopy(node)
        other.attr = NAMES[node.attr]
        yield other
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id], ast.Load())
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Expr | ast.AugAssign):
        yield ast.Pass()


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def mutants(source: str) -> list[str]:
    """Every mutated text of a module, comments left out."""
    tree = ast.parse(source)
    found = []
    for node in list(_walk(tree)):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            # the node of the copy that stands where this one stands
            twin = dict(zip(map(id, ast.walk(tree)), ast.walk(mutated), strict=True))[id(node)]
            found.append(ast.unparse(ast.fix_missing_locations(_Replace(twin, change).visit(mutated))))
    return found


def difference(source: str, mutated: str) -> str:
    plain = ast.unparse(ast.parse(source)).splitlines()
    lines = difflib.unified_diff(plain, mutated.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


# ---- running them ------------------------------------------------------------------------------------------------


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another text."""

    def __init__(self, path: str, text: str) -> None:
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.path, self.text = str(ROOT / path), text

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        exec(compile(self.text, self.path, "exec"), module.__dict__)


def _work(path: str, text: str, tests: list[str]) -> None:
    import pytest

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    if text:
        sys.meta_path.insert(0, _Loader(path, text))
    sys.exit(int(pytest.main(["-x", "-p", "no:cacheprovider", *_slowest_last(tests)])))


def _slowest_last(tests: list[str]) -> list[str]:
    """The test files of folders; those that wait for a compiler come after all others."""
    files = [str(f) for test in tests for f in (sorted(Path(test).glob("test_*.py")) or [test])]
    return sorted(files, key=lambda file: "compile" in file)


def outcome(path: str, text: str, tests: list[str], limit: float = 300) -> str:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_work, args=(path, text, tests))
    process.start()
    process.join(limit if text else None)
    if process.is_alive():
        process.kill()
        process.join()
        return "killed (time)"
    return "survived" if process.exitcode == 0 else "killed"


def measure(package: str, sample: int, seed: int, parallel: int, again: bool) -> None:
    patterns, tests = PACKAGES[package]
    sources = {str(f.relative_to(ROOT)): f.read_text() for pattern in patterns for f in sorted(ROOT.glob(pattern))}
    every = [(path, text) for path, source in sources.items() for text in mutants(source)]
    drawn = random.Random(seed).sample(every, min(sample, len(every)))
    file = HERE / "results" / f"{package}.json"
    kept = json.loads(file.read_text())["mutants"] if file.exists() else []
    if again:
        kept = [one for one in kept if one["outcome"] != "survived"]
    known = {(one["file"], one["digest"]) for one in kept}
    present = {(path, _digest(text)) for path, text in every}
    kept = [one for one in kept if (one["file"], one["digest"]) in present]
    waiting = [(path, text) for path, text in drawn if (path, _digest(text)) not in known]
    began = time.monotonic()
    if waiting and outcome("", "", tests) != "survived":
        sys.exit(f"{package}: the tests fail without a mutant")
    limit = max(300, 5 * (time.monotonic() - began))
    with ThreadPoolExecutor(parallel) as pool:
        running = {pool.submit(outcome, path, text, tests, limit): (path, text) for path, text in waiting}
        for number, future in enumerate(as_completed(running), 1):
            path, text = running[future]
            change = difference(sources[path], text)
            kept.append({"file": path, "digest": _digest(text), "outcome": future.result(), "change": change})
            print(f"{package} {number}/{len(waiting)} {future.result()}", flush=True)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps({"of": len(every), "tests": tests, "mutants": kept}, indent=1) + "\n")
    show(package, kept, len(every))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def show(package: str, results: list[dict[str, str]], of: int) -> None:
    file = HERE / "equivalent.json"
    same = json.loads(file.read_text()) if file.exists() else {}
    alive = [one for one in results if one["outcome"] == "survived"]
    equivalent = [one for one in alive if one["change"] in same]
    for one in alive:
        if one not in equivalent:
            print(f"\n{one['file']}\n{one['change']}")
    tried = len(results) - len(equivalent)
    killed = len(results) - len(alive)
    print(
        f"\n{package}: {killed} of {tried} killed ({killed / max(tried, 1):.0%}), {len(equivalent)} equivalent, of {of}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", choices=PACKAGES, metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--sample", type=int, default=60, help="mutants to draw (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", type=int, default=1, help="at a time (1)")
    parser.add_argument("--again", action="store_true", help="run the survivors again, after a change of the tests")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for package in asked.packages:
        measure(package, asked.sample, asked.seed, asked.j, asked.again)


if __name__ == "__main__":
    main()
