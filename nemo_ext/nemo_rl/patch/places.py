"""Where an insertion goes in a file that is not the pinned one: described by facts, without a line of upstream's.

A place is in a function, at the top level of its body, or in a dict at the top level of a module:

    at = "start"                 before the first statement after the docstring
    at = "after assignment"      after the assignment to `name`
    at = "before call"           before the statement that calls `name`, like self.start
    at = "after key"             in a dict: after the entry whose key is the string `name`

It is taken only where it is the one such place, and where what the inserted lines read and write means what it meant in
the pinned file: digests tell that the statements above that mention these names are the same, and every name is bound
once, before, and used afterwards.
"""

import ast
import builtins
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_ext.nemo_rl.patch import source
from nemo_ext.nemo_rl.patch.source import Function, NotFound
from nemo_ext.nemo_rl.patch_set import Insertion, inserted

STARTS, AFTER_ASSIGNMENT, BEFORE_CALL, AFTER_KEY = "start", "after assignment", "before call", "after key"


@dataclass(frozen=True)
class Place:
    """One insertion's place, as a manifest has it.

    Attributes:
        inside: qualified name of the function, or name of the dict.
        at, name: as the module's text says.
        anchor: digest of the statement, or of the dict's entry, that `at` and `name` are about.
        above: digest of the statements above that mention a name of the inserted lines; None where `made` is told.
        scope: digest of the whole function or dict; at the start of a function nothing else will do.
        made: name -> keywords with which the name's value must be made, by `dict(...)`; for a value whose other
            keywords change from version to version. It must not be handed on before the place.
    """

    inside: str
    at: str
    name: str = ""
    anchor: str = ""
    above: str | None = None
    scope: str = ""
    made: Mapping[str, Sequence[str]] | None = None

    @property
    def where(self) -> str:
        """For messages."""
        told = {
            STARTS: "at its start",
            AFTER_ASSIGNMENT: f"after the assignment to {self.name}",
            BEFORE_CALL: f"before the call of {self.name}",
            AFTER_KEY: f"after the key {self.name.rpartition('.')[2]}",
        }
        return f"{self.inside}, {told.get(self.at, self.at)}"


@dataclass(frozen=True)
class Found:
    """An insertion for the file at hand, how its place was found, and the place with this file's digests."""

    insertion: Insertion
    same_scope: bool
    place: Place

    @property
    def how(self) -> str:
        """For messages."""
        if self.same_scope:
            return "the same code as in the pinned version"
        return "its surroundings changed; the anchor, and what the inserted lines read and write, did not"


def locate(text: bytes, path: str, place: Place, lines: Sequence[str], *, relock: bool = False) -> Found:
    """Finds an insertion's place and indents its lines for it.

    Args:
        text: the file.
        path: its path, for messages.
        lines: as a pinned version inserts them.
        relock: take the digests from the file instead of holding it against them; for a new pinned version.

    Raises:
        NotFound: there is no such place, more than one, or one where the lines would mean something else.
    """
    if b"\r" in text:
        raise NotFound(f"{path} has line ends with carriage returns")
    module = source.parse(text, path)
    finder = _in_dict if place.at == AFTER_KEY else _in_function
    after, column, new = finder(module, place, _code(lines))
    if not relock:
        _require(place.anchor == new.anchor, f"{place.where}: the anchor is not the pinned version's")
        _require(place.above == new.above, f"{place.where}: what stands above uses the same names in another way")
        _require(place.at != STARTS or place.scope == new.scope, f"{place.inside} is not the pinned version's")
    rows = text.decode().split("\n")
    indent = rows[column[0] - 1][: column[1]]
    _require(not indent.strip(), f"{place.where}: more than one statement stands in line {column[0]}")
    insertion = Insertion(after, tuple(textwrap.indent(textwrap.dedent("\n".join(lines)), indent).split("\n")))
    _verify(module, text, path, insertion, place)
    return Found(insertion, place.scope == new.scope, new)


def _require(good: bool, otherwise: str) -> None:
    if not good:
        raise NotFound(otherwise)


def _count(found: Sequence, noun: str) -> str:
    return f"{len(found) or 'no'} {noun}{'s' * (len(found) > 1)}"


def _code(lines: Sequence[str]) -> list[ast.stmt]:
    """The inserted statements; an entry of a dict becomes a dict's display."""
    text = textwrap.dedent("\n".join(lines))
    return ast.parse("{" + text + "}" if text.startswith(('"', "'")) else text).body


# In a function


def _in_function(module: ast.Module, place: Place, code: list[ast.stmt]) -> tuple[int, tuple[int, int], Place]:
    function = _function(module, place.inside)
    body = function.body
    _require(
        not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in source.in_scope(body)),
        f"{place.inside} is a generator",
    )
    index, anchor = _anchor(function, place)
    above = source.without_docstring(function)[: index - (source.docstring(function) is not None)]
    leaves = [node for node in source.in_scope(above) if isinstance(node, ast.Return)]
    leaves += [statement for statement in above if isinstance(statement, ast.Raise)]
    _require(not leaves, f"{place.inside} may end in line {leaves[0].lineno if leaves else 0}, before the place")
    _check_names(function, index, place, code)
    made = place.made or {}
    names = sorted(_names(code) - {"self"})
    slices = [statement for statement in above if any(source.mentions(statement, name) for name in names)]
    for name, keywords in made.items():
        _check_made(above, name, keywords, place)
    new = replace(
        place,
        anchor="" if anchor is None else source.tree_digest(anchor),
        above=None if made else source.tree_digest(*slices),
        scope=source.tree_digest(function),
    )
    if index == len(body):
        raise NotFound(f"{place.where}: nothing follows")
    if place.at == AFTER_ASSIGNMENT:
        _require(body[index].lineno > anchor.end_lineno, f"{place.where}: the next statement is in the same line")
        return anchor.end_lineno, (anchor.lineno, anchor.col_offset), new
    following = body[index]
    if place.at == STARTS and index:
        _require(following.lineno > body[0].end_lineno, f"{place.where}: the docstring's line has more")
        return body[0].end_lineno, (following.lineno, following.col_offset), new
    return following.lineno - 1, (following.lineno, following.col_offset), new


def _function(module: ast.Module, inside: str) -> Function:
    scope: ast.Module | ast.stmt = module
    for part in inside.split("."):
        found = source.definition(scope, part)
        _require(found is not None, f"there is no {inside}")
        scope = found
    _require(isinstance(scope, ast.FunctionDef), f"{inside} is no plain function")
    return scope


def _anchor(function: Function, place: Place) -> tuple[int, ast.stmt | None]:
    """Index in the body of the statement before which the lines go, and the anchor."""
    body = function.body
    if place.at == STARTS:
        return int(source.docstring(function) is not None), None
    if place.at == AFTER_ASSIGNMENT:
        found = [index for index, statement in enumerate(body) if place.name in _assigned(statement)]
        same = [index for index in found if source.tree_digest(body[index]) == place.anchor]
        found = same or found[:1]  # a later assignment of another value is upstream's business
        earlier = [node for node in source.bindings(body[: found[0]], place.name)] if found else []
        _require(len(found) == 1, f"{place.inside} has {_count(found, 'assignment')} to {place.name} at its top level")
        _require(not earlier, f"{place.name} is bound before its assignment, in {place.inside}")
        return found[0] + 1, body[found[0]]
    if place.at == BEFORE_CALL:
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and source.dotted_name(n.func) == place.name]
        _require(len(calls) == 1, f"{place.inside} has {_count(calls, 'call')} of {place.name}")
        uses = [n for n in ast.walk(function) if source.dotted_name(n) == place.name]
        _require(len(uses) == 1, f"{place.inside} uses {place.name} {len(uses)} times")
        found = [i for i, one in enumerate(body) if isinstance(one, ast.Expr) and one.value is calls[0]]
        _require(bool(found), f"{place.name} is not called in a top-level statement of its own in {place.inside}")
        return found[0], body[found[0]]
    raise NotFound(f"{place.at} is no place that this version knows")


def _assigned(statement: ast.stmt) -> list[str]:
    """The one name that a plain assignment binds."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target = statement.target
    else:
        return []
    return [target.id] if isinstance(target, ast.Name) else []


def _names(code: Sequence[ast.stmt]) -> set[str]:
    """Names that the inserted lines take from around them, or give back."""
    nodes = [node for statement in code for node in ast.walk(statement)]
    own = {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - own - set(dir(builtins))


def _written(code: Sequence[ast.stmt]) -> set[str]:
    return {n.id for one in code for n in ast.walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _check_names(function: Function, index: int, place: Place, code: list[ast.stmt]) -> None:
    """Each name is a parameter, or bound once, above and in any case; it keeps its value, and is used below."""
    body, given = function.body, {one.arg for one in source.parameters(function)}
    declared = [n for n in ast.walk(function) if isinstance(n, (ast.Global, ast.Nonlocal))]
    for name in sorted(_names(code)):
        bound = list(source.bindings(body, name))
        _require(not any(name in node.names for node in declared), f"{name} is not {place.inside}'s own")
        if name in given:
            _require(not bound, f"{place.inside} binds its parameter {name} anew")
        else:
            once = [i for i, statement in enumerate(body[:index]) if name in _assigned(statement)]
            _require(bool(once), f"{place.where}: {name} is not bound there")
            _require(len(bound) == 1, f"{place.inside} binds {name} {len(bound)} times")
        if name == "self":
            first = source.parameters(function)[0].arg if given else ""
            _require(first == "self" and not function.decorator_list, f"{place.inside} is no plain method")
            continue
        below = any(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for statement in body[index:]
            for node in ast.walk(statement)
        )
        _require(below, f"{place.inside} does not use {name} after the place")


def _check_made(above: Sequence[ast.stmt], name: str, keywords: Sequence[str], place: Place) -> None:
    """`name = dict(keyword=..., ...)`, and from there to the place only its items are read and written."""
    for statement in above:
        if name in _assigned(statement):
            call = statement.value
            plain = isinstance(call, ast.Call) and source.dotted_name(call.func) == "dict" and not call.args
            _require(plain, f"{place.inside} does not make {name} by dict(...)")
            lacking = set(keywords) - {keyword.arg for keyword in call.keywords}
            _require(not lacking, f"{place.inside} makes {name} without {', '.join(sorted(lacking))}")
            continue
        items = {id(n.value) for n in ast.walk(statement) if isinstance(n, (ast.Subscript, ast.Attribute))}
        whole = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name and id(n) not in items]
        _require(not whole, f"{place.inside} hands {name} on in line {statement.lineno}, before the place")


# In a dict


def _in_dict(module: ast.Module, place: Place, code: list[ast.stmt]) -> tuple[int, tuple[int, int], Place]:
    bound = list(source.bindings(module.body, place.inside))
    _require(len(bound) == 1, f"{place.inside} is bound {len(bound)} times")
    statements = [one for one in module.body if place.inside in _assigned(one)]
    _require(bool(statements) and isinstance(statements[0].value, ast.Dict), f"{place.inside} is no dict's display")
    display = statements[0].value
    keys = [key.value if isinstance(key, ast.Constant) else None for key in display.keys]
    same = [index for index, key in enumerate(keys) if key == place.name]
    _require(len(same) == 1, f"{place.inside} has {_count(same, 'key')} {place.name}")
    index = same[0]
    added = code[0].value
    again = {key.value for key in added.keys} & set(keys)
    _require(not again, f"{place.inside} has {', '.join(sorted(again))} already")
    above = module.body[: module.body.index(statements[0])]
    for name in sorted(_names(code)):
        _require(any(name in _assigned(one) for one in above), f"{place.inside}: {name} is not bound above it")
        _require(len(list(source.bindings(module.body, name))) == 1, f"{name} is bound more than once")
    key, value = display.keys[index], display.values[index]
    following = display.keys[index + 1].lineno if index + 1 < len(keys) and display.keys[index + 1] else None
    _require(following is not None and following > value.end_lineno, f"{place.inside}: no entry in the next line")
    new = replace(
        place,
        anchor=source.tree_digest(key, value),
        above=source.tree_digest(*(one for one in above if set(_assigned(one)) & _names(code))),
        scope=source.tree_digest(display),
    )
    return value.end_lineno, (key.lineno, key.col_offset), new


# Afterwards


def _verify(module: ast.Module, text: bytes, path: str, insertion: Insertion, place: Place) -> None:
    """The patched file parses, and without the inserted nodes it is the file from before."""
    first, last = insertion.after + 1, insertion.after + len(insertion.lines)
    patched = source.parse.__wrapped__(
        inserted(text, [insertion]), f"{path}, patched,"
    )  # not from the cache: it is changed here
    added = list(_taken_out(patched, first, last))
    _require(
        len(added) == 1 and source.tree_digest(patched) == source.tree_digest(module),
        f"{place.where}: the lines would not stand by themselves there",
    )


def _taken_out(tree: ast.AST, first: int, last: int) -> Iterator[ast.AST]:
    """Removes the statements and dict entries that lie in these lines, and yields them."""
    for _, value in list(ast.iter_fields(tree)):
        for index in reversed(range(len(value) if isinstance(value, list) else 0)):
            node = value[index]
            if isinstance(node, (ast.stmt, ast.expr)) and node.lineno >= first and node.end_lineno <= last:
                yield value.pop(index)
                if isinstance(tree, ast.Dict):
                    tree.values.pop(index)
    for child in ast.iter_child_nodes(tree):
        yield from _taken_out(child, first, last)
