"""The backend around the loss: optimizer, adapters, checkpoints, and what happens to numbers that are none."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_disk import largest_file
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from canter.config import Config
from canter.errors import CheckpointError, ConfigError, TrainingDiverged
from canter.trainer.checkpoint import Checkpoints
from canter.trainer.model import accepts_tree_mask, load, prepare
from canter.trainer.rows import plain_row
from canter.trainer.torch_backend import TorchBackend
from canter.types import Sample
from tiny_policy import PlainLoop, gradients, make_group, norm, tiny_config, tiny_llama

SAMPLES = [*make_group(0), *make_group(1, group="h")]


def make_backend(*overrides: str, model: Any = None, **options: Any) -> TorchBackend:
    config = tiny_config("trainer.lr=0.01", *overrides)
    return TorchBackend(prepare(model or tiny_llama(), config), config, **options)


def step(backend: TorchBackend, samples: Sequence[Sample] = SAMPLES) -> dict[str, float]:
    found = {**backend.forward_backward(samples, rollouts=len(samples)), **backend.optim_step()}
    backend.version += 1
    return found


def parameters(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in backend._policy.model.named_parameters()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_step_makes_good_tokens_likelier() -> None:
    backend = make_backend()
    before = backend.forward(SAMPLES)
    for _ in range(3):
        step(backend)
    gains = [
        sample.advantage * float((after - old)[sample.mask].mean())
        for sample, old, after in zip(SAMPLES, before, backend.forward(SAMPLES), strict=True)
    ]
    assert sum(gains) > 0.1


def test_adamw_clipping_and_warm_up_are_those_of_the_settings() -> None:
    settings = ("trainer.warmup_steps=4", "trainer.max_grad_norm=0.01", "trainer.weight_decay=0.1")
    model = tiny_llama()
    plain = copy.deepcopy(model)
    backend = make_backend(*settings, model=model)
    found = step(backend)
    assert found["lr"] == pytest.approx(0.01 / 4)

    PlainLoop(plain, tiny_config()).loss(SAMPLES, len(SAMPLES)).backward()
    assert found["grad_norm"] == pytest.approx(norm(gradients(plain)), rel=1e-5)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    decayed, kept = [[p for p in plain.parameters() if (p.ndim >= 2) is many] for many in (True, False)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=0.01 / 4, betas=(0.9, 0.99)).step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameters(backend)[name], parameter.detach(), rtol=1e-4, atol=2e-5)
    assert [step(backend)["lr"] for _ in range(4)] == pytest.approx([0.005, 0.0075, 0.01, 0.01])


def test_samples_without_advantage_are_skipped_and_change_nothing() -> None:
    flat = [replace(sample, advantage=0.0) for sample in SAMPLES[4:]]
    with_flat, without = make_backend(), make_backend()
    for backend, samples in ((with_flat, [*SAMPLES[:4], *flat]), (without, SAMPLES[:4])):
        backend.forward_backward(samples, rollouts=8)
        backend.optim_step()
    assert_equal(parameters(with_flat), parameters(without))
    metrics = with_flat.forward_backward(flat, rollouts=8)
    assert metrics["tokens_without_gradient"] == sum(sample.trained for sample in flat)
    assert metrics["loss"] == 0


def test_a_batch_without_gradient_still_moves_by_momentum() -> None:
    backend = make_backend()
    step(backend)
    before = parameters(backend)
    assert step(backend, [replace(sample, advantage=0.0) for sample in SAMPLES])["grad_norm"] == 0
    assert any(not torch.equal(before[name], now) for name, now in parameters(backend).items())


def test_bfloat16_autocast_is_close_and_keeps_float32_weights() -> None:
    exact, rough = make_backend(), make_backend("trainer.dtype=bfloat16")
    for a, b in zip(exact.forward(SAMPLES), rough.forward(SAMPLES), strict=True):
        np.testing.assert_allclose(a, b, atol=0.15)
        assert not np.array_equal(a, b)
    step(rough)
    assert {p.dtype for p in parameters(rough).values()} == {torch.float32}


@pytest.mark.parametrize("lora", ["0", "4"])
def test_restored_from_a_checkpoint_it_goes_on_bit_for_bit(tmp_path: Path, lora: str) -> None:
    first = make_backend(f"trainer.lora_rank={lora}")
    step(first)
    first.save(tmp_path)
    other = make_backend(f"trainer.lora_rank={lora}", model=tiny_llama())
    other.load(tmp_path)
    assert other.version == 1
    assert_equal(parameters(first), parameters(other))
    assert step(first) == step(other)
    assert_equal(parameters(first), parameters(other))


def test_a_full_checkpoint_is_a_model_folder(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "checkpoint"
    tiny_llama().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    folder.mkdir()
    config = tiny_config("trainer.lr=0.01")
    backend = TorchBackend(load(source, config, device=torch.device("cpu")), config)
    step(backend)
    backend.save(folder)
    assert (folder / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert_equal(parameters(backend), {name: p.detach() for name, p in loaded.named_parameters()})


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    make_backend().save(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        make_backend(model=tiny_llama(hidden_size=32)).load(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        make_backend("trainer.lora_rank=2").load(tmp_path)


def test_tied_weights_survive_a_checkpoint(tmp_path: Path) -> None:
    first = make_backend(model=tiny_llama(tie_word_embeddings=True))
    step(first)
    first.save(tmp_path)
    other = make_backend(model=tiny_llama(seed=3, tie_word_embeddings=True))
    other.load(tmp_path)
    assert_equal(parameters(first), parameters(other))
    model = other._policy.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_publish_hands_over_the_weights_and_the_version() -> None:
    got: list[tuple[nn.Module, int]] = []
    backend = make_backend(sync=lambda module, version: got.append((module, version)))
    step(backend)
    backend.publish()
    assert got == [(backend._policy.model, 1)]


def test_adapters_alone_are_trained_and_their_kl_is_against_the_model_without_them() -> None:
    backend = make_backend("trainer.lora_rank=4", "trainer.kl=0.1")
    first = step(backend)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    changed = parameters(make_backend("trainer.lora_rank=4"))
    moved = {name for name, now in parameters(backend).items() if not torch.equal(now, changed[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert step(backend)["kl"] > 1e-4


def test_the_kl_of_full_training_is_against_the_initial_policy() -> None:
    model = tiny_llama()
    initial = copy.deepcopy(model)
    backend = make_backend("trainer.kl=0.1", model=model)
    step(backend)
    found = backend.forward_backward(SAMPLES, rollouts=8)
    plain = PlainLoop(copy.deepcopy(model), tiny_config("trainer.kl=0.1"), initial)
    assert found["loss"] == pytest.approx(plain.loss(SAMPLES, 8).item(), rel=1e-5)
    assert found["kl"] > 1e-4


def test_a_loss_that_is_no_number_names_its_sample_and_token() -> None:
    backend = make_backend("trainer.token_budget=64")
    bad = replace(SAMPLES[5], logprobs=np.where(SAMPLES[5].mask, np.float32(-3e38), np.float32(0)), advantage=-1e38)
    bad = replace(bad, weight=10.0)
    with pytest.raises(TrainingDiverged, match=r"the loss at token \d+ of sample 0 of rollout h-1 is (nan|-?inf)"):
        backend.forward_backward([*SAMPLES[:5], bad], rollouts=6)


def test_an_advantage_that_is_no_number_names_its_sample() -> None:
    with pytest.raises(TrainingDiverged, match="sample 0 of rollout g-2 has advantage nan"):
        make_backend().forward_backward([*SAMPLES[:2], replace(SAMPLES[2], advantage=float("nan"))], rollouts=3)


def test_a_gradient_that_is_no_number_stops_before_the_optimizer() -> None:
    backend = make_backend("trainer.share_prefix=false")
    weight = backend._policy.model.model.layers[0].mlp.down_proj.weight
    trigger = plain_row([SAMPLES[6]], 0)

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if poisoned["on"] else gradient

    poisoned = {"on": False}
    weight.register_hook(poison)
    backend._policy.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: poisoned.update(
            on=any(trigger.ids.tolist() == row[: len(trigger)] for row in kwargs["input_ids"].tolist())
        ),
        with_kwargs=True,
    )
    before = parameters(backend)
    backend.forward_backward(SAMPLES, rollouts=8)
    with pytest.raises(TrainingDiverged, match=r"gradient norm of version 1 is (nan|inf): sample 0 of rollout h-2"):
        backend.optim_step()
    assert_equal(before, parameters(backend))


@pytest.mark.parametrize("size", [5_000, 40_000])  # too small for the weights; for the optimizer
def test_a_failed_write_is_a_checkpoint_error(tmp_path: Path, size: int) -> None:
    backend = make_backend()
    step(backend)
    with largest_file(size), pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1 in"):
        Checkpoints(tmp_path, keep=1).save(1, {}, backend.save)
    assert list(tmp_path.iterdir()) == []


def tiny_mistral(**settings: Any) -> MistralForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return MistralForCausalLM(MistralConfig(**{**sizes, **heads, **settings}, attn_implementation="sdpa")).eval()


def test_windowed_attention_is_not_shared_and_gives_the_same_loss() -> None:
    windowed = tiny_mistral(sliding_window=8)
    assert not accepts_tree_mask(windowed)
    assert accepts_tree_mask(tiny_mistral(sliding_window=None))
    assert accepts_tree_mask(tiny_llama())
    plain = copy.deepcopy(windowed)
    found = make_backend(model=windowed).forward_backward(SAMPLES, rollouts=8)
    assert found["loss"] == pytest.approx(PlainLoop(plain, tiny_config()).loss(SAMPLES, 8).item(), rel=1e-5)


def test_a_model_that_ignores_the_mask_is_found_out() -> None:
    model = tiny_llama()
    forward = model.model.forward

    def deaf(**kwargs: Any) -> Any:
        return forward(**{**kwargs, "attention_mask": None})

    model.model.forward = deaf
    assert not accepts_tree_mask(model)


def test_a_model_that_scales_its_logits_is_refused() -> None:
    model = tiny_llama()
    head = model.lm_head.forward
    model.lm_head.forward = head
    original = model.forward
    model.forward = lambda **kwargs: _scaled(original(**kwargs))
    with pytest.raises(ConfigError, match="changes its logits after the output layer"):
        prepare(model, tiny_config())


def _scaled(output: Any) -> Any:
    output.logits = output.logits / 2
    return output


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        load(tmp_path, tiny_config(), device=torch.device("cpu"))


def test_dropout_is_off(tmp_path: Path) -> None:
    tiny_llama(attention_dropout=0.5).save_pretrained(tmp_path)
    config: Config = tiny_config("trainer.gradient_checkpointing=true")
    backend = TorchBackend(load(tmp_path, config, device=torch.device("cpu")), config)
    assert backend.forward_backward(SAMPLES, rollouts=8) == backend.forward_backward(SAMPLES, rollouts=8)
