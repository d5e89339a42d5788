"""`python -m tests.gate`: compile the kernels, show what breaks a limit or differs from the table, which `--update` writes.

`--all` leaves no shape out, which takes many minutes, and heeds the limits only.
"""

import sys

from tests.gate import table
from tests.gate.build import compile_presets
from tests.gate.limits import broken


def main() -> None:
    facts = compile_presets(everything="--all" in sys.argv[1:])
    failures = broken(facts)
    rows = table.rows(facts)
    changes = [] if "--all" in sys.argv[1:] else table.differences(table.read(), rows)
    print(*failures, *changes, f"{len(rows)} kernels compiled", sep="\n")
    if "--update" in sys.argv[1:]:
        table.write(rows)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
