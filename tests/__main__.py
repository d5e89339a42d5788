"""`python -m tests`: all tests, and beside them once more those of the kernels, in Triton's interpreter.

Two processes, each with half of the cores; the second, which has less to do, also takes some files off the first. Its output
follows the first's. A test that hangs ends its process, which tells where it hung.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

INTERPRETED = """adam attention bad_input bench_convs bench_tune conv conv_epilogues conv_library conv_parts conv_up interpreter linear ops
prepared registration step triton_network""".split()
MOVED = "bench", "bench_gpu", "ledger", "interruption", "docs", "metrics_processes"
HANGS = 2400  # seconds; the longest, the compile gate, takes 146 on two cores, and several times that beside others
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", f"faulthandler_timeout={HANGS}", "-o", "faulthandler_exit_on_timeout=true"]


def main() -> int:
    """The exit status: not 0 if any failed."""
    if sys.argv[1:]:
        sys.exit("python -m tests runs everything and takes no arguments; for one file: python -m pytest tests/test_conv.py")
    threads = max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    moved = _files(MOVED)
    with tempfile.TemporaryFile() as output, ThreadPoolExecutor(1) as beside:

        def run_beside(files: list[str], **more: str) -> int:
            return subprocess.call([*PYTEST, *files], env=environment | more, stdout=output, stderr=output)

        others = [beside.submit(run_beside, _files(INTERPRETED), TRITON_INTERPRET="1"), beside.submit(run_beside, moved)]
        try:
            failed = subprocess.call([*PYTEST, *(f"--ignore={file}" for file in moved)], env=environment)
            failed = max(failed, *(other.result() for other in others))
        except KeyboardInterrupt:  # which has reached the two that run as well
            others[-1].cancel()
            raise
        output.seek(0)
        print(f"\nIn Triton's interpreter, and {', '.join(moved)}:\n{output.read().decode(errors='replace')}", flush=True)
    return failed


def _files(names: tuple[str, ...] | list[str]) -> list[str]:
    return [f"tests/test_{name}.py" for name in names]


if __name__ == "__main__":
    sys.exit(main())
