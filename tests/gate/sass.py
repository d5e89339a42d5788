"""Machine code of a kernel as cuobjdump lists it: its instructions, which of them share a loop, what is in the main ones."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:\{ *)?(@\S+ +)?([A-Z0-9_]+)(\S*) *([^;]*?) *;")
TENSOR_CORE = re.compile(r"(UTC)?[HIQOD]G?MMA\w*")  # HMMA, HGMMA, UTCHMMA and their kin; HFMA2.MMA is none of them
SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)")  # of HGMMA, which a group of 4 warps executes
SPILL = ("STL", "LDL")
ENDS = ("EXIT", "RET")


class Instruction(NamedTuple):
    address: int
    predicate: str
    opcode: str
    modifiers: str
    operands: str

    def multiply_adds(self, warps: int) -> int:
        """Of a program, at most."""
        if self.opcode.startswith("UTC"):
            return 128 * 256 * 16  # its shape is in a register
        if m := SHAPE.search(self.modifiers):
            return int(m[1]) * int(m[2]) * int(m[3]) * warps // 4
        return 16 * 8 * 16 * warps if self.modifiers.startswith(".16816") else 0


class Loop(NamedTuple):
    """Of the instructions of a loop: how many are of each kind."""

    products: int  # on tensor cores
    multiply_adds: int  # of these, of a program
    from_registers: int  # of HGMMA
    shared_loads: int  # into registers
    global_loads: int  # into registers
    copies: int  # to shared memory, by LDGSTS of a thread or UTMALDG of a program
    barriers: int  # BAR of a program, SYNCS of an mbarrier
    instructions: int


class Code:
    """The instructions of a kernel in order, and the edges between them, by position."""

    def __init__(self, text: str):
        found = (INSTRUCTION.match(line) for line in text.splitlines())
        self.instructions = [Instruction(int(m[1], 16), m[2] or "", m[3], m[4], m[5]) for m in found if m]
        self.position = {x.address: i for i, x in enumerate(self.instructions)}
        self.after = [self._successors(i) for i in range(len(self.instructions))]
        self.before: list[list[int]] = [[] for _ in self.instructions]
        for i, targets in enumerate(self.after):
            for j in targets:
                self.before[j].append(i)

    def _successors(self, i: int) -> list[int]:
        x = self.instructions[i]
        target = re.search(r"0x([0-9a-f]+)$", x.operands) if x.opcode in ("BRA", "CALL", "JMP") else None
        targets = [self.position[int(target[1], 16)]] if target and int(target[1], 16) in self.position else []
        leaves = x.opcode in ENDS or x.opcode in ("BRA", "JMP") and target and target.start() == 0
        falls = i + 1 < len(self.instructions) and not (leaves and not x.predicate)
        return [*targets, *([i + 1] if falls else [])]

    def where(self, of_kind: Callable[[Instruction], bool]) -> set[int]:
        return {i for i, x in enumerate(self.instructions) if of_kind(x)}

    @property
    def tensor_core(self) -> set[int]:
        return self.where(lambda x: bool(TENSOR_CORE.fullmatch(x.opcode)))

    def spills_in_loops(self) -> int:
        """Instructions that spill or fill in a loop, however nested, that holds tensor-core instructions."""
        products = self.tensor_core
        return sum(bool(self._loop(i) & products) for i in self.where(lambda x: x.opcode in SPILL))

    def main_loops(self, warps: int) -> list[Loop]:
        """Those that hold tensor-core instructions, with all that is nested in them, in order."""
        loops, seen = [], set()
        for i in sorted(self.tensor_core):
            if i not in seen and (inside := self._loop(i)):
                seen |= inside
                loops.append(_count([self.instructions[j] for j in sorted(inside)], warps))
        return loops

    def _loop(self, i: int) -> set[int]:
        """Instructions that control reaches from i and that reach i."""
        return _reached(self.after, i) & _reached(self.before, i)


def _count(loop: list[Instruction], warps: int) -> Loop:
    products = [x for x in loop if TENSOR_CORE.fullmatch(x.opcode)]

    def number(*opcodes: str) -> int:
        return sum(x.opcode in opcodes for x in loop)

    return Loop(
        products=len(products),
        multiply_adds=sum(x.multiply_adds(warps) for x in products),
        from_registers=sum(x.opcode == "HGMMA" and not x.operands.split(", ")[1].startswith("gdesc") for x in products),
        shared_loads=number("LDS", "LDSM"),
        global_loads=number("LD", "LDG"),
        copies=number("LDGSTS", "UTMALDG"),
        barriers=number("BAR", "SYNCS"),
        instructions=len(loop),
    )


def _reached(edges: list[list[int]], start: int) -> set[int]:
    seen: set[int] = set()
    todo: Iterable[int] = [start]
    while todo := [j for i in todo for j in edges[i] if j not in seen and not seen.add(j)]:
        pass
    return seen
