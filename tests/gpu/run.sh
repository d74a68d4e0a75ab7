#!/usr/bin/env bash
# Runs what needs a GPU on a machine that has one and python3 with torch, and that may have no network:
#
#   bash tests/gpu/run.sh wheels [3.12]   elsewhere, with network: fetch into wheels/ the packages that the machine may lack,
#                                         for its version of Python on Linux x86-64
#   bash tests/gpu/run.sh tests           the tests of this folder
#   bash tests/gpu/run.sh ranks           tests/ranks on two ranks that share the GPU, over MPI with copies in the host's memory,
#                                         and Horovod's operations over NCCL with one rank
#   bash tests/gpu/run.sh benchmarks      benchmarks/gpu.py
#
# Several words do one after the other, in $LIMIT seconds together (570, ten minutes with starting and stopping).
# Logs and a summary go to the folder $OUT, gpu-results unless set. Nothing of the machine's own Python is changed: what it
# lacks goes into an environment that is removed afterwards.
set -euo pipefail
cd "$(dirname "$0")/../.."
SECONDS=0
LIMIT=${LIMIT-570}
OLDEST=2.13

# What the tests import, torch left out: of pyproject.toml.
requirements() {
  python3 - <<'PYTHON'
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    table = tomllib.load(file)
extras = table["project"]["optional-dependencies"]
needed = [one for one in table["project"]["dependencies"] if not one.startswith("torch>")]
needed += [one for one in extras["test"] if one.startswith(("pytest", "hypothesis"))]
# torch 2.11 refuses newer ones of setuptools
print(*needed, *extras["adamw-8bit"], *extras["mpich"], "setuptools<82", *table["build-system"]["requires"], sep="\n")
PYTHON
}

wheels() {
  local version=$1 platforms=() one
  # pip takes a platform by its very name; newer ones than these need a newer system
  for one in manylinux1 manylinux2010 manylinux2014 manylinux_2_{5,12,17,24,26,27,28,31,34}; do
    platforms+=("--platform=${one}_x86_64")
  done
  requirements | python3 -m pip download --quiet --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --dest wheels --requirement /dev/stdin
  du -sh wheels
}

# An environment over the machine's Python, with what that lacks. Sets `python`.
prepare() {
  local home
  home=$(mktemp -d)
  trap "rm -rf '$home'" EXIT
  python3 -m venv --without-pip "$home/env"
  python=$home/env/bin/python
  local own=(--quiet --disable-pip-version-check --no-index --find-links wheels)
  # the machine's packages come after the environment's own
  python3 -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"
  if ! requirements | python3 -m pip --python "$python" install "${own[@]}" --requirement /dev/stdin; then
    echo "packages are missing; fetch them elsewhere with 'bash tests/gpu/run.sh wheels' and bring the folder wheels/" >&2
    exit 3
  fi
  python3 -m pip --python "$python" install "${own[@]}" --no-deps --no-build-isolation --editable . --editable plugins/hpctrain-horovod \
    --editable plugins/hpctrain-dilated-attention
  if is_old; then
    note "torch is older than $OLDEST, the oldest that hpctrain supports: tests/gpu/older_torch.py supplies what it lacks"
    printf '%s\nimport older_torch\n' "$PWD/tests/gpu" \
      >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/older_torch.pth"
  fi
}

is_old() { ! "$python" -c "import sys, torch; sys.exit(torch.torch_version.TorchVersion(torch.__version__) < '$OLDEST')"; }

note() { echo "$*" | tee -a "$summary"; }

found() {
  "$python" - <<'PYTHON' | tee -a "$summary"
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from hpctrain.base.devices import accelerator, accelerator_count, device_name, device_of_rank, nvidia_capability


def installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, ROCm {torch.version.hip}")
print(", ".join(map(installed, ("triton", "torchao", "numpy", "h5py", "pydantic", "pytest"))))
device = device_of_rank(0)
if accelerator() is None:
    print("no accelerator that torch can use")
else:
    free, total = torch.accelerator.get_memory_info(device)
    print(
        f"{accelerator_count()} x {device_name(device)}, capability {nvidia_capability(device)}, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )
PYTHON
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee -a "$summary"
  fi
}

# Runs words with the time that is left, output to the file $1; the exit code is theirs, 124 where the time was up.
limited() {
  local log=$1 left=$((LIMIT - SECONDS)) code=0
  shift
  if ((left < 20)); then
    echo "not started: no time left" >"$log"
    return 124
  fi
  timeout --signal=INT --kill-after=15 "$left" "$@" >"$log" 2>&1 || code=$?
  return "$code"
}

tests() {
  local code=0
  # six processes share the GPU: a test measures its own process's memory and streams
  limited "$OUT/tests.log" "$python" -m pytest -p no:cacheprovider -n 6 -r fEs --durations 15 tests/gpu || code=$?
  note "tests: exit $code after $SECONDS s; $(tail -n 1 "$OUT/tests.log")"
  grep -E '^(FAILED|ERROR|SKIPPED|not started)' "$OUT/tests.log" | tee -a "$summary" || true
  return "$code"
}

ranks() {
  local code=0 leave_out=()
  if is_old; then
    note "ranks: left out what needs a newer torch: pipelines, and a unit of stage 3 that an evaluation does not use"
    leave_out=(-k "not pipeline and not every_layout and not leave_a_unit_out")
  fi
  # the other files of the folder are about the CPU's backends
  limited "$OUT/ranks.log" "$(dirname "$python")/mpiexec" -n 2 "$python" -m pytest -p no:cacheprovider --late --device cuda \
    -r fE -m "" "${leave_out[@]}" \
    tests/ranks/test_{stages,layouts,pipeline,tensor_plans,hooks_ranks,compression,resharded_training,experts}.py \
    tests/ranks/test_guard_ranks.py plugins/hpctrain-horovod/tests/ranks/test_horovod_devices.py || code=$?
  note "ranks: exit $code after $SECONDS s; $(grep -E '(passed|failed)' "$OUT/ranks.log" | tail -n 1)"
  grep -E '^(FAILED|ERROR|not started)' "$OUT/ranks.log" | tee -a "$summary" || true
  local alone=0
  limited "$OUT/horovod.log" "$(dirname "$python")/mpiexec" -n 1 "$python" -m pytest -p no:cacheprovider --device cuda -r fE \
    plugins/hpctrain-horovod/tests/ranks/test_horovod_devices.py || alone=$?
  note "Horovod over NCCL, one rank: exit $alone after $SECONDS s; $(grep -E '(passed|failed)' "$OUT/horovod.log" | tail -n 1)"
  return "$((code > alone ? code : alone))"
}

benchmarks() {
  local what failed=0 code
  for what in train stages fp8; do
    code=0
    limited "$OUT/benchmark-$what.log" "$python" benchmarks/gpu.py "$what" || code=$?
    note "$what: exit $code after $SECONDS s"
    if ((code == 0)); then
      sed -n "/^$what: /,\$p" "$OUT/benchmark-$what.log" | tee -a "$summary"
    else
      tail -n 3 "$OUT/benchmark-$what.log" | tee -a "$summary"
      failed=1
    fi
  done
  return "$failed"
}

case ${1-} in
  wheels)
    wheels "${2-3.12}"
    ;;
  tests | ranks | benchmarks)
    OUT=$(realpath -m "${OUT-gpu-results}")
    mkdir -p "$OUT" wheels
    summary=$OUT/summary.txt
    rm -f "$summary"
    prepare
    found
    failed=0
    for what in "$@"; do
      "$what" || failed=1
    done
    exit "$failed"
    ;;
  *)
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
