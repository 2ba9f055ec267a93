#!/usr/bin/env bash
# Prints the exact version of every package of the development environment. What torch brings for its accelerators is
# left out: torch itself pins it, and only on the platforms that have it.
set -euo pipefail
echo "# Made by 'make lock'. Every package of the development environment, pinned."
"$1" freeze --exclude-editable | grep -vE '^(nvidia-|cuda-|triton|radixstate)'
