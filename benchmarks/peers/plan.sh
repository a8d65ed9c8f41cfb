#!/usr/bin/env bash
# The comparison on 16 cores in about 17 minutes, most worth first: cut at any time, it leaves whole passes.
#   benchmarks/peers/plan.sh [FOLDER]       again with the same folder: it goes on where it was cut
# Each part says how long it will take. A system that does not work here is left out, and said so (preflight.py).
set -u
unset PYTHONDONTWRITEBYTECODE  # starts are measured, and nobody's are meant to compile
cd "$(dirname "$0")/../.."
folder=${1:-bakeoff}
mkdir -p "$folder"
jobs=$(($(nproc) / 2))  # five processes on two cores: their steps must fit into a step's time
rest=$((jobs > 1 ? jobs - 1 : 1))
systems=atoll,atoll-24,torchft,torchft-streaming,ddp,hivemind,flower
[ -s "$folder/systems.txt" ] || python3 benchmarks/peers/preflight.py --folder "$folder" || true
works=,$(cat "$folder/systems.txt"),

part() {  # part TITLE SYSTEMS OPTIONS...
  local title=$1 names=
  for name in ${2//,/ }; do case $works in *",$name,"*) names+=,$name ;; esac; done
  echo "== $title: ${names#,}, at $SECONDS s"
  [ -z "$names" ] || python3 benchmarks/peers/bakeoff.py --folder "$folder" --resume "$folder/results.jsonl" \
    --step-ms 80 --batch 4 --systems "${names#,}" "${@:3}" | grep --line-buffered -E '^\[|cells|^no '
}

part "nothing, a slow one, a kill, the coordinator's kill" "$systems" --jobs "$jobs" --repeat 3 --seconds 16 \
  --scenarios clean,slow,kill,coordinator
# A GPU that several share is one run's at a time, beside the others, on cores of its own.
gpu() { works+=bare, part "one GPU" bare,atoll,torchft,ddp --scenarios gpu --seconds 10 --world 2 --repeat 3 --cores 0-1 \
  --until-s 380; }
if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then gpu; else echo "no GPU here"; fi \
  > "$folder/gpu.txt" 2>&1 &
part "thin links, a joiner, two generations" "$systems" --jobs "$rest" --cores "2-$(nproc)" --repeat 3 --seconds 16 \
  --scenarios 20mbit-small,thin,join,generations
wait
cat "$folder/gpu.txt"
part "loss at equal tokens" "$systems" --jobs "$jobs" --step-ms 60 --scenarios search,tokens --steps 192 --repeat 3
part "what failed, again" "$systems" --jobs "$jobs" --repeat 3 --seconds 16 \
  --scenarios clean,slow,kill,coordinator,20mbit-small,thin,join,generations
part "Atoll's synchronous form" atoll-diloco --jobs "$jobs" --repeat 3 --seconds 16 \
  --scenarios clean,slow,kill,coordinator,20mbit-small,thin,join,generations
echo "finished at $SECONDS s"
