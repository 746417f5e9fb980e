"""Prompts for a model whose template takes no second system message, short and long."""

from __future__ import annotations

import pytest
from gateway_rig import TEMPLATE, TOKENIZER

from canter.errors import TemplateError
from canter.gateway.attempts import Conversation
from canter.gateway.auth import AttemptRef
from canter.gateway.delta import Recent
from canter.gateway.dialects.canonical import Asked, Chat
from canter.gateway.labels import MAIN
from canter.gateway.prompts import Prompts
from canter.tokens.messages import Message
from canter.tokens.rendering import make_rendering
from canter.tokens.tokenizer import ChatTokenizer
from canter.tokens.tree import Tree
from canter.types import Split

STRICT = ChatTokenizer(
    TOKENIZER.backend,
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}"
    "{% endif %}{% endfor %}" + TEMPLATE,
    named_tokens=TOKENIZER.named_tokens,
)
CONTEXT_TOKENS = 1000


@pytest.mark.parametrize("text", ["Hi.", "many words " * 20_000], ids=["short", "far beyond the context"])
async def test_system_messages_that_the_template_refuses_are_settled(text):
    messages = (Message("system", "Work."), Message("user", text), Message("system", "Be quick."))
    with pytest.raises(TemplateError):
        STRICT.apply_chat_template(messages)
    prompts = Prompts(STRICT)
    tree = Tree(make_rendering(STRICT, "template"))
    conversation = Conversation(AttemptRef("r1", 1), 0, Split.TRAIN, Recent(), tree=tree)
    asked = Asked("chat", "policy", Chat(messages))
    try:
        prompt = await prompts.make(asked, conversation, len(text), CONTEXT_TOKENS, MAIN)
    finally:
        prompts.close()
    assert STRICT.decode(prompt.ids).endswith(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>user\nBe quick.<|im_end|>\n<|im_start|>assistant\n"
    )
