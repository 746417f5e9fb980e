"""A whole run in small: a random llama with a byte tokenizer, a harness of two calls, a grader, a TOML file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

HARNESS = """
import json, os, time, urllib.request


def ask(messages):
    body = json.dumps({"model": os.environ["CANTER_MODEL"], "messages": messages, "max_tokens": 8}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=body,
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
    )
    for patience in range(240):
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                answer = json.load(reply)
        except (OSError, ValueError):
            time.sleep(0.25)
            continue
        with open(os.environ["RECEIVED"], "a") as received:
            received.write(answer["id"] + "\\n")
        return answer["choices"][0]["message"]
    raise SystemExit("no answer")


def run(task):
    messages = [{"role": "user", "content": task["prompt"]}]
    for turn in range(2):
        message = ask(messages)
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": f"more {turn}"}]
    print(len(messages))


def linger(task):
    ask([{"role": "user", "content": task["prompt"]}])
    while not os.path.exists(os.environ["RECEIVED"] + ".go"):
        time.sleep(0.05)
    run(task)
"""

GRADER = """
def grade(grading):
    return float(len(grading.answer or "") % 5) / 4
"""


def write_model(folder: Path, seed: int = 0) -> Path:
    """A model folder: 2 layers, 32 wide, bytes as tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_run(folder: Path, *, engine: str = "fake", steps: int = 3, model: str = "model", **settings: object) -> Path:
    """The TOML file of a run in `folder`, with everything it names."""
    if model == "model":
        write_model(folder / "model")
    (folder / "tiny_harness.py").write_text(HARNESS)
    (folder / "tiny_grader.py").write_text(GRADER)
    rows = [{"id": f"t{i}", "prompt": f"say {i}", "input": {}, "hidden": {"answer": str(i)}} for i in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "run.toml"
    file.write_text(
        f"""
[model]
path = {json.dumps(model)}
[tasks]
train = "train.jsonl"
[harness]
function = "tiny_harness:run"
timeout_s = 120
env = {{ RECEIVED = {json.dumps(str(folder / "received.txt"))} }}
[grader]
function = "tiny_grader:grade"
[sampling]
max_tokens = 12
[engine]
use = "{engine}"
max_batch = 16
cache_tokens = 8192
journal = true
[trainer]
groups = 2
rollouts_per_group = 3
steps = {steps}
lr = 1e-3
checkpoint_every = 2
[run]
dir = {json.dumps(str(folder / "runs"))}
name = "tiny"
threads = 1
"""
    )
    return file
