"""Convolutions with what precedes or follows them in one kernel, and whole residual branches of two, against cuDNN in
channels-last and its pointwise work under `torch.compile`.

The `parts` of a case are the plain convolutions in it: what it takes longer than they do is what the rest adds. The `row` is
that of the table of tiles which would give it to the library.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from bench import baseline
from bench.case import Candidates, Case
from bench.convs import LIBRARY, by_library, conv_name, own_form, own_weight, plain_form, plain_input_gradient, plain_weight, row
from bench.ledger import fake_network, inputs_for
from bench.models import compile_for, compile_name
from bench.ops import backward_of
from kernels import reference
from kernels.convolve import convolve
from kernels.jit import Launch, serves
from kernels.reference import NO_FACTORS, joined_factors, sum_scales
from kernels.tracing import OnGPU
from kernels.weight import PreparedWeight

T, CAT_T = 0.3, 0.5  # of MP-Sum and MP-Cat, as published
TOLERANCE = 1e-2  # relative 2-norm against eager PyTorch: both round to fp16


class Site(NamedTuple):
    """Where something stands: images, resolution, channels, those of two sources that are joined, kernel, clip, how often.

    The resolution is that of what a fusion computes; with `up` its tensor x has half of it.
    Without `saves` it is part of an evaluation, and nothing is kept for a backward.
    """

    n: int
    res: int
    cin: int
    cout: int
    sources: tuple[int, ...] = ()
    k: int = 3
    clip: float | None = 256.0
    count: int = 1
    saves: bool = True
    up: bool = False

    @property
    def label(self) -> str:
        return "-".join([f"n{self.n}", f"{self.res}x{self.res}", *map(str, (self.cin, self.cout, *self.sources))])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor by its name: w… are weights, m the modulation, others activations."""
        if name == "m":
            return self.n, self.cout
        if name[0] == "w":
            depths = {"w1": self.cout, "w_skip": sum(self.sources)}
            return 1 if name == "w_skip" else self.k**2, self.cout, depths.get(name, self.cin)
        channels = {"g": self.cout, "residual": self.cout} | dict(zip("ab", self.sources))
        res = self.res // 2 if self.up and name == "x" else self.res
        return self.n, res, res, channels.get(name, self.cin)


class Fusion(NamedTuple):
    """Names of the tensors, and what this project and PyTorch (see `plain_form`) make of a site and them."""

    tensors: str
    own: Callable[..., Any]
    plain: Callable[..., Any]
    ways: tuple[str, ...] = ("forward",)
    in_table: bool = False  # may the table of tiles give it to the library?


def _sum(site: Site, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    """As a residual branch sums, which may take the library."""
    scale, scale_conv = sum_scales(T)
    if not (site.saves and serves(x)):
        return kernels.conv_sum(x, w, residual, T, site.clip)
    return convolve(x, w, aux=residual, scale=scale_conv, scale_aux=scale, clip=site.clip, training=True)[0]


def _plain_conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=w.shape[2] // 2)


def _plain_silu(site: Site, x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    u = _plain_conv(x, w)
    v = baseline.mp_silu(u * m[:, :, None, None])
    return (v, u) if site.saves else (v,)


def _plain_sum(site: Site, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    y = baseline.mp_sum(residual, _plain_conv(x, w), T)
    return y if site.clip is None else y.clip(-site.clip, site.clip)


def _plain_cat_sum(site: Site, x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor) -> Tensor:
    return _plain_sum(site, x, w, _plain_conv(baseline.mp_cat(a, b, CAT_T), w_skip))


def _plain_silu_grad(site: Site, g: Tensor, w: Tensor, u: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    m = m[:, :, None, None]
    dt = _silu_derivative(plain_input_gradient(g, w), u * m)
    return dt * m, (dt * u).sum((2, 3))


def _plain_residual_silu_grad(site: Site, g: Tensor, w: Tensor, x: Tensor, aux: Tensor) -> Tensor:
    return _silu_derivative(plain_input_gradient(g, w), x) + aux


def _silu_derivative(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(g, x) / 0.596


def _plain_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    y = baseline.normalize(x, [1])
    return y, baseline.mp_silu(y)


def _plain_branch(site: Site, main: Tensor, s: Tensor, w0: Tensor, m: Tensor, w1: Tensor) -> Tensor:
    return _plain_sum(site, _plain_silu(site, s, w0, m)[0], w1, main)


def _plain_silu_up(site: Site, x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    return _plain_silu(site, baseline.resample(x, (1, 1), "up"), w, m)


def _plain_branch_up(site: Site, x: Tensor, w0: Tensor, m: Tensor, w1: Tensor) -> Tensor:
    x = baseline.resample(x, (1, 1), "up")
    return _plain_branch(site, x, baseline.mp_silu(x), w0, m, w1)


def _plain_branch_cat(site: Site, a: Tensor, b: Tensor, w0: Tensor, m: Tensor, w1: Tensor, w_skip: Tensor) -> Tensor:
    x = baseline.mp_cat(a, b, CAT_T)
    return _plain_branch(site, _plain_conv(x, w_skip), baseline.mp_silu(x), w0, m, w1)


BOTH = ("forward", "backward")
FUSIONS = {
    "conv_silu": Fusion(
        "x w m",
        lambda site, x, w, m: torch.ops.edm2.conv_silu(x, w, None, m, site.saves)[: 1 + site.saves],
        _plain_silu,
        in_table=True,
    ),
    "conv_silu_up": Fusion(
        "x w m", lambda site, x, w, m: torch.ops.edm2.conv_silu_up(x, w, None, m, site.saves)[: 1 + site.saves], _plain_silu_up
    ),
    "conv_sum": Fusion("x w residual", _sum, _plain_sum, in_table=True),
    "conv1x1_sum": Fusion("x w residual", lambda site, x, w, r: kernels.conv_sum(x, w, r, T, site.clip), _plain_sum),
    "conv_cat_sum": Fusion(
        "x w a b w_skip",
        lambda site, x, w, a, b, w_skip: kernels.conv_cat_sum(x, w, a, b, w_skip, site.clip),
        _plain_cat_sum,
    ),
    "silu_grad": Fusion(
        "g w u m",
        lambda site, g, w, u, m: convolve(g, w, "silu_grad", transposed=True, aux=u, m=m, training=True),
        _plain_silu_grad,
        ("dgrad",),
        in_table=True,
    ),
    "residual_silu_grad": Fusion(
        "g w x aux",
        lambda site, g, w, x, aux: convolve(
            g, w, "residual_silu_grad", transposed=True, act=x, aux=aux, scale_aux=1.0, training=True
        )[0],
        _plain_residual_silu_grad,
        ("dgrad",),
        in_table=True,
    ),
    "residual_branch_norm": Fusion(
        "x w0 m w1",
        lambda site, x, w0, m, w1: kernels.residual_branch_norm(x, w0, m, w1, T, site.clip),
        lambda site, x, w0, m, w1: _plain_branch(site, *_plain_norm_silu(x), w0, m, w1),
        BOTH,
    ),
    "residual_branch_silu": Fusion(
        "x w0 m w1",
        lambda site, x, w0, m, w1: kernels.residual_branch_silu(x, w0, m, w1, T, site.clip),
        lambda site, x, w0, m, w1: _plain_branch(site, x, baseline.mp_silu(x), w0, m, w1),
        BOTH,
    ),
    "residual_branch_up": Fusion(
        "x w0 m w1",
        lambda site, x, w0, m, w1: kernels.residual_branch_up(x, w0, m, w1, T, site.clip),
        _plain_branch_up,
        BOTH,
    ),
    "residual_branch_cat": Fusion(
        "a b w0 m w1 w_skip",
        lambda site, a, b, w0, m, w1, w_skip: kernels.residual_branch_cat(a, b, w0, m, w1, w_skip, CAT_T, site.clip),
        _plain_branch_cat,
        BOTH,
    ),
}  # fmt: skip


def fused_cases(preset: str, n: int, saves: bool) -> Iterator[Case]:
    """Every fusion at every site of a preset, the most arithmetic first; without `saves` forwards only."""
    cases = [
        fused_case(op, way, site._replace(n=n, saves=saves))
        for op, site in sites(preset)
        for way in FUSIONS[op].ways
        if saves or way == "forward"
    ]
    yield from sorted(cases, key=lambda case: -case.flops * case.facts["count"])


@lru_cache
def sites(preset: str) -> tuple[tuple[str, Site], ...]:
    """What an evaluation of one image has where; with the clip where a shape has it."""
    found: dict[tuple[str, Site], Site] = {}
    for op, site in chain.from_iterable(_fusions_of(*call) for call in _block_calls(preset)):
        key = op, site._replace(clip=None)
        known = found.get(key, site._replace(count=0))
        found[key] = site._replace(count=known.count + 1, clip=site.clip or known.clip)
    return tuple((op, site) for (op, _), site in found.items())


def _block_calls(preset: str) -> list[tuple[Any, str, tuple[int, ...]]]:
    """Each block, its name, and the channels of its sources if it joins two."""
    calls = []
    with fake_network(preset) as net, torch.no_grad():
        names = {block: name for name, block in net.unet.named_modules()}
        for block in net.unet.blocks():
            block.register_forward_pre_hook(lambda block, args: calls.append((block, names[block], _sources(*args[:3]))))
        inputs = inputs_for(net, 1)
        net.eval()(inputs["images"], inputs["sigma"], inputs["labels"])
    return calls


def _sources(x: Tensor, m: Tensor, skip: Tensor | None = None) -> tuple[int, ...]:
    return () if skip is None else (x.shape[3], skip.shape[3])


def _fusions_of(block: Any, name: str, sources: tuple[int, ...]) -> Iterator[tuple[str, Site]]:
    cout, cin = block.conv_res0.weight.shape[:2]
    site = Site(1, int(name.split(".")[1].split("x")[0]), cin, cout, clip=None if block.heads else block.clip_act)
    inner, joined = site._replace(cin=cout), site._replace(sources=sources)
    if block.conv_res0.up:
        site = site._replace(up=True)
        yield from (("conv_silu_up", site), ("silu_grad", inner), ("conv_sum", inner), ("residual_branch_up", site))
        return
    yield "conv_silu", site
    yield "silu_grad", inner
    if sources:
        yield "conv_cat_sum", joined._replace(cin=cout)
        yield "residual_branch_cat", joined
    else:
        yield "conv_sum", inner
        yield "residual_branch_silu" if block.flavor == "dec" else "residual_branch_norm", site
    if block.flavor == "dec" and not sources:
        yield "residual_silu_grad", site
    if block.heads:
        yield "conv1x1_sum", inner._replace(k=1, clip=block.clip_act)


def fused_case(op: str, way: str, site: Site, needs_gpu: bool = True) -> Case:
    """`way`: forward, dgrad (of a derivative that no op has alone), or the backward of a branch from a given gradient."""
    fusion = FUSIONS[op]
    names, differentiable = fusion.tensors.split(), "backward" in fusion.ways and site.saves

    def build(device: torch.device) -> Candidates:
        generator = torch.Generator(device).manual_seed(0)

        def randn(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float16)

        given = [randn(site.shape(name)) for name in names]
        values = [x / (x.shape[0] * x.shape[2]) ** 0.5 if name[0] == "w" else x for name, x in zip(names, given)]
        sources = [_prepared(site, names, *pair) for pair in zip(names, values)]
        own = [_own_input(name, x, differentiable) for name, x in zip(names, sources)]
        plain = [_plain_input(*pair).detach().requires_grad_(differentiable) for pair in zip(names, values)]
        compiled = compile_for(device, fusion.plain)
        runs = {"eager": (fusion.plain, plain), compile_name(device): (compiled, plain), "edm2": (fusion.own, own)}
        if way == "dgrad" and not serves(values[0]):
            del runs["edm2"]  # it has kernels only
        candidates = {name: partial(_outputs, name == "edm2", function, site, tensors) for name, (function, tensors) in runs.items()}
        if way == "backward":
            g = randn(site.shape("residual"))
            backwards = {name: _backward(run, names, runs[name][1], g, name == "edm2") for name, run in candidates.items()}
            return {name: _comparable(site, run, names) for name, run in backwards.items()}
        if fusion.in_table and site.saves and serves(values[0]):
            candidates[LIBRARY] = by_library(candidates["edm2"])
        return candidates

    flops, moved = _traffic(build)
    facts: dict[str, Any] = {"op": op, **site._asdict(), "parts": parts(way, site, "branch" in op)}
    if fusion.in_table and site.saves:
        facts["row"] = row(way, site.k, site.res, site.cin, site.cout)
    return Case(fused_name(op, way, site), build, flops, moved, 0, facts, TOLERANCE, needs_gpu, compiles=True, dtype="float16")


def fused_name(op: str, way: str, site: Site) -> str:
    return f"kernels/{op}/{way}/{site.label}"


def parts(way: str, site: Site, branch: bool) -> list[str]:
    """Names of the cases of the plain convolutions in it."""
    ways = ("dgrad", "wgrad") if way == "backward" else (way,)
    within = [(site.cin, site.cout, site.k)]
    within += [(site.cout, site.cout, site.k)] if branch else []
    within += [(sum(site.sources), site.cout, 1)] if site.sources else []
    return [conv_name(each, site.n, site.res, *conv) for conv in within for each in ways]


def _prepared(site: Site, names: list[str], name: str, x: Tensor) -> Tensor:
    """A tensor as an op wants it: a weight with what is folded into it."""
    if site.up and name in ("w", "w0"):
        return reference.up_weight(x.float()).to(x.dtype)
    if "w_skip" in names:
        last, skip = joined_factors(*site.sources, CAT_T, T)
        factors = {"w": last, "w1": last, "w_skip": skip}.get(name, NO_FACTORS)
        return x if factors == NO_FACTORS else (x * factors.columns(x[0])).to(x.dtype)
    return x


def _comparable(site: Site, run: Callable[[], list[Tensor]], names: list[str]) -> Callable[[], list[Tensor]]:
    """The gradients of sums of taps, and of weights with factors in them, compare with none."""
    folded = ("w0",) * site.up + ("w1", "w_skip") * ("w_skip" in names)
    return lambda: [dx for name, dx in zip(names, run()) if name not in folded]


def _own_input(name: str, x: Tensor, differentiable: bool) -> Tensor | PreparedWeight:
    """A weight's gradient goes to an fp32 leaf, as in training."""
    if name[0] != "w" or not differentiable:
        return x.detach().requires_grad_(differentiable)
    master = x.new_zeros(1, dtype=torch.float32).expand(x.shape)
    return PreparedWeight(x, master.detach().requires_grad_())


def _plain_input(name: str, x: Tensor) -> Tensor:
    return plain_weight(x) if name[0] == "w" else plain_form(x) if x.ndim == 4 else x


def _outputs(is_own: bool, function: Callable, site: Site, tensors: list) -> list[Tensor]:
    """In this project's form."""
    found = function(site, *tensors)
    found = found if isinstance(found, tuple) else (found,)
    return list(found) if is_own else [own_form(y) if y.ndim == 4 else y for y in found]


def _backward(run: Callable[[], list[Tensor]], names: list[str], tensors: list, g: Tensor, is_own: bool) -> Callable[[], list[Tensor]]:
    leaves = [x.master if isinstance(x, PreparedWeight) else x for x in tensors]
    backward = backward_of(run, leaves, [g])

    def in_own_form() -> list[Tensor]:
        found = zip(names, backward())
        return [dx if is_own or name == "m" else own_weight(dx) if name[0] == "w" else own_form(dx) for name, dx in found]

    return in_own_form


def _traffic(build: Callable[[torch.device], Candidates]) -> tuple[int, int]:
    """FLOPs and bytes of the launches."""
    launches: list[Launch] = []
    with FakeTensorMode(), OnGPU(launches.append):
        run = build(torch.device("cpu"))["edm2"]
        run()  # with the forward of a backward
        launches.clear()
        run()
    return sum(x.flops for x in launches), sum(x.bytes for x in launches)
