//! Operations on the cache and on a naive one. A plain test replays the corpus: `cargo test --test model corpus`.
#![no_main]

#[path = "../../rust/core/tests/model/differential/mod.rs"]
mod differential;
#[path = "../../rust/core/tests/model/oracle/mod.rs"]
mod oracle;
#[path = "../../rust/core/tests/model/replay.rs"]
mod replay;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    replay::replay(bytes);
});
