"""What no kernel may do, whatever the version of Triton."""

from collections.abc import Iterator

from tests.gate import loops
from tests.gate.build import Facts
from tests.gate.collect import Job

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes per block that the hardware grants
TENSOR_MEMORY = 512  # columns
SPILLED = 32  # bytes, outside of the loops that matter
FROM_REGISTERS = {"cosine_attention_backward_kernel"}  # normalised there before they are multiplied
REGISTERS = 32  # as few, next to matrix products, are a register allocation that failed


def violations(job: Job, facts: Facts) -> Iterator[str]:
    """In words, one by one."""
    if facts.failure:
        yield f"does not compile: {facts.failure}"
        return
    yield from facts.warnings
    yield from _bad_code(facts)
    yield from loops.violations(job, facts.loops)
    if facts.loaded_operands and job.name not in FROM_REGISTERS:
        yield f"{facts.loaded_operands} operands of matrix products loaded into registers in a loop"
    if facts.spilled > SPILLED:
        yield f"{facts.spilled} bytes spilled, at most {SPILLED} are let pass"
    if facts.shared > SHARED[job.capability]:
        yield f"{facts.shared} bytes of shared memory, there are {SHARED[job.capability]}"
    if facts.tensor_memory > TENSOR_MEMORY:
        yield f"{facts.tensor_memory} columns of tensor memory, there are {TENSOR_MEMORY}"


def _bad_code(facts: Facts) -> Iterator[str]:
    if facts.traps:
        yield "holds a trap"
    if facts.spills_in_loops:
        yield f"{facts.spills_in_loops} spills in a loop that holds tensor-core instructions"
    if facts.wants_products and not facts.products:
        yield "no tensor-core instruction for its matrix products"
    if facts.wants_products and facts.registers <= REGISTERS:
        yield f"{facts.registers} registers, a kernel with matrix products needs more than {REGISTERS}"


def broken(facts: dict[Job, Facts]) -> list[str]:
    """One line for each limit that a kernel breaks."""
    return [f"{violation}: {job}" for job, x in facts.items() for violation in violations(job, x)]
