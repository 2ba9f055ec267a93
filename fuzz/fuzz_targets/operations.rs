//! Operations on the cache and on a naive one. A plain test replays the corpus: `cargo test --test model corpus`.
#![no_main]

#[path = "../../rust/core/tests/model/both/mod.rs"]
mod both;
#[path = "../../rust/core/tests/model/decode.rs"]
mod decode;
#[path = "../../rust/core/tests/model/naive/mod.rs"]
mod naive;
#[path = "../../rust/core/tests/model/ops.rs"]
mod ops;
#[path = "../../rust/core/tests/model/replay.rs"]
mod replay;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    replay::replay(bytes);
});
