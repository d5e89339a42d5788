"""`python -m tests`: all tests, and beside them once more those of the kernels, in Triton's interpreter.

Two processes, each with half of the cores; the second's output follows the first's.
"""

import os
import subprocess
import sys
import tempfile

INTERPRETED = """adam attention bad_input bench_convs bench_tune conv conv_epilogues conv_library conv_parts conv_up interpreter linear ops
prepared registration triton_network""".split()


def main() -> int:
    """The exit status: not 0 if either failed."""
    if sys.argv[1:]:
        sys.exit("python -m tests runs everything and takes no arguments; for one file: python -m pytest tests/test_conv.py")
    threads = max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pytest = [sys.executable, "-m", "pytest", "-q"]
    files = [f"tests/test_{name}.py" for name in INTERPRETED]
    with tempfile.TemporaryFile() as output:
        interpreted = subprocess.Popen([*pytest, *files], env={**environment, "TRITON_INTERPRET": "1"}, stdout=output, stderr=output)
        try:
            failed = subprocess.call(pytest, env=environment)
            failed = interpreted.wait() or failed
        finally:
            interpreted.kill()
        output.seek(0)
        print(f"\nIn Triton's interpreter:\n{output.read().decode(errors='replace')}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
