"""The 36 ways of sampling that were published with the networks: which network, which guide, how strong.

Karras et al. 2024, Table 4, and 2024b ("Guiding a diffusion model with a bad version of itself", autoguidance). `fid` and `dino`
say which metric the averages' widths are the best for. The networks are under CC BY-NC-SA.
"""

from pathlib import Path
from typing import NamedTuple

from edm2.errors import check_name

URL = "https://nvlabs-fi-cdn.nvidia.com/edm2/posthoc-reconstructions"


class Published(NamedTuple):
    """The network and its guide: in the table names of size, thousands of images and σ_rel. The guide's strength."""

    net: str | None
    gnet: str | None = None
    guidance: float = 1.0


PUBLISHED: dict[str, Published] = {
    "edm2-img512-xs-fid": Published("edm2-img512-xs-2147483-0.135"),
    "edm2-img512-xs-dino": Published("edm2-img512-xs-2147483-0.200"),
    "edm2-img512-s-fid": Published("edm2-img512-s-2147483-0.130"),
    "edm2-img512-s-dino": Published("edm2-img512-s-2147483-0.190"),
    "edm2-img512-m-fid": Published("edm2-img512-m-2147483-0.100"),
    "edm2-img512-m-dino": Published("edm2-img512-m-2147483-0.155"),
    "edm2-img512-l-fid": Published("edm2-img512-l-1879048-0.085"),
    "edm2-img512-l-dino": Published("edm2-img512-l-1879048-0.155"),
    "edm2-img512-xl-fid": Published("edm2-img512-xl-1342177-0.085"),
    "edm2-img512-xl-dino": Published("edm2-img512-xl-1342177-0.155"),
    "edm2-img512-xxl-fid": Published("edm2-img512-xxl-0939524-0.070"),
    "edm2-img512-xxl-dino": Published("edm2-img512-xxl-0939524-0.150"),
    "edm2-img64-s-fid": Published("edm2-img64-s-1073741-0.075"),
    "edm2-img64-m-fid": Published("edm2-img64-m-2147483-0.060"),
    "edm2-img64-l-fid": Published("edm2-img64-l-1073741-0.040"),
    "edm2-img64-xl-fid": Published("edm2-img64-xl-0671088-0.040"),
    "edm2-img512-xs-guid-fid": Published("edm2-img512-xs-2147483-0.045", "edm2-img512-xs-uncond-2147483-0.045", 1.4),
    "edm2-img512-xs-guid-dino": Published("edm2-img512-xs-2147483-0.150", "edm2-img512-xs-uncond-2147483-0.150", 1.7),
    "edm2-img512-s-guid-fid": Published("edm2-img512-s-2147483-0.025", "edm2-img512-xs-uncond-2147483-0.025", 1.4),
    "edm2-img512-s-guid-dino": Published("edm2-img512-s-2147483-0.085", "edm2-img512-xs-uncond-2147483-0.085", 1.9),
    "edm2-img512-m-guid-fid": Published("edm2-img512-m-2147483-0.030", "edm2-img512-xs-uncond-2147483-0.030", 1.2),
    "edm2-img512-m-guid-dino": Published("edm2-img512-m-2147483-0.015", "edm2-img512-xs-uncond-2147483-0.015", 2.0),
    "edm2-img512-l-guid-fid": Published("edm2-img512-l-1879048-0.015", "edm2-img512-xs-uncond-2147483-0.015", 1.2),
    "edm2-img512-l-guid-dino": Published("edm2-img512-l-1879048-0.035", "edm2-img512-xs-uncond-2147483-0.035", 1.7),
    "edm2-img512-xl-guid-fid": Published("edm2-img512-xl-1342177-0.020", "edm2-img512-xs-uncond-2147483-0.020", 1.2),
    "edm2-img512-xl-guid-dino": Published("edm2-img512-xl-1342177-0.030", "edm2-img512-xs-uncond-2147483-0.030", 1.7),
    "edm2-img512-xxl-guid-fid": Published("edm2-img512-xxl-0939524-0.015", "edm2-img512-xs-uncond-2147483-0.015", 1.2),
    "edm2-img512-xxl-guid-dino": Published("edm2-img512-xxl-0939524-0.015", "edm2-img512-xs-uncond-2147483-0.015", 1.7),
    "edm2-img512-s-autog-fid": Published("edm2-img512-s-2147483-0.070", "edm2-img512-xs-0134217-0.125", 2.1),
    "edm2-img512-s-autog-dino": Published("edm2-img512-s-2147483-0.120", "edm2-img512-xs-0134217-0.165", 2.45),
    "edm2-img512-xxl-autog-fid": Published("edm2-img512-xxl-0939524-0.075", "edm2-img512-m-0268435-0.155", 2.05),
    "edm2-img512-xxl-autog-dino": Published("edm2-img512-xxl-0939524-0.130", "edm2-img512-m-0268435-0.205", 2.3),
    "edm2-img512-s-uncond-autog-fid": Published("edm2-img512-s-uncond-2147483-0.070", "edm2-img512-xs-uncond-0134217-0.110", 2.85),
    "edm2-img512-s-uncond-autog-dino": Published("edm2-img512-s-uncond-2147483-0.090", "edm2-img512-xs-uncond-0134217-0.125", 2.9),
    "edm2-img64-s-autog-fid": Published("edm2-img64-s-1073741-0.045", "edm2-img64-xs-0134217-0.110", 1.7),
    "edm2-img64-s-autog-dino": Published("edm2-img64-s-1073741-0.105", "edm2-img64-xs-0134217-0.175", 2.2),
}


def published_files(preset: str, folder: Path, net: bool = True, gnet: bool = True) -> Published:
    """The row called `preset` with where its networks are: files in `folder`, snapshots or pickles, else their addresses; None for
    one that is not wanted. UserError with the nearest names for an unknown preset.
    """
    check_name("preset", preset, PUBLISHED)
    row = PUBLISHED[preset]
    return row._replace(net=_place(row.net, folder) if net else None, gnet=_place(row.gnet, folder) if gnet and row.gnet else None)


def address(name: str) -> str:
    """Of a published network's pickle."""
    return f"{URL}/{name}.pkl"


def _place(name: str, folder: Path) -> str:
    files = (folder / f"{name}{suffix}" for suffix in (".safetensors", ".pkl"))
    return next((str(path) for path in files if path.is_file()), address(name))
