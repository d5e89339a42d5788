"""`python -m tests.mutations COUNT`: as many damaged copies of the official pickle, read under watch.

Prints how many were read and how many refused. Ends with an error if one was read as something else, took long or much memory,
raised anything but a UserError, or if a program was started or code executed.
"""

import random
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

FILE = Path(__file__).parent / "golden" / "official_snapshot.pkl"
SECONDS, GIGABYTES = 20, 8
FORBIDDEN = "os.system os.exec os.posix_spawn os.fork subprocess.Popen pickle.find_class exec compile ctypes.dlopen socket.connect".split()


def mutated(data: bytes, seed: int) -> bytes:
    """Bytes changed, left out, doubled, moved or made up; or all from a place on left out."""
    rng = random.Random(seed)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 50))):
        # half of them where the instructions are: tensors, which are most of the file, have them in between
        at = rng.randrange(min(len(changed), 12000) if rng.random() < 0.5 else len(changed))
        length = rng.choice((1, 1, 2, 8, 100))
        kind = rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + length] = rng.randbytes(len(changed[at : at + length]))
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at:at] = rng.choice((b"c", b"R", b"b", b"\x93", b"\x81", b"P1\n", b"\x82\x01", b"r\xff\xff\xff\xff", b"(", b"0", b"u"))
        elif rng.random() < 0.1:
            del changed[at:]
        changed = changed or bytearray(b".")
    return bytes(changed)


def main(count: int) -> None:
    import edm2
    from edm2.official import read_official

    warnings.simplefilter("ignore")
    original = FILE.read_bytes()
    expected = {name: x.shape for name, x in read_official(FILE).tensors.items()}
    seen: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pkl"
        path.write_bytes(original[:1000])
        try:
            read_official(path)  # what is imported for an error is there from now on
        except edm2.UserError:
            pass
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES * 2**30,) * 2)
        sys.addaudithook(lambda event, _: seen.append(event) if event in FORBIDDEN else None)
        read = 0
        for seed in range(count):
            path.write_bytes(mutated(original, seed))
            start = time.perf_counter()
            try:
                found = read_official(path)
                assert {name: x.shape for name, x in found.tensors.items()} == expected, f"seed {seed}: another network"
                read += 1
            except edm2.UserError as e:
                assert len(str(e).splitlines()) == 1, f"seed {seed}: {e}"
            assert time.perf_counter() - start < SECONDS, f"seed {seed}: too long"
            assert not seen, f"seed {seed}: {seen}"
    print(read, count - read)


if __name__ == "__main__":
    main(int(sys.argv[1]))
