#!/usr/bin/env bash
# Checks and measures Meristem on a real GPU, on a machine that has CUDA 13 and Python but no Rust and no network.
#
#   bench/gpu.sh pack FOLDER       where Meristem is built: programs, tests, expected digests and these scripts
#   FOLDER/bench/gpu.sh correct    on the GPU: checks, tests, digests, compute-sanitizer, a loss curve
#   FOLDER/bench/gpu.sh fast       ours and the peers in turns; refuses unless `correct` is green for this build
#   FOLDER/bench/gpu.sh why        ncu on one training step
#
# FOLDER is an absolute path or one under the current folder. Every stage of the last three has a separate limit and a
# line of JSON in the record: exit code (124 if it ran out of time), seconds, the end of its output. A failure does not
# stop the next stage. `correct` exits with 1 if a stage failed or was skipped.
#
# Environment, with the defaults:
#   GPU_RECORD=$OUT/gpu.jsonl   the record; ./gpu.jsonl without OUT. Lines are appended
#   GPU_PHASE_SECONDS=570       limit of a phase: a stage gets at most the remaining time
#   GPU_LIMIT_<STAGE>=          limit of a stage in seconds, such as GPU_LIMIT_racecheck; see gpu_phases.py
#   GPU_STAGES=                 runs only these, such as "check nn"; `correct` is then not green for `fast`
#   CUDA_VISIBLE_DEVICES=0      which GPU
#   GPU_PYTHON=python3          an interpreter that has PyTorch, JAX, NumPy and safetensors
#   GPU_SMALL=0                 1: sizes for the stand-in driver (cargo xtask standin FOLDER/bench/gpu.sh correct)
#   GPU_ENVS="1 4 16 64 128"    numbers of hosts of ours; the peers train GPU_PEER_ENVS=64
#   GPU_HOST=baseline GPU_BATCH=128 GPU_SECONDS=1 GPU_ROUNDS=3
#   GPU_PEERS=                  peers such as "torch:graphs:tf32 jax:scan:f32"; all of them
#   GPU_ANYWAY=0                1: `fast` runs without a green `correct`, and marks its results as not counting
#   GPU_PROFILE=release         profile of `pack`; `dev` for trying the script
#   GPU_FEATURES                features of `pack`, if a build with more features than `cuda` exists
#   GPU_PACK_MIB=64             maximum size of a pack
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

# Copies a program of a crate, listed in $programs, without its symbols.
carry() {
  local path
  path=$(awk -v crate="$2" -v target="$3" '$1 == crate && $2 == target { print $3 }' <<<"$programs")
  strip -o "$folder/bin/$1" "$path"
}

pack() {
  folder=$1
  cd "$here/.."
  mkdir -p "$folder"/{bin,bench,reference}
  local crate programs
  local -a tests=(cargo test --no-run --features "${GPU_FEATURES:-cuda}" --profile "${GPU_PROFILE:-release}"
    --message-format=json-render-diagnostics -p meristem -p meristem-device -p meristem-control)
  programs=$({
    "${tests[@]}" --lib
    "${tests[@]}" -p meristem-data -p meristem-nn -p meristem-comm --test all
  } | python3 .ci/programs.py)
  carry meristem meristem bin
  for crate in device control; do carry "$crate-lib" "$crate" lib; done
  for crate in device data nn comm; do carry "$crate" "$crate" all; done
  cp bench/gpu.sh bench/gpu_*.py bench/{torch,jax}_gpu.py bench/torch_host.py bench/digests.py bench/result_parts.py \
    "$folder/bench"
  cp reference/common.py "$folder/reference"
  cargo xtask standin --seed 1 python3 bench/digests.py "$folder/bin/meristem" --cuda --save "$folder/digests.json"
  git describe --always --dirty --abbrev=12 >"$folder/commit"
  local mib
  mib=$(($(du -s --apparent-size --block-size=1K "$folder" | cut -f1) / 1024))
  echo "$folder: $mib MiB"
  [ "$mib" -le "${GPU_PACK_MIB:-64}" ] || { echo "gpu.sh: more than ${GPU_PACK_MIB:-64} MiB" >&2; exit 1; }
}

case ${1:-} in
  pack)
    [ $# -eq 2 ] || { usage >&2; exit 2; }
    mkdir -p "$2"
    pack "$(cd "$2" && pwd)"
    ;;
  correct | fast | why)
    [ $# -eq 1 ] || { usage >&2; exit 2; }
    exec "${GPU_PYTHON:-python3}" "$here/gpu_phases.py" "$1"
    ;;
  --help) usage ;;
  *) usage >&2; exit 2 ;;
esac
