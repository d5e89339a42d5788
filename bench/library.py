"""What a copy, cuBLAS and SDPA reach: the ceilings that kernels are measured against."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench.case import Candidates, Case


def ceiling_cases() -> Iterator[Case]:
    """What the machine reaches at best, in bytes and in arithmetic."""
    yield copy_case()
    yield gemm_case(8192, 8192, 8192, "square")


def sdpa_cases(batches: tuple[int, ...] = (256, 8)) -> Iterator[Case]:
    """Attention at the shapes of EDM2-S, without its normalisation."""
    for batch in batches:
        yield from (attention_case(batch, tokens, heads) for tokens, heads in ((256, 9), (64, 12)))


def copy_case(elements: int = 2**29, needs_gpu: bool = True) -> Case:
    def build(device: torch.device) -> Candidates:
        x = torch.randn(elements, dtype=torch.float16, device=device)
        y = torch.empty_like(x)
        return {"copy": lambda: y.copy_(x)}

    return Case("kernels/copy", build, bytes=4 * elements, tolerance=0.0, needs_gpu=needs_gpu, dtype="float16")


def gemm_case(m: int, n: int, k: int, label: str, needs_gpu: bool = True) -> Case:
    def build(device: torch.device) -> Candidates:
        a, b = (torch.randn(*shape, dtype=torch.float16, device=device) for shape in ((m, k), (n, k)))
        return {"cuBLAS": lambda: a @ b.T}

    facts = {"m": m, "n": n, "k": k}
    traffic = 2.0 * (m * k + n * k + m * n)
    return Case(f"kernels/gemm/{label}", build, 2.0 * m * n * k, traffic, facts=facts, needs_gpu=needs_gpu, dtype="float16")


def attention_case(n: int, tokens: int, heads: int, width: int = 64) -> Case:
    def build(device: torch.device) -> Candidates:
        q, k, v = torch.randn(3, n, heads, tokens, width, dtype=torch.float16, device=device)
        return {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v)}

    facts = dict(n=n, tokens=tokens, heads=heads, width=width)
    traffic = 8.0 * n * heads * tokens * width
    return Case(f"kernels/attention/n{n}-{tokens}x{heads}", build, 4.0 * n * heads * tokens**2 * width, traffic, n, facts, dtype="float16")
