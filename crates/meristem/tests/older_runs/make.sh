#!/usr/bin/env bash
# make.sh PROGRAM FOLDER [FLAG...]: makes a folder of this collection with the program `meristem` of a commit.
# The flags are for the runs that grow. See README.md.
set -eu
program=$(realpath "$1")
mkdir "$2"
cd "$2"
shift 2
export MERISTEM_ISA=portable
host=(--host "cnn:channels=1" --slots r0 --envs 1 --batch 512 --max-batches 1 --control-split 0.01 --threads 1)
grow=(--min-training-steps 1 --plateau-steps 1 "$@")
ppo=(--controller ppo --policy-hidden 4 "${grow[@]}")

# ends RUN SIGNAL CHECKPOINT FLAGS: signals a run when it has that checkpoint, and keeps only its newest.
ends() {
    local run=$1 signal=$2 checkpoint=$3
    shift 3
    "$program" train --run-dir "$run" "${host[@]}" --quiet "$@" &
    local pid=$!
    while kill -0 $pid 2> /dev/null && [ ! -e "$run/checkpoints/$checkpoint.safetensors" ]; do :; done
    kill -"$signal" $pid
    wait $pid || true
    rm -f "$run"/checkpoints/.*.part
    find "$run/checkpoints" -type f | sort | head -n -1 | xargs -r rm
}

ends none TERM round-000000-step-000002 --controller none --steps 12 --checkpoint-every 2
ends heuristic KILL round-000000-step-000012 --controller heuristic "${grow[@]}" --steps 20 --checkpoint-every 4
ends ppo KILL round-000001-step-000002 "${ppo[@]}" --rounds 3 --steps 5 --checkpoint-every 2
ends ranks KILL round-000000-step-000004 --controller heuristic "${grow[@]}" --steps 12 --checkpoint-every 4 \
    --data-parallel --ranks 2 --exchange topk:0.1
"$program" train --run-dir complete "${host[@]}" "${ppo[@]}" --quiet --rounds 2 --steps 4 --checkpoint-every 0
ends init KILL round-000000-step-000004 --controller none --steps 12 --checkpoint-every 4 \
    --init complete/weights/env-0.safetensors
"$program" control eval --run-dir study --controllers none,heuristic "${host[@]}" --seeds 2 --steps 6 "${grow[@]}"
find . -name .lock -delete
