#!/usr/bin/env bash
# Tests of radixstate inside sglang, on a CPU, in an environment that is made once. It borrows torch and pytest from the
# development environment. Where sglang cannot be had it says so.
#
#     tools/sglang.sh DEVELOPMENT_PYTHON [ARGUMENT OF PYTEST]...
set -euo pipefail
cd "$(dirname "$0")/.."
development=$1
shift

unchecked() {
    printf '\n*** NOT CHECKED inside sglang: %s ***\n\n' "$1" >&2
    exit 0
}

venv=${SGLANG_VENV:-.venv-sglang}
wanted=tests/sglang/requirements.txt
if ! cmp --silent "$wanted" "$venv/.packages"; then
    rm -rf "$venv"
    "$development" -m venv "$venv"
    packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    echo "import site; site.addsitedir('$(packages "$development")')" >"$(packages "$venv/bin/python")/development.pth"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$wanted" ||
        unchecked "pip could not install $wanted"
    cp "$wanted" "$venv/.packages"
fi

# Settings of the other tests would import what this environment lacks.
PYTHONPATH=python "$venv/bin/python" -m pytest -q -p no:cacheprovider --confcutdir tests/sglang tests/sglang "$@"
