#!/usr/bin/env bash
# Make .venv with everything the project needs; safe to run again, then it takes seconds.
# Order: system packages -> Python packages -> Horovod wheel (built once, cached) -> this package.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
HOROVOD_VERSION=0.28.1
CACHE=${HOROVOD_APS_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/horovod_aps}
LOGS=$CACHE/logs
mkdir -p "$CACHE" "$LOGS"

say() { printf 'setup: %s\n' "$*"; }
fail() { # fail <package> <log> <what to try>
    printf '\nsetup: %s failed.\n  log:  %s\n  try:  %s\n' "$1" "$2" "$3" >&2
    [ -f "$2" ] && { printf '  last lines of the log:\n' >&2; tail -n 15 "$2" | sed 's/^/    /' >&2; }
    exit 1
}
run_logged() { # run_logged <package> <advice> command...
    local package=$1 advice=$2 log=$LOGS/$1.log
    shift 2
    "$@" >"$log" 2>&1 || fail "$package" "$log" "$advice"
}

# 1. System packages -------------------------------------------------------------------------------
# One line per need: the command or file that proves it, and the Debian package that brings it.
required=() optional=()
has() { command -v "$1" >/dev/null; }
has mpirun || required+=(openmpi-bin)
has mpicxx || required+=(libopenmpi-dev)
has g++ || required+=(g++)
has make || required+=(make)
has "$PYTHON" || required+=("$(basename "$PYTHON")")
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || required+=("$(basename "$PYTHON")-venv")
[ -f "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)/Python.h" ] ||
    required+=("$(basename "$PYTHON")-dev")
# Can be done without: faster builds, guided fuzzing, hosts with slow links (which only root can make).
has ccache || optional+=(ccache)
has clang++ || optional+=(clang)
[ "$(id -u)" != 0 ] || { has ip && has tc; } || optional+=(iproute2)
missing=("${required[@]}" "${optional[@]}")
install="apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq ${missing[*]}"
if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && has apt-get; then
    say "installing ${missing[*]}"
    if [ "${#required[@]}" -gt 0 ]; then
        run_logged apt "apt-get update && apt-get install ${missing[*]}" bash -c "$install"
    else
        bash -c "$install" >"$LOGS/apt.log" 2>&1 || say "going on without ${optional[*]} (log: $LOGS/apt.log)"
    fi
elif [ "${#required[@]}" -gt 0 ]; then
    say "missing system packages; type: sudo apt-get install ${missing[*]}" >&2
    say "(those are Debian's and Ubuntu's names; elsewhere install Open MPI, a C++17 compiler, Python's headers)" >&2
    exit 1
fi

# 2. Python packages -------------------------------------------------------------------------------
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11) ;;
    3.12) say "going on with Python 3.12; the project is tested with 3.11" ;;
    *) say "the pinned packages need Python 3.11 or 3.12, this is $version; set PYTHON=python3.11" >&2; exit 1 ;;
esac
if [ ! -x $VENV/bin/python ]; then
    run_logged venv "apt-get install $(basename "$PYTHON")-venv" "$PYTHON" -m venv $VENV
fi
PY=$PWD/$VENV/bin/python
PIP=("$PY" -m pip install --disable-pip-version-check -c scripts/constraints.txt)
stamp=$VENV/.requirements.sha256
want=$(cat requirements.txt scripts/constraints.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    say "installing the pinned Python packages (log: $LOGS/requirements.log)"
    run_logged requirements "a network to the Python package index, and 4 GB of free disk" \
        "${PIP[@]}" -r requirements.txt
    # tf-keras asks for the `tensorflow` package, which would land on top of tensorflow-cpu, and torchvision's wheel for
    # the CUDA build of torch; the examples use none of its compiled operators.
    # Of CUDA's compiler only ptxas is needed, by the tests of the kernels.
    run_logged no-deps "a network to the Python package index" \
        "${PIP[@]}" --no-deps tf-keras torchvision nvidia-cuda-nvcc \
        pytorch-lightning lightning-utilities torchmetrics accelerate huggingface-hub safetensors
    echo "$want" >"$stamp"
fi
packages=$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp scripts/torchvision_schemas.py "$packages/"
echo 'import torchvision_schemas' >"$packages/torchvision_schemas.pth"

# 3. Horovod ---------------------------------------------------------------------------------------
# The wheel is bound to the frameworks' C++ ABI, so the cache key names all that it was built against.
key=$("$PY" - <<PYEOF
import platform, sys
from importlib.metadata import version
print("horovod-$HOROVOD_VERSION-py%d%d-torch%s-tf%s-%s" % (*sys.version_info[:2], version("torch"),
      version("tensorflow-cpu"), platform.machine()))
PYEOF
)-${HOROVOD_GPU_OPERATIONS:-cpu}-mpi$(mpirun --version 2>/dev/null | head -n1 | grep -o '[0-9][0-9.]*$')
key=${key/-cpu-mpi/-mpi}
wheels=$CACHE/$key
if [ "${HOROVOD_GPU_OPERATIONS:-}" = NCCL ]; then
    export HOROVOD_CUDA_HOME=${HOROVOD_CUDA_HOME:-/usr/local/cuda}
    [ -x "$HOROVOD_CUDA_HOME/bin/nvcc" ] || {
        say "HOROVOD_GPU_OPERATIONS=NCCL needs a CUDA toolkit; set HOROVOD_CUDA_HOME to the folder with bin/nvcc" >&2
        exit 1
    }
fi
if ! ls "$wheels"/horovod-*.whl >/dev/null 2>&1; then
    say "building Horovod $HOROVOD_VERSION, about six minutes on two cores (log: $LOGS/horovod.log)"
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
    run_logged horovod-download "a network to the Python package index" \
        "$PY" -m pip download --disable-pip-version-check --no-deps --no-binary horovod --no-build-isolation \
        -d "$build" "horovod==$HOROVOD_VERSION"
    tar -xzf "$build/horovod-$HOROVOD_VERSION.tar.gz" -C "$build"
    source=$build/horovod-$HOROVOD_VERSION
    # Build settings, not behaviour: torch and TensorFlow headers need C++17, and xla_mpi_ops.cc (a GPU-only
    # op) includes a header that the TensorFlow wheel does not ship.
    sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
    xla=$source/horovod/tensorflow/xla_mpi_ops.cc
    { echo '#if 0'; cat "$xla"; echo '#endif'; } >"$xla.off" && mv "$xla.off" "$xla"
    mkdir -p "$wheels"
    # With HOROVOD_GPU_OPERATIONS=NCCL, a CUDA toolkit (HOROVOD_CUDA_HOME) and NCCL (HOROVOD_NCCL_HOME) Horovod's own
    # operations run on GPUs; Horovod reads these variables itself.
    PATH=$PWD/$VENV/bin:$PATH HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 MAKEFLAGS=-j"$(nproc)" \
        run_logged horovod "apt-get install g++ libopenmpi-dev; then make setup again" \
        "$PY" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation -w "$wheels" "$source"
fi
stamp=$VENV/.horovod
if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ] ||
    ! "$PY" -c "import sys; from importlib.metadata import version; sys.exit(version('horovod') != '$HOROVOD_VERSION')" 2>/dev/null; then
    say "installing Horovod from $wheels"
    run_logged horovod-install "rm -r $wheels; make setup" \
        "$PY" -m pip install --disable-pip-version-check --no-deps --force-reinstall "$wheels"/horovod-*.whl
    echo "$key" >"$stamp"
fi

# 4. This package ----------------------------------------------------------------------------------
stamp=$VENV/.package.sha256
want=$(cat setup.py setup.cfg pyproject.toml cuda/*.cpp cuda/*.h cuda/*.inc 2>/dev/null | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ] || ! "$PY" -c 'import horovod_aps' 2>/dev/null; then
    say "compiling and installing horovod_aps (editable)"
    run_logged horovod_aps "apt-get install g++ python3-dev" \
        "$PY" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
    echo "$want" >"$stamp"
fi
say "ready: $VENV"
