"""What `--dry-run` tells, and what it is held to."""

import edm2
from tests.command_lines import call

PRESET = "edm2-img512-s-guid-fid"


def told(command, *args) -> dict[str, str]:
    """Facts by name."""
    result = call(command, *args)
    assert result.exit_code == 0, result.output
    return {line[:16].strip(): line[17:] for line in result.output.splitlines() if line[:16].strip()}


def counted_evaluations(monkeypatch) -> dict[int, int]:
    """How often networks are evaluated from now on, for one image at a time, by their numbers of classes, 0 and 5."""
    counted = {0: 0, 5: 0}
    denoise = edm2.Precond.denoise

    def count(self, x, *args):
        counted[self.label_dim] += 1
        return denoise(self, x, *args)

    monkeypatch.setattr(edm2.Precond, "denoise", count)
    monkeypatch.setattr("edm2.denoisers.CHUNK_PIXELS", 1)
    return counted
