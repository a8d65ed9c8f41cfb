#!/usr/bin/env bash
# The comparison on 16 cores in about 18 minutes, most worth first: cut at any time, it leaves whole passes.
#   benchmarks/peers/plan.sh [FOLDER]       again with the same folder: it goes on where it was cut
set -u
unset PYTHONDONTWRITEBYTECODE  # starts are measured, and nobody's are meant to compile
cd "$(dirname "$0")/../.."
folder=${1:-bakeoff}
bakeoff="python3 benchmarks/peers/bakeoff.py --folder $folder --resume $folder/results.jsonl"
paced="$bakeoff --jobs 8 --step-ms 80 --batch 4"  # five processes on two cores: their steps must fit into a step's time
systems=atoll,atoll-24,atoll-diloco,torchft,torchft-streaming,hivemind,flower,ddp
$paced --short --systems $systems --seconds 17 --repeat 2
$paced --systems $systems --scenarios search,tokens --steps 192 --repeat 3
$paced --short --systems $systems --seconds 17 --repeat 3
$bakeoff --systems bare,atoll,torchft,ddp --scenarios gpu --seconds 10 --world 2
echo finished
