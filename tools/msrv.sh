#!/usr/bin/env bash
# Builds the workspace, and tests the crates that need no Python, with the Rust that `rust-version` promises.
# Where that cannot be had it says so; with CI=true it fails as well, if there is a rustup that should have fetched it.
set -euo pipefail
cd "$(dirname "$0")/.."

promised=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
[[ -n "$promised" ]] || { echo "Cargo.toml has no rust-version" >&2; exit 1; }
[[ "$promised" == *.*.* ]] || promised+=.0 # rustup would take 1.89 for the newest 1.89.x

unchecked() {
    printf '\n*** NOT CHECKED with Rust %s, which Cargo.toml promises: %s ***\n\n' "$promised" "$1" >&2
}

if [[ "$(rustc --version)" == "rustc $promised "* ]]; then
    cargo=(cargo)
elif ! command -v rustup >/dev/null; then
    unchecked "there is no rustup to fetch it"
    exit 0
else
    if ! rustup run "$promised" rustc --version >/dev/null 2>&1 &&
        ! rustup toolchain install --profile minimal "$promised"; then
        unchecked "rustup could not fetch it"
        [[ "${CI:-}" != true ]]
        exit
    fi
    cargo=(rustup run "$promised" cargo)
fi

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/msrv"
"${cargo[@]}" check --locked --workspace --all-targets
"${cargo[@]}" test --locked
