#!/bin/sh
# Makes a virtual environment, or says what is missing and what to do about it.
#
#   tools/venv.sh FOLDER [PYTHON]
#
# Without PYTHON the first suitable one of python3, python3.13, python3.12, python3.11 and python is
# taken. Nothing half-made stays behind.
set -eu

folder=$1
asked=${2:-}
tried=
trap 'rm -rf "$folder"; exit 130' INT TERM

for candidate in ${asked:-python3 python3.13 python3.12 python3.11 python}; do
    if ! command -v "$candidate" >/dev/null 2>&1; then
        tried="$tried
  $candidate: not found"
    elif ! version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1); then
        tried="$tried
  $candidate: does not run"
    elif ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        tried="$tried
  $candidate: is Python $version"
    elif ! "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        tried="$tried
  $candidate: is Python $version, but its module venv or ensurepip is missing"
    else
        echo "Making $folder with $candidate (Python $version)"
        if "$candidate" -m venv --clear "$folder"; then
            exit 0
        fi
        rm -rf "$folder"
        tried="$tried
  $candidate: is Python $version, but 'python -m venv' failed (see above)"
    fi
done

cat >&2 <<END
No virtual environment could be made in $folder: it takes Python 3.11 or newer with the standard
modules venv and ensurepip. Tried:$tried
What to do: install one (on Debian and Ubuntu: apt-get install python3-venv; on Fedora and macOS the
usual python3 has them), or name another: make PYTHON=/path/to/python3.12 ...
END
exit 1
