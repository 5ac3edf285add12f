"""Pickles read without running anything from them: a short list of names, each standing for an inert stub.

Checkpoints of torch are pickles, and a pickle is a program. Here a name in it never reaches the module that it names:
it is looked up in a table of our own, and a name that is not in the table ends the reading. No torch is needed, and a
file written by any torch version is read by any other.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from mismatch_probe.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 30
"""Longest pickle that is read: 1 GiB is far above the metadata of the largest sharded models."""


class Stub:
    """Stands for an object of a class that is known and needs none of its code: the state is kept, nothing runs."""

    name = "object"

    def __new__(cls, *args: Any) -> Stub:
        """Keep the arguments; the state comes later, if at all."""
        made = super().__new__(cls)
        made.__dict__.update(args=args, state={})
        return made

    def __init__(self, *args: Any) -> None:
        """Arguments are kept by ``__new__``."""

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the pickled state."""
        state = self.__dict__["state"]
        return state.get(key, default) if isinstance(state, dict) else default

    @property
    def args(self) -> tuple[Any, ...]:
        """Arguments of the constructor."""
        found: tuple[Any, ...] = self.__dict__["args"]
        return found

    @property
    def state(self) -> Any:
        """What the pickle set as the state: a dict for most classes, a tuple where the class defines its own."""
        return self.__dict__["state"]


def stub(name: str) -> type[Stub]:
    """A class of inert objects that carry ``name``."""
    return type(name, (Stub,), {"name": name})


class InertNames(dict[str, Any]):
    """Allowed names, and for every other name an inert stub: for files that hold more than is needed of them."""

    def get(self, key: str, default: Any = None) -> Any:
        """What stands for a name."""
        return super().get(key, default) or stub(key)


def _identity(*args: Any) -> Any:
    return args[0] if args else None


def _text_bytes(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _size(*sizes: Any) -> tuple[Any, ...]:
    return tuple(sizes[0]) if sizes else ()


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


_CONTAINERS: dict[str, Any] = {
    "collections OrderedDict": OrderedDict,
    "_codecs encode": _text_bytes,
    "builtins set": set,
    "__builtin__ set": set,
    "torch Size": _size,
    "torch device": _identity,
    "torch.serialization _get_layout": _identity,
    "pathlib PosixPath": _path,
    "pathlib._local PosixPath": _path,
}
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bool": "BOOL",
    "uint8": "U8",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "complex64": "C64",
}
TORCH_NAMES: dict[str, Any] = {**_CONTAINERS, **{f"torch {name}": code for name, code in _DTYPES.items()}}
"""What a pickle of torch may name beside tensors; dtypes come out as the codes that safetensors uses."""


class _Reader(pickle._Unpickler):
    """The unpickler in Python: the one in C grows its memo to whatever index a pickle declares."""

    def __init__(self, data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._persistent = names, persistent

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get(f"{module} {name}")
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to data outside itself")
        return self._persistent(pid)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("it uses the registry of extensions")

    def load_build(self) -> None:
        """Set a state: on stubs only, so that no pickle alters a class or a function of the program."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state = stack.pop()
        target = stack[-1]
        if isinstance(target, Stub):
            target.__dict__["state"] = state
        elif not isinstance(target, OrderedDict):  # an OrderedDict's attributes (torch's _metadata) are not needed
            raise pickle.UnpicklingError(f"it sets a state on {type(target).__name__}")

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def read_pickle(
    data: bytes, file: Path | str, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Read a pickle whose every name is in ``names`` ("module name" -> what stands for it).

    Args:
        data: the pickle.
        file: named in errors.
        names: allowed names.
        persistent: called with each persistent id.

    Raises:
        CheckpointError: another name occurs, or the pickle is torn.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{file}: a pickle of {len(data)} bytes is not read. Copy the checkpoint anew")
    try:
        return _Reader(data, names, persistent).load()
    # A torn or forged pickle fails in as many ways as there are opcodes.
    except (Exception, RecursionError) as error:
        text = str(error) or type(error).__name__
        raise CheckpointError(
            f"{file}: not read: {text}. Nothing in it was run. Copy the checkpoint anew, or export it as safetensors"
        ) from None
