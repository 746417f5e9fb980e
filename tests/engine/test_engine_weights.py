import numpy as np
import peft
import pytest
import torch
from engine_model import small_llama

from canter.engine.weights import copy_module
from canter.errors import EngineError

IDS = torch.arange(3, 20)[None]


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.numpy()


@pytest.mark.parametrize("tied", [False, True])
def test_all_weights_are_copied(tied):
    source, target = (small_llama(seed, tie_word_embeddings=tied) for seed in (0, 1))
    copy_module(source, target)
    np.testing.assert_array_equal(logits(source), logits(target))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_are_merged_and_the_source_is_left_alone(tied):
    source, target = (small_llama(seed, tie_word_embeddings=tied) for seed in (0, 1))
    adapted = peft.get_peft_model(source, peft.LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    before = logits(source)
    copy_module(source, target)  # the adapted transformers model, without peft's wrapper
    np.testing.assert_allclose(logits(target), before, atol=1e-3)
    np.testing.assert_array_equal(logits(source), before)
    assert np.abs(before - logits(small_llama(0, tie_word_embeddings=tied))).max() > 0.1


def test_a_tied_model_may_learn_from_an_untied_one_only_if_it_loses_nothing():
    untied, tied = small_llama(0, tie_word_embeddings=False), small_llama(1, tie_word_embeddings=True)
    with pytest.raises(EngineError, match="lm_head"):
        copy_module(untied, tied)
