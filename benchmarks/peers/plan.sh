#!/usr/bin/env bash
# The comparison on 16 cores, most worth first (plan.txt): cut at any time, it leaves whole runs.
#   benchmarks/peers/plan.sh [FOLDER [SECONDS]]     again with the same folder: it goes on where it was cut. After SECONDS
#                                                   no run is begun; all of it takes about 40 minutes
# A system that cannot be imported here is left out, and said so (preflight.py).
set -u
unset PYTHONDONTWRITEBYTECODE  # starts are measured, and nobody's are meant to compile
export PYTHONUNBUFFERED=1
cd "$(dirname "$0")/../.."
folder=${1:-bakeoff} seconds=${2:-100000}
mkdir -p "$folder"
cores=${CORES:-0-$(($(nproc) - 1))}  # FIRST-LAST: these alone
jobs=$(((${cores#*-} - ${cores%-*} + 1) / 2))  # five processes on two cores: their steps must fit into a step's time
jobs=$((jobs > 1 ? jobs : 1))
[ -s "$folder/systems.txt" ] || python3 benchmarks/peers/preflight.py --imports --seconds-max 90 --folder "$folder" || true
works=$(cat "$folder/systems.txt")

part() {  # part TITLE SECONDS OPTIONS...
  echo "== $1, at $SECONDS s"
  python3 benchmarks/peers/bakeoff.py --folder "$folder" --resume "$folder/results.jsonl" --step-ms 80 --batch 4 \
    --seconds 16 --until-s "$2" "${@:3}" | grep --line-buffered -E '^\[|cells|^no '
}

part "plan.txt" $((seconds - SECONDS)) --jobs "$jobs" --cores "$cores" --plan benchmarks/peers/plan.txt --steps 192 --systems "$works"
# A GPU that several share is one run's at a time.
if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  part "one GPU" $((seconds - SECONDS)) --scenarios gpu --seconds 10 --world 2 --repeat 3 --cores 0-1 \
    --systems bare,atoll,torchft,ddp
fi
echo "finished at $SECONDS s"
