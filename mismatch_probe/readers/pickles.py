"""Pickled dumps, read without running any of their code.

A pickle names classes and functions and has them called. Here every name is looked up in a short list of harmless
builders of our own; a framework's own classes become a ``Stub``, which keeps what it was given and does nothing.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError

_ROOM = 512 << 20
"""Bytes that reading a pickle may take beside a multiple of the file's size."""
_GROWTH = 40
"""Bytes of Python objects that one byte of a pickle can become (a float in a list: 9 bytes to 32, with slack)."""
REPAIR = "Restore the file from the run; a file from a stranger must not be trusted"

Names = Mapping[tuple[str, str], Callable[..., Any]]


class Stub:
    """A framework's object, inert: ``name`` of its class, ``args`` it was built from, ``state`` it was given.

    ``mapping`` and ``items`` hold what was put into it where the class is a kind of dict or list.
    """

    name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs, self.state = args, kwargs, None
        self.mapping: dict[Any, Any] = {}
        self.items: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.mapping[key] = value

    def append(self, value: Any) -> None:
        """Keep one item."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """Keep several items."""
        self.items.extend(values)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def stub(name: str) -> type[Stub]:
    """A class of inert objects that stand for ``name`` ("module.class")."""

    # __new__ must swallow whatever the pickle passes: NEWOBJ calls it in place of __init__.
    def new(cls: type[Stub], *args: Any, **kwargs: Any) -> Stub:
        made = object.__new__(cls)
        Stub.__init__(made, *args, **kwargs)
        return made

    return type(name.rpartition(".")[2], (Stub,), {"name": name, "__new__": new})


def load_pickle(data: bytes, file: Path, stubs: Callable[[str], bool], extra: Names | None = None) -> Any:
    """Unpickle ``data``; ``stubs(name)`` says which "module.class" may stand as a Stub, all else is refused.

    Raises:
        BadFileError: not a pickle, cut short, larger than its file allows, or it names something that is not allowed.
    """
    return unpickle(data, file, stubs, {**HARMLESS, **(extra or {})}, None)


def first_global(data: bytes) -> str:
    """The first "module.name" that a pickle names, "" if none comes early: tells whose pickle it is, reads nothing."""
    import pickletools

    strings: list[str] = []
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "GLOBAL":
                return str(argument).replace(" ", ".")
            if opcode.name == "STACK_GLOBAL":
                return ".".join(strings[-2:])
            if isinstance(argument, str):
                strings.append(argument)
            if count > 200:
                break
    except (ValueError, IndexError, EOFError, UnicodeDecodeError):
        pass
    return ""


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Let the process grow by at most ``extra`` bytes of address space, where the system can say no.

    A pickle of six bytes can ask for a table of gigabytes; only the allocator sees that coming.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = pages * resource.getpagesize() + extra
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY:
            wanted = min(wanted, soft)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, stubs: Callable[[str], bool], names: Names, persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._stubs, self._names, self._persistent = stubs, names, persistent
        self._made: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Only what is on the list, or an inert stand-in."""
        known = self._names.get((module, name))
        if known is not None:
            return known
        qualified = f"{module}.{name}"
        if not self._stubs(qualified):
            raise pickle.UnpicklingError(f"it names {qualified}, which such a file does not need; nothing was run")
        return self._made.setdefault(qualified, stub(qualified))

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage."""
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to data outside itself")
        return self._persistent(pid)


def unpickle(
    data: bytes,
    file: Path,
    stubs: Callable[[str], bool],
    names: Names,
    persistent: Callable[[Any], Any] | None,
    outside: int = 0,
) -> Any:
    """As ``load_pickle``, with the whole list of names and a function for the ``outside`` bytes that lie beside it."""
    try:
        # Data beside the pickle is read, copied, and widened (bfloat16 to float32): four times its bytes at most.
        with memory_limit(_ROOM + _GROWTH * len(data) + 4 * outside):
            return _Unpickler(data, stubs, names, persistent).load()
    except MemoryError:
        raise BadFileError(file, None, "its pickle asks for more memory than its size explains", REPAIR) from None
    # A damaged pickle can raise nearly anything: whatever its opcodes do to the wrong operand.
    except Exception as error:
        raise BadFileError(file, None, f"not a readable pickle ({first_line(error)})", REPAIR) from None


def first_line(error: BaseException) -> str:
    """What went wrong, in one line of at most 200 characters."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


class _Array(Stub):
    """A numpy array on its way: its state says shape, dtype and bytes."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _numpy_array(dtype, shape, data, bool(fortran))


class _Dtype(Stub):
    """A numpy dtype: only plain numbers, booleans and objects."""

    def resolve(self) -> np.dtype[Any] | None:
        """The dtype, None for objects."""
        code = str(self.args[0])
        if code.startswith("O"):
            return None
        if code[:1] not in "biufUS" or not code[1:].isdigit():
            raise ValueError(f"a numpy dtype {code!r}")
        order = self.state[1] if self.state else "="
        return np.dtype(f"{order}{code}" if order in ("<", ">") else code)


def _numpy_array(dtype: Any, shape: Any, data: Any, fortran: bool) -> Any:
    resolved = dtype.resolve()
    if resolved is None:
        array = np.empty(len(data), dtype=object)
        array[:] = data
        return array.reshape(shape)
    if isinstance(data, str):
        data = data.encode("latin1")
    if resolved.kind == "U" and not resolved.itemsize:
        return np.zeros(shape, dtype=resolved)
    return np.frombuffer(data, dtype=resolved).reshape(shape, order="F" if fortran else "C")


def _scalar(dtype: Any, data: Any) -> Any:
    return _numpy_array(dtype, (1,), data, False)[0]


def _frombuffer(data: Any, dtype: Any, shape: Any, order: str) -> Any:
    return _numpy_array(dtype, shape, bytes(data), order == "F")


def _bytearray(data: Any = b"", encoding: str = "latin1") -> bytearray:
    # Never bytearray(n): a number would be a size to allocate.
    return bytearray(data.encode(encoding) if isinstance(data, str) else bytes(memoryview(data)))


def _bytes(data: bytes | str = b"", encoding: str = "latin1") -> bytes:
    return bytes(_bytearray(data, encoding))


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode(encoding)


def plain(value: Any) -> Any:
    """Numpy arrays in place of the stand-ins that unpickling left, in dicts, lists and tuples to any depth."""
    if isinstance(value, _Array):
        return plain(value.value) if value.value is not None and value.value.dtype == object else value.value
    if isinstance(value, np.ndarray) and value.dtype == object:
        out = np.empty(value.shape, dtype=object)
        for at in np.ndindex(value.shape):
            out[at] = plain(value[at])
        return out
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list) and any(not isinstance(item, int | float) for item in value[:1]):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


_BUILTINS = ("builtins", "__builtin__")
HARMLESS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, name): kind for module in _BUILTINS for name, kind in (("set", set), ("frozenset", frozenset))},
    **{(module, "bytearray"): _bytearray for module in _BUILTINS},
    **{(module, "bytes"): _bytes for module in _BUILTINS},
    ("_codecs", "encode"): _encode,
}
for _numpy in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"):
    HARMLESS |= {
        (_numpy, "_reconstruct"): type("_Array", (_Array,), {}),
        (_numpy, "ndarray"): stub("numpy.ndarray"),
        (_numpy, "dtype"): _Dtype,
        (_numpy, "scalar"): _scalar,
        (_numpy, "_frombuffer"): _frombuffer,
    }
