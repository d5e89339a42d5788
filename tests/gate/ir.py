"""What is read off Triton's intermediate code."""

import re

DOT = re.compile(r"= tt\.dot\S* .* : tensor<[\dx]+x(\w+)")
VALUE = re.compile(r"^\s*(%\w+)(?:, (%\w+))? = (\S+) (%\w+)")
MOVES = ("ttg.convert_layout", "tt.reshape", "tt.trans", "tt.split")


def wants_tensor_cores(ttir: str) -> bool:
    """Is there a matrix product that tensor cores compute? Those of fp32 in full precision they do not."""
    dots = (line for line in ttir.splitlines() if DOT.search(line))
    return any(DOT.search(line)[1] != "f32" or "inputPrecision" in line for line in dots)


def loaded_operands(ttgir: str) -> int:
    """Operands of Hopper's matrix products that pass unchanged from shared memory through registers in a loop."""
    count, loops, loaded = 0, [], set()
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line:
            loops.append(indent)
        elif loops and line.strip().startswith("}") and indent == loops[-1]:
            loops.pop()
        if m := VALUE.match(line):
            first, second, op, operand = m.groups()
            if op == "ttg.local_load" and loops or op in MOVES and operand in loaded:
                loaded |= {first, second}
            count += op == "ttng.warp_group_dot" and operand in loaded
    return count
