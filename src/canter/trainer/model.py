"""The policy network: a causal language model of transformers, taken apart where the trainer needs it.

The trainer asks for hidden states and applies the head itself, to trained positions only and in pieces, because logits
of all positions would not fit in memory (a vocabulary is 50 to 250 thousand wide).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from canter.config import Config
from canter.errors import ConfigError
from canter.trainer.prefix import tree_mask

TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")

LORA_TARGETS = "all-linear"
PROBE_TOLERANCE = 1e-3
"""Largest difference of logits, relative to their size, at which two ways to compute them count as the same."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model and its parts; with LoRA, `adapted` is the peft model around it.

    model    the transformers model (with adapters in its layers under LoRA)
    decoder  everything before the head: ids → hidden states [B, T, D]
    head     hidden states → logits [.., V]
    shares_prefix  whether it takes a 4D attention mask and computes what the mask says (`accepts_tree_mask`)
    folder   where it was loaded from, None for a model made in memory
    """

    model: Any
    decoder: nn.Module
    head: nn.Module
    width: int
    vocabulary: int
    shares_prefix: bool
    adapted: Any = None
    folder: Path | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The initial policy, under LoRA."""
        with self.adapted.disable_adapter():
            yield

    def save(self, folder: Path) -> None:
        """Writes the trained weights as safetensors: a model folder with its tokenizer, or peft's adapter under
        LoRA."""
        if self.adapted is not None:
            self.adapted.save_pretrained(folder, save_embedding_layers=False)
            return
        self.model.save_pretrained(folder, max_shard_size="1000GB")
        for path in sorted(self.folder.iterdir()) if self.folder is not None else ():
            if path.is_file() and path.suffix in TOKENIZER_SUFFIXES and not (folder / path.name).exists():
                shutil.copy(path, folder)

    def restore(self, folder: Path) -> None:
        """Reads what `save` wrote. Raises RuntimeError or OSError where it is not of this model."""
        if self.adapted is None:
            safetensors.torch.load_model(self.model, folder / "model.safetensors", device=str(self.device))
            return
        import peft

        weights = safetensors.torch.load_file(folder / "adapter_model.safetensors", device=str(self.device))
        missing = peft.set_peft_model_state_dict(self.adapted, weights)
        if missing.unexpected_keys:
            raise RuntimeError(f"the adapter has weights that this model lacks: {missing.unexpected_keys[:3]}")


def hidden_states(decoder: nn.Module, ids_BT: Tensor, positions_BT: Tensor, branches_BT: Tensor | None) -> Tensor:
    """Last hidden states [B, T, D]. Rows are padded on the right; `branches_BT` is None for plain rows, where causality
    alone keeps tokens from the padding and no mask is made."""
    if branches_BT is None:
        output = decoder(input_ids=ids_BT, use_cache=False)
    else:
        mask = tree_mask(branches_BT)
        output = decoder(input_ids=ids_BT, position_ids=positions_BT, attention_mask=mask, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def load(folder: Path, config: Config, *, device: torch.device) -> Policy:
    """The model in `folder` with float32 weights, set up as `config.trainer` says. Raises ConfigError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    quiet = {name: 0.0 for name in settings.to_dict() if name.endswith(("dropout", "_pdrop"))}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa", **quiet
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot load a causal language model from {folder}: {error}") from error
    return prepare(model.to(device), config, folder=folder)


def prepare(model: Any, config: Config, *, folder: Path | None = None) -> Policy:
    """Checks a transformers model, adds adapters and gradient checkpointing as `config.trainer` says. Raises
    ConfigError for a model whose logits are not `head(hidden)`."""
    settings = config.trainer
    check_head(model)
    shares = accepts_tree_mask(model)
    model.eval()
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers recomputes in training mode only; dropout is 0 (`load`)
    adapted = adapters(model, config) if settings.lora_rank else None
    return Policy(
        model=model,
        decoder=model.get_decoder(),
        head=model.get_output_embeddings(),
        width=int(model.config.hidden_size),
        vocabulary=int(model.get_output_embeddings().weight.shape[0]),
        shares_prefix=shares,
        adapted=adapted,
        folder=folder,
    )


def adapters(model: Any, config: Config) -> Any:
    """The peft model around `model`, whose linear layers but the head get adapters; these alone are trained. Their
    initial values come from `run.seed`."""
    import peft

    settings = config.trainer
    lora = peft.LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=LORA_TARGETS)
    torch.manual_seed(config.run.seed)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft asks transformers by an old name
        adapted = peft.get_peft_model(model, lora)
    if settings.gradient_checkpointing:
        model.enable_input_require_grads()
    return adapted


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raises ConfigError where logits are more than the head of the last hidden state (soft-capped or scaled, say)."""
    ids = _probe_ids(model)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    found = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
    if not _same(found, expected):
        raise ConfigError(
            f"model.path: {type(model).__name__} changes its logits after the output layer, which the torch trainer "
            "does not do; use a model without logit scaling or soft-capping"
        )


@torch.no_grad()
def accepts_tree_mask(model: Any) -> bool:
    """Tries it: two branches behind a shared prefix, in one row and as plain rows, must give the same hidden states.

    Models with windowed attention are ruled out by their configuration, because a window shows only in longer rows.
    """
    settings = model.config.to_dict()
    kinds = set(settings.get("layer_types") or ["full_attention"])
    windowed = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    if kinds != {"full_attention"} or (windowed and not settings.get("layer_types")):
        return False
    decoder, ids = model.get_decoder(), _probe_ids(model)[None]
    no_positions = torch.zeros_like(ids)
    one = hidden_states(decoder, ids[:, :7], no_positions, None)
    two = hidden_states(decoder, torch.cat([ids[:, :4], ids[:, 7:]], dim=1), no_positions, None)
    branches = torch.tensor([[0] * 4 + [1] * 3 + [2] * 3], device=ids.device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]], device=ids.device)
    try:
        row = hidden_states(decoder, ids, positions, branches)
    except (ValueError, TypeError, RuntimeError):  # what models raise that cannot take such a mask
        return False
    return _same(row[:, :7], one) and _same(row[:, 7:], two[:, 4:])


def _probe_ids(model: Any) -> Tensor:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    return torch.arange(10, device=model.device) * 7919 % vocabulary


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= PROBE_TOLERANCE * b.abs().max().clamp(min=1e-6))
