"""python experiments/clients/unpack_gguf.py FILE.gguf FOLDER

A GGUF checkpoint as a folder in the form that vLLM reads: fp32 safetensors, config and tokenizer.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: str, folder: str) -> None:
    file = Path(source)
    AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
