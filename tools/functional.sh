#!/usr/bin/env bash
# The functional suite on two GPUs, in groups side by side under CUDA MPS, then what kills processes
# without it. With 32 cores and 140 GB a GPU it takes 20 minutes.
#
#     tools/functional.sh build/functional [GROUP...]
#
# writes a log for each group, or only for these, and "ended", their exit codes. What some groups
# need is named by variables, and without it their tests skip: CUBLAS is cuBLAS 13.10 to preload
# (libcublasLt.so.13:libcublas.so.13); the others are folders for PYTHONPATH. MEGATRON is a
# Megatron-LM of its main branch, with compiled dataset helpers; BRIDGE has Megatron-Bridge,
# DATASETS Hugging Face's datasets, TITAN torchtitan with its SimpleFSDP.
set -u
cd "$(dirname "$0")/.." && mkdir -p "$1" && out=$(cd "$1" && pwd) && rm -f "$out/ended"
only=${*:2}
python=${PYTHON:-python}
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

group() { # its name, how many tests at once, and pytest's words
  local name=$1 workers=$2
  [[ -z $only || " $only " == *" $name "* ]] || return 0
  shift 2
  "$python" -m pytest -v -n "$workers" --dist worksteal -p no:cacheprovider --tb short \
    --basetemp "$out/$name" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit code $?" >>"$out/ended"
}

folder=tests/functional
rest="$folder/test_own_loop.py $folder/test_life.py $folder/test_failures.py $folder/test_faults.py
  $folder/test_kernels.py $folder/test_standalone.py"
nvidia-cuda-mps-control -d
group align 11 $folder/test_align.py -k "not cublas and not v2" &
group rest 5 $rest -m "not kills" -k "not cublas and not v2 and not torchtitan" &
PYTHONPATH=${MEGATRON:-}:$PYTHONPATH group v2 3 $folder -m "not kills" -k v2 &
LD_PRELOAD=${CUBLAS:-} group cublas 5 $folder/test_align.py $folder/test_faults.py -k cublas &
PYTHONPATH=$PYTHONPATH:${BRIDGE:-} group bridge 3 $folder/test_bridge.py -m "not kills" &
PYTHONPATH=${DATASETS:-}:$PYTHONPATH group sft 1 $folder/test_sft.py &
PYTHONPATH=${TITAN:-}:$PYTHONPATH group titan 1 $folder/test_standalone.py -k torchtitan &
wait
echo quit | nvidia-cuda-mps-control
PYTHONPATH=$PYTHONPATH:${BRIDGE:-} group kills 5 $folder -m kills
cat "$out/ended" && ! grep -qv "code 0$" "$out/ended"
