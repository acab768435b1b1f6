"""The kinds of facts that `facts.py` has a table of: what can be said of a definition, by its syntax tree."""

import ast
from collections.abc import Callable, Iterator

from nemo_ext.nemo_rl.patch import source
from nemo_ext.nemo_rl.patch.source import Source


def _node(checkout: Source, name: str) -> ast.AST:
    return checkout.find(name) if ":" in name else checkout.module(name)


def _nodes(checkout: Source, name: str) -> Iterator[ast.AST]:
    yield from ast.walk(_node(checkout, name))


def _fields(checkout: Source, name: str) -> dict[str, str]:
    return {
        statement.target.id: source.dotted_name(statement.annotation) or ""
        for statement in checkout.find(name).body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _has_field(checkout: Source, name: str, told: str) -> bool:
    field, _, annotation = told.partition(": ")
    found = _fields(checkout, name)
    return field in found and annotation in ("", found[field])


def _sets(checkout: Source, name: str, attribute: str) -> bool:
    """The function assigns `self.attribute`."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and source.dotted_name(node) == f"self.{attribute}"
        for node in _nodes(checkout, name)
    )


def _calls(checkout: Source, name: str, called: str) -> bool:
    return any(isinstance(n, ast.Call) and source.dotted_name(n.func) == called for n in _nodes(checkout, name))


def _passed(checkout: Source, name: str, called: str) -> list[set[str]]:
    """Of each call: the names and strings among its arguments."""
    calls = [n for n in _nodes(checkout, name) if isinstance(n, ast.Call) and source.dotted_name(n.func) == called]
    given = [[*call.args, *(keyword.value for keyword in call.keywords)] for call in calls]
    return [
        {one.value if isinstance(one, ast.Constant) else source.dotted_name(one) for one in arguments}
        for arguments in given
    ]


def _passes_to(checkout: Source, name: str, told: tuple[str, str]) -> bool:
    """Some call of the first has the second among its arguments."""
    return any(told[1] in arguments for arguments in _passed(checkout, name, told[0]))


def _always_passes_to(checkout: Source, name: str, told: tuple[str, str]) -> bool:
    """So has every call, and there is one."""
    found = _passed(checkout, name, told[0])
    return bool(found) and all(told[1] in arguments for arguments in found)


def _mentions(checkout: Source, name: str, dotted: str) -> bool:
    return any(source.dotted_name(node) == dotted for node in _nodes(checkout, name))


def _has_string(checkout: Source, name: str, text: str) -> bool:
    node = _node(checkout, name)
    said = {id(source.docstring(n).value) for n in ast.walk(node) if hasattr(n, "body") and _docstring(n)}
    return any(isinstance(n, ast.Constant) and n.value == text and id(n) not in said for n in ast.walk(node))


def _docstring(node: ast.AST) -> bool:
    return isinstance(node, (*source.DEFINITIONS, ast.Module)) and source.docstring(node) is not None


def _passes_keyword(checkout: Source, name: str, keyword: str) -> bool:
    return any(isinstance(n, ast.keyword) and n.arg == keyword for n in _nodes(checkout, name))


def _makes_pair(checkout: Source, name: str, attributes: tuple[str, str]) -> bool:
    """Some tuple is `(x.first, x.second)`."""
    return any(
        isinstance(node, ast.Tuple) and tuple(getattr(one, "attr", None) for one in node.elts) == attributes
        for node in _nodes(checkout, name)
    )


def _returns(checkout: Source, name: str, values: tuple) -> bool:
    """Every `return` is one of these constants, and each of them is returned somewhere."""
    returns = [n.value for n in source.in_scope(checkout.find(name).body) if isinstance(n, ast.Return)]
    told = [one.value if isinstance(one, ast.Constant) else ... for one in returns]
    return set(told) == set(values)


def _has_base(checkout: Source, name: str, base: str) -> bool:
    return any(source.dotted_name(one) == base for one in checkout.find(name).bases)


def _has_a_field_of(checkout: Source, name: str, told: tuple[str, ...]) -> bool:
    return bool(set(told) & set(_fields(checkout, name)))


KINDS: dict[str, Callable[[Source, str, object], bool]] = {
    "always passes to": _always_passes_to,
    "calls": _calls,
    "has a field of": _has_a_field_of,
    "derives from": _has_base,
    "has the field": _has_field,
    "has the string": _has_string,
    "makes pairs of": _makes_pair,
    "mentions": _mentions,
    "passes the keyword": _passes_keyword,
    "passes to": _passes_to,
    "returns nothing but": _returns,
    "sets self.": _sets,
}
# These take all that a fact names at once; the others hold for each thing by itself.
WHOLE = {"always passes to", "has a field of", "makes pairs of", "passes to", "returns nothing but"}
