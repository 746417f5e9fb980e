import json
import subprocess
import sys

import numpy as np
import pytest
from token_worlds import BASH, CHATML, THINKING, byte_tokenizer, merging_tokenizer

from canter.errors import ConfigError, TemplateError
from canter.tokens.messages import Message, ToolCall
from canter.tokens.tokenizer import load_tokenizer

CHAT = [
    Message("system", "Be brief."),
    Message("user", "Hé <b>1 & 1</b>?\n"),
    Message("assistant", "", "hm", (ToolCall("call_1", "bash", '{"command": "echo é", "n": 1e3}'),)),
    Message("tool", "é\n", tool_call_id="call_1"),
]


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    return tmp_path


def test_a_folder_is_loaded_with_its_template_and_stop_tokens(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.token(258), tokenizer.eos_token_id, tokenizer.bos_token_id) == ("<|im_end|>", 258, 257)
    assert tokenizer.stop_token_ids == (258, 256)
    assert tokenizer.vocab_size == 259
    assert tokenizer.chat_template == CHATML


def test_templates_come_from_the_argument_then_the_jinja_file_then_the_settings(folder):
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template == "file"
    assert load_tokenizer(folder, chat_template="own").chat_template == "own"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(folder).chat_template == "b"


def test_a_folder_without_tokenizer_or_template_is_a_config_error(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(folder / "nowhere")


def test_special_tokens_in_the_text_are_recognised_and_nothing_is_added():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids.dtype == np.int32
    assert [tokenizer.token(int(i)) for i in ids] == ["<|im_start|>", "a", "<|im_end|>"]
    assert tokenizer.decode(ids) == "<|im_start|>a<|im_end|>"
    assert len(tokenizer.encode("")) == 0


def test_a_special_token_in_user_content_is_one_for_the_model_as_on_real_servers():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(tokenizer.apply_chat_template([Message("user", "x<|im_end|>")], add_generation_prompt=False))
    assert (ids == tokenizer.eos_token_id).sum() == 3  # default system, the user's own, the template's


def test_lone_surrogates_become_question_marks():
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize("template", [CHATML, THINKING, "{{ tools | tojson(indent=2) }}{{ bos_token }}"])
@pytest.mark.parametrize("prompt", [True, False])
def test_the_chat_reads_as_in_transformers(template, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = byte_tokenizer(template)
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hé <b>1 & 1</b>?\n"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "thinking": "hm",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call_1",
                    "function": {"name": "bash", "arguments": {"command": "echo é", "n": 1e3}},
                }
            ],
        },
        {"role": "tool", "content": "é\n", "tool_call_id": "call_1"},
    ]
    tool = {"name": BASH.name, "description": BASH.description, "parameters": dict(BASH.parameters)}
    wanted, _ = render_jinja_template(
        [plain],
        tools=[{"type": "function", "function": tool}],
        chat_template=template,
        add_generation_prompt=prompt,
        **tokenizer.named_tokens,
    )
    got = tokenizer.apply_chat_template(CHAT, [BASH], prompt)
    assert got == wanted[0]


def test_generation_blocks_loop_controls_and_dates_work():
    template = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
    template += "{% endgeneration %}{% endfor %} {{ strftime_now('%Y')[:2] }}"
    assert byte_tokenizer(template).apply_chat_template([Message("user", "a"), Message("user", "b")]) == "a 20"


def test_developer_messages_are_system_messages_for_templates_without_that_role():
    chat = [Message("developer", "d")]
    assert "<|im_start|>system\nd" in byte_tokenizer().apply_chat_template(chat)
    knows = "{% for m in messages %}{{ m.role }}{# developer #}{% endfor %}"
    assert byte_tokenizer(knows).apply_chat_template(chat) == "developer"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages[9].role + 1 }}", "{{ ''.__class__.__mro__ }}{{ 1/0 }}"]
)
def test_what_a_template_raises_is_a_template_error(template):
    with pytest.raises(TemplateError, match="cannot render these 1 messages"):
        byte_tokenizer(template).apply_chat_template([Message("user", "a")])


def test_a_template_that_does_not_compile_is_a_template_error():
    with pytest.raises(TemplateError, match="does not compile"):
        byte_tokenizer("{% for %}")


def test_merges_cross_lines_in_the_merging_tokenizer():
    tokenizer = merging_tokenizer()
    spans = [tokenizer.decode([i]) for i in tokenizer.encode_list("assistant\nword")]
    assert any("\n" in span and len(span) > 1 for span in spans)


def test_no_torch_or_transformers_is_imported():
    code = "import sys, canter.tokens.tree; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
