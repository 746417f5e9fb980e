"""`python -m canter.engine.convert GGUF FOLDER`: a GGUF as a folder of fp32 safetensors with its tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, folder: Path) -> None:
    """Writes `folder` (which exists). Weights are dequantised to float32."""
    where, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    # the weights are plain tensors by now, but a model that still says "quantised" refuses to be saved
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
