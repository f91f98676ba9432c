#!/bin/sh
# Says how to get PyTorch's CPU build, where the usual one would bring gigabytes of no use.
#
#   tools/pytorch_hint.sh FOLDER TARGET
#
# Silent where it does not apply: not on Linux, an NVIDIA GPU, PyTorch is there already, or pip has been
# told of a further source. pip itself can't be asked for a build by name: versions of the CPU build end in
# "+cpu", and which source has them only the user can say. (uv knows.)
set -eu

python=$1/bin/python
target=${2:-demo}

[ "$(uname)" = Linux ] || exit 0
! command -v nvidia-smi >/dev/null 2>&1 || exit 0
[ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-}" ] || exit 0
! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || exit 0
! "$python" -m pip config list 2>/dev/null | grep -Eq '(extra-index-url|find-links)' || exit 0

cat <<END
No NVIDIA GPU here. The usual PyTorch for Linux brings CUDA libraries: some gigabytes, of no use to a CPU.
For the CPU build (a tenth of that) interrupt this and say, once:

    PIP_EXTRA_INDEX_URL=ADDRESS make $target

ADDRESS is what PyTorch's own install page shows after --index-url for Linux, pip and CPU. With uv:

    uv pip install --python $python --torch-backend cpu -c constraints.txt torch && make $target

Everything works either way; going on.
END
