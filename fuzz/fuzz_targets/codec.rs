//! The contract, the backends and the check of specs. A plain test replays the corpus: `cargo test --test codec corpus`.
#![no_main]

#[path = "../../rust/codec/tests/codec/common.rs"]
mod common;
#[path = "../../rust/codec/tests/codec/head.rs"]
mod head;
#[path = "../../rust/codec/tests/codec/replay.rs"]
mod replay;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = replay::replay(bytes);
});
