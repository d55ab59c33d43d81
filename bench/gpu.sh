#!/usr/bin/env bash
# Checks and measures Meristem on a real GPU, on a machine that has CUDA 13 and Python but no Rust and no network.
#
#   bench/gpu.sh pack FOLDER       where Meristem is built: programs, tests, expected digests and these scripts,
#                                  in FOLDER and in FOLDER.tar.xz, which is what travels
#   FOLDER/bench/gpu.sh correct    on the GPU: checks, tests, digests, a loss curve, compute-sanitizer
#   FOLDER/bench/gpu.sh fast       ours and the peers in turns; refuses unless `correct` is green for this build
#   FOLDER/bench/gpu.sh why        ncu on one training step
#
# FOLDER is an absolute path or one under the current folder. Every stage of the last three has a limit of its own and
# is a line of JSON in the record: exit code (124 if it ran out of time), seconds, the end of its output. None stops the
# next. Stages that are green, or measured, for this build on this GPU are not repeated: where the time of a call is
# short, call again. `correct` exits with 1 unless the newest result of each stage is green; those of compute-sanitizer,
# which some machines refuse, do not count for that.
#
# The record is FOLDER/gpu.jsonl. Where OUT is set, each line is followed by a copy to $OUT/gpu.jsonl, and the whole output
# of each stage is appended to $OUT/gpu-output.txt; a machine that begins bare goes on from there if that record is put into
# the unpacked FOLDER.
#
# Environment, with the defaults:
#   GPU_RECORD=FOLDER/gpu.jsonl the record. Lines are appended
#   GPU_PHASE_SECONDS=570       limit of a phase: a stage gets no more than what is left of it
#   GPU_LIMIT_<STAGE>=          limit of a stage in seconds, such as GPU_LIMIT_racecheck; see gpu_phases.py
#   GPU_STAGES=                 runs only these, such as "check nn", whose results are the exit code
#   GPU_AGAIN=0                 1: repeats what is green, or measured, already
#   CUDA_VISIBLE_DEVICES=0      which GPU
#   GPU_PYTHON=python3          an interpreter that has PyTorch, JAX, NumPy and safetensors
#   GPU_SMALL=0                 1: sizes for the stand-in driver (cargo xtask standin FOLDER/bench/gpu.sh correct)
#   GPU_ENVS="1 4 16 64 128"    numbers of hosts of ours; the peers train GPU_PEER_ENVS=64
#   GPU_HOST=baseline GPU_BATCH=128 GPU_SECONDS=1 GPU_ROUNDS=3
#   GPU_PEERS=                  peers such as "torch:graphs:tf32 jax:scan:f32"; all of them
#   GPU_ANYWAY=0                1: `fast` runs without a green `correct`, and marks its results as not counting
#   GPU_PROFILE=release         profile of `pack`; `dev` for trying the script
#   GPU_FEATURES                features of `pack`, if a build with more than `cuda` is there already
#   GPU_PACK_MIB=48             most that FOLDER.tar.xz may weigh
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
  cp bench/gpu.sh bench/gpu_*.py bench/{torch,jax}_gpu.py bench/torch_{host,gather,models}.py bench/digests.py bench/result_parts.py \
    "$folder/bench"
  cp reference/{blueprints,common}.py "$folder/reference"
  cargo xtask standin --seed 1 python3 bench/digests.py "$folder/bin/meristem" --cuda --save "$folder/digests.json"
  git describe --always --dirty --abbrev=12 >"$folder/commit"
  # A record of an earlier pack is none of this build.
  rm -f "$folder/gpu.jsonl"
  XZ_OPT=${XZ_OPT:--T0} tar --create --xz --file "$folder.tar.xz" --directory "$(dirname "$folder")" "$(basename "$folder")"
  python3 .ci/check_pack.py "$folder.tar.xz"
  local mib
  mib=$(($(stat --format=%s "$folder.tar.xz") / 1048576 + 1))
  echo "$folder.tar.xz: at most $mib MiB"
  [ "$mib" -le "${GPU_PACK_MIB:-48}" ] || { echo "gpu.sh: more than ${GPU_PACK_MIB:-48} MiB" >&2; exit 1; }
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
