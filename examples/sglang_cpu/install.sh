#!/usr/bin/env bash
# Make VENV run real, unpatched sglang 0.5.23 on a Linux machine without a GPU (x86-64, Python 3.11).
#   examples/sglang_cpu/install.sh VENV [REQUIREMENTS...]
# PYTHON       the Python 3.11 to use; its pip does the work, so VENV needs neither ensurepip nor python3-venv
# TORCH_INDEX  where to find the CPU build of torch, if pip does not find it by itself
set -euo pipefail
venv=${1:?usage: install.sh VENV [REQUIREMENTS...]}
shift
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3.11}
torch=2.13.0

[ -x "$venv/bin/python" ] || "$python" -m venv --without-pip "$venv"
# No bytecode from pip: it compiles every file, one after the other (see the end).
pip=("$python" -m pip --disable-pip-version-check --python "$venv/bin/python" install -q --no-compile)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# The lists are complete, so nothing is resolved and no package can pull in a GPU stack. Two pips, for two cores.
lists=()
for list; do lists+=(-r "$list"); done
{
  "${pip[@]}" --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch+cpu" >"$log" 2>&1 && code=0 || code=$?
  [ ${#lists[@]} = 0 ] || "${pip[@]}" --no-deps "${lists[@]}"
  exit $code
} &
"${pip[@]}" --no-deps -r "$here/requirements.txt" || { wait; exit 1; }
if ! wait $!; then
  if [ -n "${TORCH_INDEX:-}" ] || ! grep -Eq "No matching distribution|ResolutionImpossible" "$log"; then
    cat "$log" >&2
    exit 1
  fi
  cat >&2 <<MSG
pip finds no CPU build of torch $torch here. Taking PyPI's build, which on x86-64 brings CUDA: several GB to download
and to keep. For the CPU build (0.2 GB), stop this and give TORCH_INDEX=, the address of the CPU index that PyTorch's
install page shows.
MSG
  "${pip[@]}" "torch==$torch"
fi

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here/standins/." "$site/"

# Without bytecode every sglang process parses 6,000 files: an engine on two ranks starts in 54 s instead of 28.
# Left out is a third of the files, which a text model never imports.
"$venv/bin/python" -m compileall -q -j 0 -x \
  '/(tests?|testing|third_party|multimodal_gen|benchmarks?)/|/transformers/models/(?!auto/|llama/|qwen3/|__init__)' "$site" >/dev/null ||
  true # some packages carry files of another Python's syntax
