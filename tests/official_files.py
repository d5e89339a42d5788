"""Writes networks as the official release does, as far as a reader can tell."""

import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import edm2
from edm2.latents import LatentEncoder

TEXT = "raise RuntimeError('this source text must never be executed')"


def _reconstruct_persistent_obj(meta: dict[str, Any]) -> None:
    raise RuntimeError("a pickle was executed")


_reconstruct_persistent_obj.__module__ = "torch_utils.persistence"
EasyDict = type("EasyDict", (dict,), {"__module__": "dnnlib.util"})


class Persistent:
    """An object that carries its program text."""

    def __init__(self, class_name: str, state: dict[str, Any]):
        self.meta = {"type": "class", "version": 6, "module_src": TEXT, "class_name": class_name, "state": state}

    def __reduce__(self):
        return _reconstruct_persistent_obj, (self.meta,)


def write_official(path: Path, net: edm2.Precond, protocol: int = 4, vae: str | None = None) -> None:
    """In half precision, of pixels, or of latents of the VAE of this name."""
    encoder = Persistent("StandardRGBEncoder", {})
    if vae is not None:
        statistics = (x.numpy().reshape(1, -1, 1, 1) for x in (LatentEncoder().scale, LatentEncoder().bias))
        encoder = Persistent("StabilityVAEEncoder", dict(zip(("scale", "bias"), statistics), vae_name=vae))
    data = EasyDict(ema=_module(net, dict(net.config)), encoder=encoder, dataset_kwargs=EasyDict())
    parts = {"torch_utils.persistence": _reconstruct_persistent_obj, "dnnlib.util": EasyDict}
    modules = {name: ModuleType(name) for full in parts for name in (full.split(".")[0], full)}
    for name, part in parts.items():
        setattr(modules[name], part.__name__, part)
    before = sys.modules.copy()
    sys.modules.update(modules)
    try:
        with open(path, "wb") as file:
            pickle.dump(data, file, protocol=protocol)
    finally:
        for name in modules.keys() - before.keys():
            del sys.modules[name]


def _module(module: nn.Module, arguments: dict[str, Any] | None = None) -> Any:
    state = {
        "training": False,
        "_parameters": {name: nn.Parameter(p.detach().half(), requires_grad=False) for name, p in module._parameters.items()},
        "_buffers": {name: x.half() for name, x in module._buffers.items() if isinstance(x, torch.Tensor)},
        "_modules": OrderedDict((name, _module(child)) for name, child in module.named_children()),
        "_init_args": (),
        "_init_kwargs": EasyDict(arguments or {}),
    }
    if not isinstance(module, nn.ModuleDict):
        return Persistent(type(module).__name__, state)
    plain = nn.ModuleDict()
    plain.__dict__ = state
    return plain
