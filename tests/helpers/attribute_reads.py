"""Find which attributes of which class the code reads, by the types that mypy infers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from mypy.build import BuildSource, build
from mypy.nodes import TypeInfo
from mypy.options import Options
from mypy.traverser import NameAndMemberCollector
from mypy.types import Instance, Type, UnionType, get_proper_type

Read = tuple[str, str]  # full name of the class, attribute


def attribute_reads(texts: Mapping[str, str], checks: frozenset[str]) -> set[Read]:
    """Return all (class, attribute) read by modules (text by name) outside `checks`."""
    options = Options()
    options.incremental = False
    options.export_types = True
    options.preserve_asts = True
    options.follow_imports = "skip"  # foreign code does not use our classes
    options.ignore_missing_imports = True
    options.ignore_errors = True  # CI runs mypy itself
    options.explicit_package_bases = True
    packages = {name.rpartition(".")[0] for name in texts} - {"", *texts}
    sources = [BuildSource(None, name, text) for name, text in texts.items()]
    sources += [BuildSource(None, name, "") for name in packages]
    result = build(sources, options)
    found: set[Read] = set()
    for name, text in texts.items():
        checking = _lines_of(checks, text)
        members = NameAndMemberCollector()
        result.files[name].accept(members)
        for expr in members.member_exprs:
            if expr.line not in checking:
                owners = _classes(result.types.get(expr.expr))
                found |= {(owner.fullname, expr.name) for owner in owners}
    return found


def _classes(kind: Type | None) -> Iterator[TypeInfo]:
    proper = get_proper_type(kind)
    if isinstance(proper, UnionType):
        for item in proper.items:
            yield from _classes(item)
    elif isinstance(proper, Instance):
        yield proper.type


def _lines_of(functions: frozenset[str], text: str) -> set[int]:
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name in functions
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
