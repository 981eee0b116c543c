"""All that can be reached from an object, leaf by leaf: wherever a loop could remember a thing.

Attributes, slots, items, closures, defaults, bound methods, tensors with their gradients, random
generators. What cannot be looked into is listed apart, so that nothing hides there.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import hashlib
import io
import itertools
import json
import logging
import operator
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
    *(enum.Enum, PurePath, re.Pattern, torch.dtype, torch.device, torch.layout, torch.Size),
    *(np.generic, np.dtype, types.ModuleType, AddedToken, types.GenericAlias, logging.Logger),
    *(operator.itemgetter, operator.attrgetter, types.UnionType),
)
"""What its repr shows in full."""
HANDLES = (
    *(threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Event),
    *(io.IOBase, asyncio.AbstractEventLoop, threading.local, type(json.JSONDecoder().scan_once)),
    type(torch.ops.aten.add),
)
"""What belongs to the process and cannot be kept."""
DECLARATIONS = (
    *("typing", "pydantic", "pydantic_core", "annotated_types", "jaxtyping", "string"),
    *("_struct", "_ctypes", "ctypes"),
)
"""Libraries whose objects declare types and change nothing."""


@dataclass(frozen=True)
class Leaf:
    """What stands at a path; of a tensor also where its memory begins."""

    value: str
    pointer: int | None = field(default=None, compare=False)


class Walk:
    """Leaves by path, from named roots. `without` are types that are passed over."""

    def __init__(self, without: tuple[type, ...] = ()) -> None:
        self.without = without
        self.found: dict[str, Leaf] = {}
        self.opaque: dict[str, str] = {}
        """Objects that cannot be looked into, with their types."""
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []
        """Objects made on the way: their ids must not be given to others."""

    def walk(self, value: Any, path: str) -> None:
        """Add the leaves of a value."""
        todo = [(path, value)]
        while todo:
            where, one = todo.pop()
            todo += reversed(list(self._inside(one, where)))

    def _inside(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        """What a value is made of; a leaf, or what was met before, is put down here."""
        if isinstance(value, PLAIN):
            self.found[path] = Leaf(repr(value))
            return
        if isinstance(value, type):
            self.found[path] = Leaf(f"{value.__module__}.{value.__qualname__}")
            return
        if isinstance(value, (*HANDLES, *self.without)):
            return
        if type(value).__module__.split(".")[0] in DECLARATIONS:
            return
        if id(value) in self._seen:
            self.found[path] = Leaf(f"= {self._seen[id(value)]}")
            return
        self._seen[id(value)] = path
        self._alive.append(value)
        yield from self._parts(value, path)

    def _parts(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            self.found[path] = Leaf(_digest(value), value.data_ptr())
            yield f"{path}.grad", value.grad if value.is_leaf else None
            yield from self._attributes(value, path)
        elif isinstance(value, np.ndarray):
            yield path, value.tolist() if value.dtype == object else _hash(value.tobytes())
        elif isinstance(value, Mapping | types.MappingProxyType):
            yield from self._items(value, path)
            yield from self._attributes(value, path)
        elif isinstance(value, list | tuple) or type(value).__name__ == "deque":
            self.found[f"{path}#"] = Leaf(str(len(value)))
            for at, item in enumerate(value):
                yield f"{path}[{at}]", item
        elif isinstance(value, set | frozenset):
            self.found[path] = Leaf(repr(sorted(map(_name, value))))
        else:
            yield from self._object(value, path)

    def _items(self, value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
        names = [_name(key) if isinstance(key, PLAIN) else f"#{at}" for at, key in enumerate(value)]
        self.found[f"{path}#"] = Leaf(repr(names))
        for name, (key, item) in zip(names, list(value.items()), strict=True):
            if not isinstance(key, PLAIN):
                yield f"{path}.key{name}", key
            yield f"{path}[{name}]", item

    def _object(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        known = self._known(value)
        if known is not None:
            self.found[path] = Leaf(known)
        elif hasattr(value, "cache_info"):
            yield f"{path}.cache_info", repr(value.cache_info())
        elif isinstance(value, functools.partial):
            yield f"{path}.func", value.func
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif isinstance(value, types.MethodType):
            yield f"{path}.self", value.__self__
            yield f"{path}.func", value.__func__
        elif isinstance(value, types.FunctionType):
            yield from _of_function(value, path)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self.found[path] = Leaf(value.__qualname__)
            if not isinstance(value.__self__, types.ModuleType):
                yield f"{path}.self", value.__self__
        elif isinstance(value, types.GeneratorType):
            self.found[f"{path}.at"] = Leaf(str(value.gi_frame and value.gi_frame.f_lasti))
            yield f"{path}.locals", dict(value.gi_frame.f_locals) if value.gi_frame else {}
        elif isinstance(value, weakref.ref):
            yield f"{path}()", value()
        elif isinstance(value, property | classmethod | staticmethod):
            yield f"{path}.func", getattr(value, "fget", None) or getattr(value, "__func__", None)
        elif isinstance(value, contextvars.ContextVar):
            yield f"{path}.get()", value.get(None)
        elif isinstance(value, itertools.count | types.CellType):
            self.found[path] = Leaf(repr(value))
        else:
            inside = list(self._attributes(value, path))
            if not inside and type(value) is not object and not _is_bare(value):
                self.opaque[path] = f"{type(value).__module__}.{type(value).__qualname__}"
            yield from inside

    @staticmethod
    def _known(value: Any) -> str | None:
        """What an object written in another language says of itself."""
        if isinstance(value, Tokenizer):
            return _hash(value.to_str().encode())
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, random.Random):
            return _hash(repr(value.getstate()).encode())
        if isinstance(value, torch.Generator):
            return _digest(value.get_state())
        return None

    def _attributes(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
            yield f"{path}.{name}", item
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield f"{path}.{name}", getattr(value, name)


def of_process(prefix: str) -> Iterator[tuple[str, Any]]:
    """The globals of loaded modules, and of their classes, and what their functions carry."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name != prefix and not module_name.startswith(f"{prefix}."):
            continue
        for name, value in sorted(vars(module).items()):
            if name.startswith("__") or isinstance(value, types.ModuleType):
                continue
            if isinstance(value, type) and value.__module__ == module_name:
                yield from _of_class(value, f"{module_name}.{name}")
            elif not isinstance(value, type):
                yield f"{module_name}.{name}", value


def of_chance() -> Iterator[tuple[str, Any]]:
    """The random generators that everybody shares."""
    yield "chance.torch", torch.get_rng_state()
    yield "chance.numpy", np.random.get_state(legacy=False)
    yield "chance.random", repr(random.getstate())


_MEMBER = types.MemberDescriptorType | types.GetSetDescriptorType | type


def _of_class(kind: type, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(kind).items()):
        dunder = name.startswith("__") and not isinstance(value, types.FunctionType)
        if not dunder and name != "_abc_impl" and not isinstance(value, _MEMBER):
            yield f"{path}.{name}", value


def _of_function(value: types.FunctionType, path: str) -> Iterator[tuple[str, Any]]:
    yield f"{path}.name", f"{value.__module__}.{value.__qualname__}"
    yield f"{path}.defaults", value.__defaults__
    yield f"{path}.kwdefaults", value.__kwdefaults__
    yield f"{path}.dict", dict(vars(value))
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f"{path}({name})", cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _is_bare(value: Any) -> bool:
    """Whether an object has room for attributes and none in it."""
    return hasattr(value, "__dict__") or any(
        "__slots__" in vars(k) for k in type(value).__mro__[:-1]
    )


def _name(key: Any) -> str:
    return repr(key) if isinstance(key, PLAIN) else f"{type(key).__qualname__}"


def _digest(tensor: torch.Tensor) -> str:
    bare = tensor.detach().cpu().contiguous()
    content = bare.reshape(-1).view(torch.uint8).numpy().tobytes() if bare.numel() else b""
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {_hash(content)}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
