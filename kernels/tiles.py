"""Tile choices."""
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionTile:
    block_m: int
    block_n: int
    warps: int
    stages: int


def attention_forward(capability, tokens, block_d, itemsize):
    return AttentionTile(64, 64, 4, 2)


def attention_backward(capability, tokens, block_d, itemsize):
    return AttentionTile(64, 64, 4, 1) if tokens <= 64 else None


def attention_dq(capability, tokens, block_d, itemsize):
    return AttentionTile(64, 32, 4, 2)


def attention_dkv(capability, tokens, block_d, itemsize):
    return AttentionTile(64, 32, 4, 2)
