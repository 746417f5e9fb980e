"""Copying the trainer's weights into the engine's model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from canter.errors import EngineError

BASE_LAYER = ".base_layer"
"""What peft puts into the name of a weight that it has wrapped."""


@torch.no_grad()
def copy_module(source: nn.Module, target: nn.Module) -> None:
    """Copies all weights of `source`, with its LoRA adapters merged into them, cast to `target`'s type. Raises
    EngineError, having copied nothing, where names or shapes differ."""
    _copy(dict(_merged(source)), target)


def copy_folder(folder: Path, target: nn.Module) -> None:
    """Copies the weights of a folder of safetensors. Raises EngineError."""
    import safetensors.torch

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no *.safetensors to load weights from")
    _copy({name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}, target)


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: nn.Module) -> None:
    names: dict[nn.Parameter, list[str]] = {}  # more than one where weights are tied
    for name, parameter in target.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    if unknown := source.keys() - {name for group in names.values() for name in group}:
        raise EngineError(f"the new weights are not of this model: it has no {min(unknown)}")
    chosen = {parameter: _choose(source, group, parameter.shape) for parameter, group in names.items()}
    for parameter, tensor in chosen.items():
        parameter.copy_(tensor)


def _choose(source: dict[str, Tensor], names: list[str], shape: torch.Size) -> Tensor:
    """The new value of the weight that goes by these names."""
    given = [source[name] for name in names if name in source]
    if not given:
        raise EngineError(f"the new weights are not of this model: they have no {names[0]}")
    if given[0].shape != shape:
        found, wanted = tuple(given[0].shape), tuple(shape)
        raise EngineError(f"the new weights are not of this model: {names[0]} is {found} there and {wanted} here")
    if not all(tensor is given[0] or torch.equal(tensor, given[0]) for tensor in given[1:]):
        raise EngineError(f"the new weights differ in {' and '.join(names)}, which are one weight in this model")
    return given[0]


def _merged(source: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the weights as the model without adapters would have them."""
    deltas = dict(_lora_deltas(source)) if "peft" in sys.modules else {}
    adapters = tuple(f"{prefix}." for prefix in deltas)
    for name, parameter in source.named_parameters(remove_duplicate=False):
        layer, wrapped, rest = name.rpartition(BASE_LAYER)
        if wrapped:
            delta = deltas[layer]
            yield layer + rest, parameter + delta.to(parameter.dtype) if rest == ".weight" else parameter
        elif not name.startswith(adapters):
            yield name, parameter


def _lora_deltas(source: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the active adapters add to the weight of each layer that peft has wrapped."""
    from peft.tuners.lora import LoraLayer

    for name, module in source.named_modules():
        if isinstance(module, LoraLayer) and not module.merged:
            yield name, sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
