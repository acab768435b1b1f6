"""A checkout's Python files, parsed; and digests of syntax trees that comments, formatting and docstrings do not change."""

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SCOPES = (*DEFINITIONS, ast.Lambda)
_NOT_TOLD = {"ctx", "kind", "type_comment", "lineno", "col_offset", "end_lineno", "end_col_offset"}


class NotFound(LookupError):
    """Something is not in the checkout, or is there more than once. One line, without a full stop."""


class Source:
    """The modules of one checkout. A name is `package.module:Class.method`.

    Args:
        root: of the checkout.
        instead: files that are read from here, by path in the checkout; the unpatched text of patched ones.
    """

    def __init__(self, root: Path, instead: Mapping[str, bytes] | None = None):
        self.root, self._instead = root, dict(instead or {})

    def read(self, path: str) -> bytes:
        """A file's text. Raises NotFound."""
        if path in self._instead:
            return self._instead[path]
        try:
            return (self.root / path).read_bytes()
        except OSError:
            raise NotFound(f"there is no {path}") from None

    def module(self, dotted: str) -> ast.Module:
        """Raises NotFound if there is no such file, or Python cannot parse it."""
        path = dotted.replace(".", "/")
        path += ".py" if (self.root / f"{path}.py").is_file() else "/__init__.py"
        return parse(self.read(path), path)

    def find(self, name: str) -> ast.stmt:
        """The definition of a function or class; a method may come from a base class within the checkout.

        Raises NotFound, also for a name that is bound more than once.
        """
        dotted, _, path = name.partition(":")
        scope: ast.Module | ast.stmt = self.module(dotted)
        for part in path.split("."):
            found = None
            if isinstance(scope, ast.ClassDef):
                dotted, found = self._method(dotted, scope, part, frozenset())
            else:
                found = definition(scope, part)
            if found is None:
                raise NotFound(f"{dotted} has no {path}")
            scope = found
        return scope

    def _method(self, dotted: str, cls: ast.ClassDef, name: str, seen: frozenset) -> tuple[str, ast.stmt | None]:
        """A method and the module where it is defined, in Python's order for classes without diamonds."""
        found = definition(cls, name)
        if found is not None:
            return dotted, found
        for base in cls.bases:
            at = self._class(dotted, base)
            if at is not None and at[1].name not in seen:
                where, found = self._method(*at, name, seen | {cls.name})
                if found is not None:
                    return where, found
        return dotted, None

    def _class(self, dotted: str, base: ast.expr) -> tuple[str, ast.ClassDef] | None:
        """The class that an expression in a class's bases names, if it is one of the checkout's."""
        base = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(base, ast.Name):
            return None
        module = self.module(dotted)
        found = definition(module, base.id)
        if isinstance(found, ast.ClassDef):
            return dotted, found
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == base.id:
                        try:
                            return node.module, self.find(f"{node.module}:{alias.name}")
                        except NotFound:
                            return None
        return None


@lru_cache(maxsize=256)
def parse(text: bytes, where: str) -> ast.Module:
    """Raises NotFound for text that is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise NotFound(f"{where} cannot be parsed ({error})") from None


def definition(scope: ast.Module | ast.stmt, name: str) -> ast.stmt | None:
    """What defines a name in a module's or class's own scope. Raises NotFound if it is bound more than once there."""
    bound = list(bindings(scope.body, name))
    if len(bound) > 1:
        raise NotFound(f"{name} is bound {len(bound)} times, in lines {', '.join(str(one.lineno) for one in bound)}")
    return bound[0] if bound and isinstance(bound[0], DEFINITIONS) else None


def bindings(body: Sequence[ast.stmt], name: str) -> Iterator[ast.AST]:
    """Every node that binds, declares or deletes a name in the scope of these statements."""
    for node in in_scope(body):
        if isinstance(node, DEFINITIONS) and node.name == name:
            yield node
        elif isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            yield node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((alias.asname or alias.name.partition(".")[0]) == name for alias in node.names):
                yield node
        elif isinstance(node, ast.ExceptHandler) and node.name == name:
            yield node
        elif isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            yield node
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name == name:
            yield node
        elif isinstance(node, ast.MatchMapping) and node.rest == name:
            yield node


def in_scope(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes below statements, without the inside of functions, classes and lambdas."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop(0)
        yield node
        if not isinstance(node, SCOPES):
            todo[:0] = ast.iter_child_nodes(node)


def mentions(node: ast.AST, name: str) -> bool:
    """Whether a name stands anywhere below, nested functions included."""
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def without_docstring(node: ast.Module | ast.stmt) -> list[ast.stmt]:
    """The statements of a function's, class's or module's body after its docstring."""
    return node.body[1:] if docstring(node) is not None else node.body


def docstring(node: ast.Module | ast.stmt) -> ast.stmt | None:
    """The statement that is the docstring."""
    first = node.body[0] if node.body else None
    said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return first if said else None


def parameters(function: Function) -> list[ast.arg]:
    """All of a function's parameters, in order."""
    told = function.args
    starred = [one for one in (told.vararg, told.kwarg) if one is not None]
    return [*told.posonlyargs, *told.args, *told.kwonlyargs, *starred]


def dotted_name(node: ast.AST) -> str | None:
    """`a.b.c` of an expression that is nothing else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted_name(node.value)
        return before and f"{before}.{node.attr}"
    return None


def tree_digest(*nodes: ast.AST) -> str:
    """The same for the same code in every version of Python: 16 digits of a SHA-256."""
    return hashlib.sha256("\n".join(map(_told, nodes)).encode()).hexdigest()[:16]


def _told(node) -> str:
    """The tree as text. `ast.dump` would do, but what it writes depends on the version of Python."""
    if isinstance(node, list):
        return "[" + ",".join(map(_told, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _NOT_TOLD}
    if isinstance(node, (*DEFINITIONS, ast.Module)):
        fields["body"] = without_docstring(node)
    told = ",".join(f"{name}={_told(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({told})"
