#!/bin/sh
# MASTER=node0:29500 NODES=2 GPUS=8 sh experiments/launch/torchrun.sh hydra.run.dir=outputs/run variant=hass ...
# The same line on every node. hydra.run.dir lies on a file system that all nodes see.
set -eu
exec torchrun --nnodes="${NODES:-1}" --nproc-per-node="${GPUS:-8}" \
    --rdzv-backend=c10d --rdzv-endpoint="${MASTER:-localhost:29500}" --rdzv-id=eaglelab \
    -m eaglelab.cli.train trainer=ddp trainer.devices="${GPUS:-8}" trainer.num_nodes="${NODES:-1}" "$@"
