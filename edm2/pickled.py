"""Pickles read as data: nothing in them is imported, called or executed.

A pickle is a program for a small stack machine. This one knows the instructions that make data, and of those that name
Python objects and call them, what stands in an allow-list: functions of this project that only build data.
"""

import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

MARK = object()
DAMAGE = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError  # what comes of wrong arguments
INSTRUCTIONS_AT_MOST = 2**21  # a network of the official release has some 50,000
LIMIT = 2**16  # characters of what names something; bytes of an integer
NUMBERED_AT_MOST = 2**13  # keys that are numbers: so few may have any hashes


class Refused(Exception):
    """A pickle that asks for what is not allowed, or that is damaged."""


class Object:
    """What a class of the allow-list makes: it takes a state, once."""

    def __init__(self, kind: str):
        self.kind, self.state = kind, None

    def build(self, state: Any) -> None:
        if self.state is not None:
            raise Refused(f"a second state of {self.kind}")
        self.state = state


class Span:
    """Bytes that stay in the file until `read`: they are most of it."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self.file, self.start, self.length = file, start, length

    def read(self, first: int = 0, count: int | None = None) -> bytes:
        """`count` of them, or all, from the one numbered `first` on."""
        here = self.file.tell()
        self.file.seek(self.start + first)
        data = self.file.read(self.length - first if count is None else count)
        self.file.seek(here)
        return data


class Function:
    """What stands for a function or class of the allow-list; `make` is given the arguments of the call."""

    def __init__(self, name: str, make: Callable[..., Any]):
        self.name, self.make = name, make

    def __call__(self, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise Refused(f"{self.name} called without a tuple")
        try:
            return self.make(*arguments)
        except DAMAGE as e:
            raise Refused(f"{self.name} called with what it does not take ({type(e).__name__})") from e


def read_pickle(
    file: BinaryIO,
    size: int,
    allowed: Mapping[tuple[str, str], Callable[..., Any]],
    persistent: Callable[[Any], Any] | None = None,
    numbered: bool = False,
) -> Any:
    """The data of the pickle in `file`, of `size` bytes, long bytes as `Span`s of it.

    Refused for anything but data and calls of `allowed` (module, name), of which each is called with the arguments that the
    pickle gives; so is `persistent` with persistent ids, where they are wanted. What is read is at no time longer than what is
    left of the file, and nothing is numbered beyond what was there. Keys are text; if `numbered`, numbers too.
    """
    return _Machine(file, size, allowed, persistent, NUMBERED_AT_MOST if numbered else 0).run()


class _Machine:
    def __init__(
        self,
        file: BinaryIO,
        size: int,
        allowed: Mapping[tuple[str, str], Callable[..., Any]],
        persistent: Callable[[Any], Any] | None,
        numbered: int,
    ):
        self.file, self.left, self.allowed, self.persistent, self.numbered = file, size, allowed, persistent, numbered
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        if self.read(1) != b"\x80" or not 2 <= self.number("<B") <= 5:
            raise Refused("no pickle of protocol 2 to 5")
        for _ in range(INSTRUCTIONS_AT_MOST):
            code = self.read(1)
            if code == b".":
                break
            if code == b"Q" and self.persistent is not None:
                self.stack.append(self.persistent(self.pop()))
                continue
            instruction = INSTRUCTIONS.get(code)
            if instruction is None:
                raise Refused(f"it asks for {OTHERS.get(code, f'instruction {code!r}')}")
            instruction(self)
        else:
            raise Refused(f"it has more than {INSTRUCTIONS_AT_MOST:,} instructions")
        if len(self.stack) != 1 or self.stack[0] is MARK:
            raise Refused("damaged: it ends with more or less than one object")
        return self.stack[0]

    def read(self, count: int) -> bytes:
        if not 0 <= count <= self.left:
            raise Refused(f"damaged: {count} bytes are to follow, and there are {self.left}")
        self.left -= count
        data = self.file.read(count)
        if len(data) != count:
            raise Refused("damaged: it ends too early")
        return data

    def span(self, count: int) -> Span:
        if not 0 <= count <= self.left:
            raise Refused(f"damaged: {count} bytes are to follow, and there are {self.left}")
        self.left -= count
        start = self.file.tell()
        self.file.seek(count, os.SEEK_CUR)
        return Span(self.file, start, count)

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.read(struct.calcsize(form)))[0]

    def line(self) -> str:
        data = self.file.readline(LIMIT)
        self.left -= len(data)
        if self.left < 0 or not data.endswith(b"\n"):
            raise Refused("damaged: a name without an end")
        return _text(data[:-1])

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise Refused("damaged: its stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise Refused("damaged: its stack is empty")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        items = []
        while self.stack:
            item = self.stack.pop()
            if item is MARK:
                return items[::-1]
            items.append(item)
        raise Refused("damaged: no mark on its stack")

    def put(self, index: int) -> None:
        if index > len(self.memo):
            raise Refused(f"damaged: it numbers an object {index} where there are {len(self.memo)}")
        self.memo[index] = self.top()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise Refused(f"damaged: it refers to object {index}, which is not there")
        self.stack.append(self.memo[index])

    def find(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Refused("damaged: a name that is no text")
        make = self.allowed.get((module, name))
        if make is None:
            raise Refused(f"it asks for {module[:100]}.{name[:100]}")
        self.stack.append(Function(f"{module}.{name}", make))

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Function):
            raise Refused(f"it calls {_named(function)}")
        self.stack.append(function(arguments))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if not isinstance(target, Object):
            raise Refused(f"it sets the state of {_named(target)}")
        target.build(state)

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(items) % 2:
            raise Refused(f"damaged: it puts items into {_named(target)}")
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, str):  # others' hashes can be chosen to collide
                self.numbered -= 1
                if type(key) not in (int, float) or self.numbered < 0:
                    raise Refused(f"it uses {_named(key)} as a key")
            target[key] = value

    def append(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise Refused(f"damaged: it appends to {_named(target)}")
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, set) or not all(isinstance(item, str) for item in items):
            raise Refused(f"damaged: it adds to {_named(target)}")
        target.update(items)

    def tuple(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(items[::-1]))

    def long(self, count: int) -> None:
        if count > LIMIT:
            raise Refused("an integer of more than 65,536 bytes")
        self.stack.append(int.from_bytes(self.read(count), "little", signed=True))

    def pair(self) -> list[Any]:
        value, key = self.pop(), self.pop()
        return [key, value]


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as e:
        raise Refused("damaged: text that is none") from e


def _named(x: Any) -> str:
    return x.name if isinstance(x, Function) else x.kind if isinstance(x, Object) else f"a {type(x).__name__}"


Instruction = Callable[[_Machine], Any]


def _push(value: Callable[[_Machine], Any]) -> Instruction:
    return lambda m: m.stack.append(value(m))


def _global_of_stack(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.find(module, name)


INSTRUCTIONS: dict[bytes, Instruction] = {
    b"\x95": lambda m: m.number("<Q"),  # FRAME: its length says nothing that the rest does not
    b"(": lambda m: m.stack.append(MARK),
    b"0": lambda m: m.pop(),
    b"1": lambda m: m.pop_mark(),
    b"N": _push(lambda m: None),
    b"\x88": _push(lambda m: True),
    b"\x89": _push(lambda m: False),
    b"J": _push(lambda m: m.number("<i")),
    b"K": _push(lambda m: m.number("<B")),
    b"M": _push(lambda m: m.number("<H")),
    b"\x8a": lambda m: m.long(m.number("<B")),
    b"\x8b": lambda m: m.long(m.number("<I")),
    b"G": _push(lambda m: m.number(">d")),
    b"C": _push(lambda m: m.read(m.number("<B"))),
    b"B": _push(lambda m: m.span(m.number("<I"))),
    b"\x8e": _push(lambda m: m.span(m.number("<Q"))),
    b"\x96": _push(lambda m: m.span(m.number("<Q"))),  # a bytearray: how arrays are written in protocol 5
    b"\x8c": _push(lambda m: _text(m.read(m.number("<B")))),
    b"X": _push(lambda m: _text(m.read(m.number("<I")))),
    b"\x8d": _push(lambda m: _text(m.read(m.number("<Q")))),
    b")": _push(lambda m: ()),
    b"]": _push(lambda m: []),
    b"}": _push(lambda m: {}),
    b"\x8f": _push(lambda m: set()),
    b"t": _push(lambda m: tuple(m.pop_mark())),
    b"\x85": lambda m: m.tuple(1),
    b"\x86": lambda m: m.tuple(2),
    b"\x87": lambda m: m.tuple(3),
    b"a": lambda m: m.append([m.pop()]),
    b"e": lambda m: m.append(m.pop_mark()),
    b"s": lambda m: m.set_items(m.pair()),
    b"u": lambda m: m.set_items(m.pop_mark()),
    b"\x90": lambda m: m.add(m.pop_mark()),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.get(m.number("<B")),
    b"j": lambda m: m.get(m.number("<I")),
    b"c": lambda m: m.find(m.line(), m.line()),
    b"\x93": _global_of_stack,
    b"R": _Machine.call,
    b"\x81": _Machine.call,  # of a class with __new__
    b"b": _Machine.build,
}
OTHERS = {b"P": "a persistent id", b"Q": "a persistent id", b"i": "an instance by name (INST)", b"o": "an instance (OBJ)",
          b"\x82": "an extension code", b"\x83": "an extension code", b"\x84": "an extension code", b"\x92": "NEWOBJ_EX",
          b"\x97": "an out-of-band buffer"}  # fmt: skip
