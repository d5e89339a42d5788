"""`python -m tests.gate`: compile every kernel, show what breaks a limit or differs from the table; `--update` writes it."""

import sys

from tests.gate import table
from tests.gate.build import compile_presets
from tests.gate.limits import broken


def main() -> None:
    facts = compile_presets()
    failures = broken(facts)
    rows = table.rows(facts)
    print(*failures, *table.differences(table.read(), rows), f"{len(rows)} kernels compiled", sep="\n")
    if "--update" in sys.argv[1:]:
        table.write(rows)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
