"""Stand-ins for packages that upstream imports at the top of its files and that nothing on a CPU calls.

Any attribute of a stand-in exists; classes can be subclassed, decorators give back what they decorate.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


class Anything:
    """Callable, subscriptable, usable as base class and decorator."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        decorated = len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type))
        return args[0] if decorated else Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, bases):
        return (object,)

    def __getitem__(self, key):
        return Anything()

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class StubModule(types.ModuleType):
    """A package in which every attribute is an `Anything`."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages or modules, and all below them."""

    def __init__(self, names):
        self.names = frozenset(names)

    def find_spec(self, fullname, path=None, target=None):
        parts = fullname.split(".")
        if self.names.isdisjoint(".".join(parts[: i + 1]) for i in range(len(parts))):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module):
        pass


class AliasFinder(importlib.abc.MetaPathFinder):
    """Gives a real module more names: `{module: {new name: existing name}}`."""

    def __init__(self, aliases):
        self.aliases = aliases

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.aliases:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def with_aliases(module):
            execute(module)
            for new, existing in self.aliases[fullname].items():
                setattr(module, new, getattr(module, existing))

        spec.loader.exec_module = with_aliases
        return spec


def install(missing, replaced, aliases):
    """Stands in for those of `missing` that are not installed, and for the modules `replaced` in any case."""
    sys.meta_path.append(StubFinder(name for name in missing if importlib.util.find_spec(name) is None))
    sys.meta_path.insert(0, StubFinder(replaced))
    sys.meta_path.insert(0, AliasFinder(aliases))
