"""Machine code of a kernel as cuobjdump lists it: its instructions, and which of them share a loop."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:\{ *)?(@\S+ +)?([A-Z0-9_]+)(\S*) *([^;]*?) *;")
TENSOR_CORE = re.compile(r"(UTC)?[HIQOD]G?MMA\w*")  # HMMA, HGMMA, UTCHMMA and their kin; HFMA2.MMA is none of them
SPILL = ("STL", "LDL")
ENDS = ("EXIT", "RET")


class Instruction(NamedTuple):
    address: int
    predicate: str
    opcode: str
    operands: str


class Code:
    """The instructions of a kernel in order, and the edges between them, by position."""

    def __init__(self, text: str):
        found = (INSTRUCTION.match(line) for line in text.splitlines())
        self.instructions = [Instruction(int(m[1], 16), m[2] or "", m[3], m[5]) for m in found if m]
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

    def _loop(self, i: int) -> set[int]:
        """Instructions that control reaches from i and that reach i."""
        return _reached(self.after, i) & _reached(self.before, i)


def _reached(edges: list[list[int]], start: int) -> set[int]:
    seen: set[int] = set()
    todo: Iterable[int] = [start]
    while todo := [j for i in todo for j in edges[i] if j not in seen and not seen.add(j)]:
        pass
    return seen
