"""`python -m tests.mutations COUNT`: as many damaged copies of the official pickle, read under watch.

Prints how many were read and equal the original, how many have other numbers in tensors, how many have other settings (a
pickle has no checksums: nobody can tell these from other files), and how many were refused. Ends with an error if one was read
as tensors of other names, shapes or types, took long or much memory, raised anything but a UserError, or if a program was
started or code executed.
"""

import pickletools
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).parent / "golden" / "official_snapshot.pkl"
SECONDS, KIB, GIGABYTES = 10, 2**19, 6  # what an attempt may take; what a process gets
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


def rearranged(data: bytes, seed: int) -> bytes:
    """Instructions left out, doubled, exchanged, or in the place of others: each as it stands in the file."""
    rng = random.Random(seed)
    parts = list(_instructions(data))
    for _ in range(rng.choice((1, 1, 2, 5))):
        # what is near to one another is more often of one kind
        i = rng.randrange(1, len(parts))
        j = min(max(1, i + rng.randrange(-20, 20)), len(parts) - 1) if rng.random() < 0.5 else rng.randrange(1, len(parts))
        kind = rng.randrange(5)
        if kind == 0:
            del parts[i : i + rng.choice((1, 1, 5))]
        elif kind == 1:
            parts[i:i] = [parts[i]] * rng.choice((1, 1, 1000))
        elif kind == 2:
            parts[i], parts[j] = parts[j], parts[i]
        elif kind == 3:
            parts[i] = parts[j]
        else:
            parts[i:i] = parts[j : j + 20]
    return b"".join(parts)


@lru_cache
def _instructions(data: bytes) -> tuple[bytes, ...]:
    starts = [at for _, _, at in pickletools.genops(data)]
    return tuple(data[a:b] for a, b in zip(starts, [*starts[1:], len(data)]))


def main(count: int) -> None:
    import edm2
    from edm2.official import read_official

    def settings(found: edm2.official.OpenSnapshot) -> tuple:
        return found.config, found.encoder.config(), found.meta

    warnings.simplefilter("ignore")
    original = FILE.read_bytes()
    expected = read_official(FILE)
    expected.meta["file"] = "a.pkl"
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
        ends, before = Counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(count):
            path.write_bytes((mutated if seed % 2 else rearranged)(original, seed))
            start = time.perf_counter()
            try:
                found = read_official(path)
                forms, others = ({name: (x.shape, x.dtype) for name, x in of.tensors.items()} for of in (found, expected))
                assert forms == others, f"seed {seed}: another network"
                same = all(x.equal(expected.tensors[name]) for name, x in found.tensors.items())
                ends["other settings" if settings(found) != settings(expected) else "equal" if same else "other numbers"] += 1
            except edm2.UserError as e:
                assert len(str(e).splitlines()) == 1, f"seed {seed}: {e}"
                ends["refused"] += 1
            assert time.perf_counter() - start < SECONDS, f"seed {seed}: too long"
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + KIB, f"seed {seed}: too much memory"
            assert not seen, f"seed {seed}: {seen}"
    print(*(ends[end] for end in ("equal", "other numbers", "other settings", "refused")))


if __name__ == "__main__":
    main(int(sys.argv[1]))
