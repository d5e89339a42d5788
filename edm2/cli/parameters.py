"""Types of options: the notations of the official release's command lines, and numbers in their range."""

import math
import re
from decimal import Decimal
from typing import Any

import click

from edm2.presets import Ki, Mi


class ImageCount(click.ParamType):
    """A count of images: `2048`, `128Ki`, `8Mi`, `1Gi`."""

    name = "NIMG"
    units = {"": 1, "Ki": Ki, "Mi": Mi, "Gi": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+)(|Ki|Mi|Gi)", str(value))
        if not match:
            self.fail(f"'{value}' is no count of images; write 2048, 128Ki, 8Mi or 1Gi", param, ctx)
        return int(match[1]) * self.units[match[2]]


class Float(click.FloatRange):
    """A number, not NaN, and finite unless `infinite`."""

    name = "FLOAT"

    def __init__(self, min: float | None = None, *, above: float | None = None, infinite: bool = False, **kwargs: Any):
        super().__init__(min if above is None else above, min_open=above is not None, **kwargs)
        self.infinite = infinite

    def _describe_range(self) -> str:
        """For --help: nothing where there are no bounds."""
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self.infinite):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class Resolution(click.ParamType):
    """Width and height in pixels: `512x512`, or `512` for both."""

    name = "WxH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", str(value))
        if not match:
            self.fail(f"'{value}' is no size; write 512x512 or 512", param, ctx)
        return int(match[1]), int(match[2] or match[1])


class PixelRange(click.Choice):
    """What a VAE is fed with: `0,1` or `-1,1`."""

    name = "LO,HI"

    def __init__(self) -> None:
        super().__init__(["0,1", "-1,1"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        low, high = super().convert(value, param, ctx).split(",")
        return int(low), int(high)


class Duration(click.ParamType):
    """Hours, minutes and seconds in seconds: `11:50:00`, `90m`, `12h`, `1.5d`."""

    name = "TIME"
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value)):
            return float(match[1]) * self.units[match[2]]
        if match := re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", str(value)):
            return float(int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3]))
        self.fail(f"'{value}' is no time; write 11:50:00, 90m, 12h or 1.5d", param, ctx)


class Seed(click.IntRange):
    """Of random numbers."""

    def __init__(self):
        super().__init__(0, 2**63 - 1)

    def _describe_range(self) -> str:
        """For --help: hardly anybody wants to know."""
        return ""


class Interval(click.ParamType):
    """Two numbers, the second above the first, which is not negative: `0.19,1.61`; the second may be `inf`."""

    name = "LO,HI"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        try:
            low, high = map(float, str(value).split(","))
        except ValueError:
            low, high = 1, 0
        if not 0 <= low < high or math.isinf(low):
            self.fail(f"'{value}' is no interval; write its two bounds, the lower first, like 0.19,1.61", param, ctx)
        return low, high


class FloatList(click.ParamType):
    """Numbers, as the official release's scripts take them: `0.05,0.10`; evenly spaced ones: `0.010,0.015,...,0.250`."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        numbers: list[float] = []
        parts = [part.strip() for part in str(value).split(",")]
        try:
            for i, part in enumerate(parts):
                numbers += _between(*map(Decimal, (parts[i - 2], parts[i - 1], parts[i + 1]))) if part == "..." and i > 1 else [float(part)]
        except (ArithmeticError, LookupError, ValueError):
            numbers = []
        if not numbers or not all(map(math.isfinite, numbers)):
            self.fail(f"'{value}' is no list of numbers; write 0.05,0.10 or 0.010,0.015,...,0.250", param, ctx)
        return numbers


def _between(first: Decimal, second: Decimal, last: Decimal) -> list[float]:
    """What lies between the second and the last, which are no part of it. ValueError if the last is none of that row, or too far."""
    step = second - first
    count = (last - second) / step
    if count != int(count) or not 1 <= count <= 100_000:
        raise ValueError("not evenly spaced")
    return [float(second + i * step) for i in range(1, int(count))]


class IntList(click.ParamType):
    """Integers and ranges: `1,2,5-10`."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        numbers: list[int] = []
        for part in str(value).split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last:
                self.fail(f"'{value}' is no list of integers; write 0-63 or 1,2,5-10", param, ctx)
            numbers.extend(range(first, last + 1))
        return numbers


class Names(click.ParamType):
    """Several, with commas between: `fid,fd_dinov2`; each once."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        if isinstance(value, list):
            return value
        names = [name.strip() for name in str(value).split(",")]
        if not all(names):
            self.fail(f"'{value}' is no list of names; write fid or fid,fd_dinov2", param, ctx)
        return list(dict.fromkeys(names))
