# SPDX-License-Identifier: MIT
"""Stand-ins for packages that an engine's modules import on the way to what a test needs of them.

    stand_ins.install({"zmq", "fastapi"})       # before the engine's modules are imported
"""
import importlib.abc
import importlib.machinery
import sys
import types


class _AnyOf(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class StandIn(metaclass=_AnyOf):
    """Whatever an import wanted: a class, a function, a decorator."""

    def __init__(self, *_, **__):
        pass

    def __init_subclass__(cls, **_):
        pass

    def __class_getitem__(cls, _):
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, *_):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *args, **words):
        return args[0] if len(args) == 1 and callable(args[0]) and not words else StandIn()


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = frozenset(names)

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def install(names) -> None:
    """From now on these packages, and whatever is in them, are stand-ins."""
    sys.meta_path.insert(0, _Finder(names))
