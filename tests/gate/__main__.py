"""`python -m tests.gate`: compile the kernels, show what breaks a limit or differs from the table, which `--update` writes.

`--all` leaves no shape out, which takes many minutes, and heeds the limits only. `--loops` shows the main loops of the
convolutions, in a minute.
"""

import sys

from tests.gate import loops, table
from tests.gate.build import compile_presets
from tests.gate.limits import broken


def main() -> None:
    everything, only_loops, update = (f"--{name}" in sys.argv[1:] for name in ("all", "loops", "update"))
    facts = compile_presets(everything, loops.KERNELS if only_loops else None)
    failures = broken(facts)
    rows, loop_rows = table.rows(facts), loops.rows(facts)
    if only_loops:
        print(loops.text(loop_rows))
    changes = [] if everything or only_loops else table.differences(table.read(), rows)
    changes += [] if everything else table.differences(loops.read(), loop_rows, loops.COUNTS)
    print(*failures, *changes, f"{len(rows)} kernels compiled", sep="\n")
    if update:
        loops.write(loop_rows)
        if not only_loops:
            table.write(rows)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
