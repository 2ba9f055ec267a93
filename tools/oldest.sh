#!/usr/bin/env bash
# Tests with the oldest Python and packages that pyproject.toml promises, in an environment that is made once.
# Where they cannot be had it says so.
set -euo pipefail
cd "$(dirname "$0")/.."

# The lower bounds of all extras but those for CUDA, as pins: one for each package, or the promise is unclear.
floors() {
    "$1" - <<'EOF'
import re
import tomllib

extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
pins = {}
for extra in ("torch", "transformers", "testing"):
    for requirement in extras[extra]:
        name, version = re.fullmatch(r"([\w-]+)[>=]=([\d.]+)", requirement).groups()
        assert pins.setdefault(name, version) == version, f"{name} has two lower bounds: {pins[name]}, {version}"
print(*(f"{name}=={version}" for name, version in pins.items()))
EOF
}

promised=$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' pyproject.toml)
[[ -n "$promised" ]] || { echo "pyproject.toml has no requires-python" >&2; exit 1; }

unchecked() {
    printf '\n*** NOT CHECKED with Python %s and the oldest packages, which pyproject.toml promises: %s ***\n\n' "$promised" "$1" >&2
}

python=""
for candidate in "${PYTHON:-python3}" "python$promised"; do
    if [[ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" == "$promised" ]]; then
        python=$candidate
        break
    fi
done
[[ -n "$python" ]] || { unchecked "there is no python$promised here"; exit 0; }

venv=${OLDEST_VENV:-.venv-oldest}
pins=$(floors "$python")
if [[ "$(cat "$venv/.pins" 2>/dev/null)" != "$pins" ]]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    # shellcheck disable=SC2086 # one word for each package
    if ! "$venv/bin/pip" install --quiet --disable-pip-version-check pytest $pins; then
        unchecked "pip could not install $pins"
        exit 0
    fi
    echo "$pins" >"$venv/.pins"
fi

# The module of the development environment: it is built for the stable ABI of that Python.
echo "Python $promised, $pins"
PYTHONPATH=python "$venv/bin/python" -m pytest -q -p no:cacheprovider \
    tests/test_{all_or_nothing,cache,codec_native,concurrency,cuda_launch,finiteness,formats,held_memory,memory}.py \
    tests/test_{native_arguments,readme,request,states,steps,transformers}.py
