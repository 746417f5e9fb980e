"""How few tokens a text can have: a bound that no text breaks, and none where text could vanish."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from canter.tokens.reach import Reach, reach_of
from canter.tokens.tokenizer import ChatTokenizer


def backend(*, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A byte-level BPE with merges, among them long runs of blanks."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["éé été äh Ωδ" + " " * 40, "the other thing there " * 20], trainer)
    made.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    return made


def chat(made: Tokenizer) -> ChatTokenizer:
    return ChatTokenizer(made, "{{ messages }}")


PLAIN = chat(backend())
COMPOSING = chat(backend(normalizer=normalizers.NFC()))
_HARD = st.sampled_from(
    [" " * 40, "the", "<|im_start|>", "\u212a", "\u03b9\u0308\u0301", "\u1fef", "e\u0301", "1", "\u3042"]
)
_TEXTS = st.lists(_HARD | st.text(max_size=8), max_size=30).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=_TEXTS)
@pytest.mark.parametrize("tokenizer", [PLAIN, COMPOSING], ids=["plain", "composing"])
def test_no_text_has_fewer_tokens(tokenizer: ChatTokenizer, text: str) -> None:
    reach = reach_of(tokenizer)
    assert reach is not None
    assert reach.fewest_tokens_of(text) <= len(tokenizer.encode_list(text))


def test_the_bound_counts_bytes_not_their_spelling() -> None:
    reach = reach_of(PLAIN)
    vocabulary = PLAIN.backend.get_vocab(with_added_tokens=False)
    longest = max(len(PLAIN.decode([i]).encode()) for i in vocabulary.values())
    assert reach == Reach(max(longest, len("<|im_start|>")), composes=False)
    assert reach.fewest_tokens_of("a" * 1000) == -(-1000 // reach.token_bytes)


def test_composition_is_allowed_for() -> None:
    assert reach_of(COMPOSING) == Reach(reach_of(PLAIN).token_bytes, composes=True)  # type: ignore[union-attr]
    decomposed = "\u03b9\u0308\u0301" * 1000
    assert len(unicodedata.normalize("NFC", decomposed).encode()) < len(decomposed.encode())


def test_there_is_no_bound_where_text_could_vanish() -> None:
    def changed(**parts: object) -> ChatTokenizer:
        made = backend()
        for name, part in parts.items():
            setattr(made, name, part)
        return chat(made)

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    stripping = backend()
    stripping.add_tokens([AddedToken("<mask>", lstrip=True)])
    truncating = backend()
    truncating.enable_truncation(10)
    for tokenizer in (
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), byte_level])),
        changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), byte_level])),
        changed(pre_tokenizer=None),
        changed(model=models.BPE(vocab={"a": 0, "b": 1}, merges=[])),
        changed(model=models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        chat(stripping),
        chat(truncating),
    ):
        assert reach_of(tokenizer) is None


def test_long_texts_are_encoded_as_short_ones() -> None:
    text = "the other thing été 123 <|im_start|> " * 3000
    assert PLAIN.encode_list(text) == PLAIN.backend.encode(text, add_special_tokens=False).ids
