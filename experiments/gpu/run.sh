#!/bin/sh
# sh experiments/gpu/run.sh OUT [STAGE ...]
# What a machine with one NVIDIA GPU has to say: logs, JSON and a summary go to OUT. Stages, 9 minutes each at most:
#   tests kernels steps rounds-1b rounds-8b graphs compiled train decode; all of them, in this order, where none is named
# (decode needs what train left in OUT). DEVICE=cpu tries the commands out on small shapes. PYTHON is an interpreter
# that has the package's dependencies and pytest, STEPS the optimizer steps of each training, SECONDS_EACH the limit.
set -u
[ $# -ge 1 ] || { echo "usage: sh experiments/gpu/run.sh OUT [STAGE ...]" >&2; exit 2; }
mkdir -p "$1" || exit 2
OUT=$(cd "$1" && pwd)
shift
PYTHON=${PYTHON:-python}
case $PYTHON in */*) PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") ;; esac
DEVICE=${DEVICE:-cuda}
SECONDS_EACH=${SECONDS_EACH:-540}
cd "$(dirname "$0")/../.." || exit 2
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
FAILED=

case $DEVICE in
cuda)
    STEPS=${STEPS:-600}
    TRAINER="trainer=gpu target.dtype=bfloat16"
    DECODE="device=cuda limit=20"
    HALF="dtype=bfloat16"
    ;;
cpu)
    STEPS=${STEPS:-4}
    TRAINER="data.limit=48 data.val_limit=8"
    DECODE="limit=1 max_new_tokens=8"
    HALF="dtype=float32"
    ;;
*) echo "DEVICE=$DEVICE: use cuda or cpu" >&2 && exit 2 ;;
esac

run() {  # NAME COMMAND...: its output to OUT/NAME.log, the end of it to the terminal
    name=$1
    shift
    began=$(date +%s)
    left=$((UNTIL - began))
    code=124
    echo "== $name: $*"
    if [ "$left" -gt 0 ]; then
        timeout "$left" "$@" > "$OUT/$name.log" 2>&1
        code=$?
    else
        echo "no time is left in this stage" > "$OUT/$name.log"
    fi
    tr '\r' '\n' < "$OUT/$name.log" | tail -n 30
    [ "$code" = 0 ] || FAILED="$FAILED $name"
    echo "$name: exit $code after $(($(date +%s) - began)) s" | tee -a "$OUT/summary.txt"
}

eaglelab() {  # NAME VERB SETTINGS...
    name=$1
    shift
    run "$name" "$PYTHON" -m eaglelab.cli.main "$@"
}

tests() {
    if [ "$DEVICE" = cpu ]; then
        set -- --collect-only
    else
        set -- -rs
    fi
    run tests "$PYTHON" -m pytest -m "not slow" "$@" tests/kernels tests/drafters/test_flex.py \
        tests/training/test_attention_speed.py tests/training/test_operation_speed.py \
        tests/evaluation/test_round_speed.py tests/decoding/test_graphs.py tests/features/test_ahead.py
}

kernels() {
    if [ "$DEVICE" = cpu ]; then
        set -- soft_cross_entropy.rows=4 "soft_cross_entropy.vocab_sizes=[64]" \
            "soft_cross_entropy.draft_vocab_sizes=[64]" attention.rows=64 attention.head_dim=16 repetitions=1
    else
        set -- compiled=true
    fi
    eaglelab kernels bench kernels device="$DEVICE" out="$OUT/kernels.json" "$@"
}

steps() {
    shape="preset=8b device=$DEVICE"
    [ "$DEVICE" = cuda ] ||
        shape="preset=tiny device=cpu precision=bf16-mixed random_features=true split=false literal=false steps=1"
    eaglelab steps bench $shape out="$OUT/steps.json"
    eaglelab steps-torch bench $shape kernels=torch out="$OUT/steps-torch.json"
    eaglelab steps-all-rows bench $shape shape.answer=1 out="$OUT/steps-all-rows.json"
}

rounds() {  # NAME PRESET SETTINGS...
    name=$1 preset=$2
    shift 2
    [ "$DEVICE" = cuda ] || { preset=tiny && set -- "$@" rounds=4 repetitions=1 prompt_tokens=16; }
    eaglelab "$name" bench rounds preset="$preset" device="$DEVICE" out="$OUT/$name.json" "$@"
}

graphs() {
    if [ "$DEVICE" = cpu ]; then
        echo "graphs: not tried on a CPU, which records none" | tee -a "$OUT/summary.txt"
    else
        rounds graphs-1b 1b graphs=true
        rounds graphs-8b 8b graphs=true repetitions=3
    fi
}

compiled() {
    if [ "$DEVICE" = cpu ]; then
        echo "compiled: not tried on a CPU, where compiling takes minutes" | tee -a "$OUT/summary.txt"
    else
        rounds compiled 1b compile=true 'trees=[{name:chain,depth:5},{name:dynamic,width:10,depth:6,budget:59}]'
    fi
}

train() {
    for variant in eagle hass eagle3; do
        eaglelab "train-$variant" train variant=$variant $TRAINER trainer.max_steps="$STEPS" \
            trainer.val_check_interval="$STEPS" hydra.run.dir="$OUT/$variant"
    done
    eaglelab train-ahead train variant=eagle3 $TRAINER features.ahead=true trainer.max_steps="$STEPS" \
        trainer.val_check_interval="$STEPS" hydra.run.dir="$OUT/ahead"
    resumed="variant=hass $TRAINER trainer.val_check_interval=$STEPS hydra.run.dir=$OUT/resumed"
    eaglelab train-half train $resumed trainer.max_steps=$((STEPS / 2))
    eaglelab train-resumed train $resumed trainer.max_steps="$STEPS" ckpt_path=last
}

decode() {
    for run in eagle hass eagle3 resumed; do
        eaglelab "evaluate-$run" evaluate run="$OUT/$run" tree=chain $DECODE $HALF
    done
    eaglelab evaluate-dynamic evaluate run="$OUT/eagle3" tree=dynamic $DECODE $HALF
    eaglelab evaluate-float32 evaluate run="$OUT/hass" tree=dynamic $DECODE dtype=float32
}

"$PYTHON" - > "$OUT/machine.txt" <<'ASK' || exit 2
import platform, torch, transformers
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{name}; Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
ASK
cat "$OUT/machine.txt"
[ $# -gt 0 ] || set -- tests kernels steps rounds-1b rounds-8b graphs compiled train decode
for stage in "$@"; do
    case $stage in
    tests | kernels | steps | graphs | compiled | train | decode) work=$stage ;;
    rounds-1b | rounds-8b) work="rounds $stage ${stage#rounds-}" ;;
    *) echo "unknown stage $stage: tests kernels steps rounds-1b rounds-8b graphs compiled train decode" >&2 && exit 2 ;;
    esac
    UNTIL=$(($(date +%s) + SECONDS_EACH))
    $work
done
[ -z "$FAILED" ] || { echo "failed:$FAILED" && exit 1; }
