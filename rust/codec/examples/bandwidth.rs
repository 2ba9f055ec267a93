//! Measures store and load against `memcpy`, in GB/s of bytes read plus bytes written.
//!
//! ```text
//! cargo run --release -p radixstate-codec --example bandwidth -- [threads]
//! ```
//!
//! Buffers exceed the last-level cache; each number is the best of several rounds, taken in turns.

use std::num::NonZeroUsize;
use std::time::Instant;

use radixstate_codec::{Backend, Checkpoint, Layout, Pair, Plan, Pool, Shape, Spec, StateType};

const LAYERS: usize = 8;
const SLOTS: usize = 9;
const SHAPE: Shape = Shape { heads: 32, d_k: 128, d_v: 128 };
const ROUNDS: usize = 7;

/// A zeroed buffer that starts at a cache line, as torch's do.
struct Buffer(Vec<u8>);

impl Buffer {
    fn new(bytes: usize) -> Self {
        Self(vec![0; bytes + 64])
    }

    fn address(&mut self) -> usize {
        self.0.as_mut_ptr().expose_provenance().next_multiple_of(64)
    }

    /// The buffer as a contiguous pool whose heads have rows of `columns` elements.
    fn pool(&mut self, columns: usize, rows: usize, bytes: usize) -> Pool {
        let row_stride = columns * bytes;
        let head_stride = rows * row_stride;
        let slot_stride = SHAPE.heads * head_stride;
        let base = self.address();
        let layers = (0..LAYERS).map(|layer| base + layer * SLOTS * slot_stride).collect();
        Pool { layers, slots: SLOTS, slot_stride, head_stride, row_stride }
    }
}

/// Fills with finite numbers of every type: exponents stay in the middle.
fn fill(buffer: &mut Buffer) {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    for bytes in buffer.0.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.copy_from_slice(&(x & 0xbfff_bfff_bfff_bfff).to_ne_bytes());
    }
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// `memcpy` with the given number of threads.
fn copy(source: &[u8], target: &mut [u8], threads: usize) {
    let part = source.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (x, y) in source.chunks(part).zip(target.chunks_mut(part)) {
            scope.spawn(move || y.copy_from_slice(x));
        }
    });
}

fn measure(state: StateType, layout: Layout, backend: Backend, threads: NonZeroUsize) {
    let elements = LAYERS * SLOTS * SHAPE.heads * SHAPE.d_k * SHAPE.d_v;
    let channels = LAYERS * SLOTS * SHAPE.heads * SHAPE.d_k;
    let (rows, columns) = match layout {
        Layout::KLast => (SHAPE.d_v, SHAPE.d_k),
        Layout::VLast => (SHAPE.d_k, SHAPE.d_v),
    };
    let mut active = Buffer::new(elements * state.bytes());
    let mut copied = Buffer::new(elements * state.bytes());
    let (mut q, mut scale) = (Buffer::new(elements), Buffer::new(channels * state.scale().bytes()));
    fill(&mut active);
    let spec = Spec {
        state,
        layout,
        shape: SHAPE,
        active: active.pool(columns, rows, state.bytes()),
        checkpoint: Checkpoint::Int8 {
            q: q.pool(columns, rows, 1),
            scale: scale.pool(SHAPE.d_k, 1, state.scale().bytes()),
        },
        windows: Vec::new(),
    };
    let plan = Plan::new(spec).expect("the spec is sound").with_backend(backend);
    let pairs: Vec<_> = (1..SLOTS as u32).map(|slot| Pair { source: slot, destination: slot }).collect();

    let mut best = [f64::INFINITY; 3];
    for _ in 0..ROUNDS {
        let times = [
            seconds(|| copy(&active.0, &mut copied.0, threads.get())),
            // SAFETY: the pools lie within the buffers above, which nobody else uses now.
            seconds(|| drop(unsafe { plan.store(&pairs, threads) }.expect("the pairs are sound"))),
            // SAFETY: as above.
            seconds(|| unsafe { plan.load(&pairs, threads) }.expect("the pairs are sound")),
        ];
        best = std::array::from_fn(|i| best[i].min(times[i]));
    }
    let usable = (SLOTS - 1) as f64 / SLOTS as f64;
    let moved = (elements * (state.bytes() + 1) + channels * state.scale().bytes()) as f64 * usable;
    let memcpy = 2.0 * active.0.len() as f64 / best[0] / 1e9;
    let [store, load] = [moved / best[1] / 1e9, moved / best[2] / 1e9];
    let percent = |speed: f64| 100.0 * speed / memcpy;
    println!(
        "{:6} {:5} {:5}  memcpy {memcpy:5.1}  store {store:5.1} ({:.0}%)  load {load:5.1} ({:.0}%)",
        backend.to_string(),
        format!("{state:?}"),
        format!("{layout:?}"),
        percent(store),
        percent(load),
    );
}

fn main() {
    let threads = std::env::args().nth(1).map_or(1, |n| n.parse().expect("threads must be a number of at least 1"));
    let threads = NonZeroUsize::new(threads).expect("threads must be at least 1");
    println!("GB/s, {threads} threads, {LAYERS} layers, {} slots, {SHAPE:?}, best of {ROUNDS}", SLOTS - 1);
    for backend in Backend::available() {
        if matches!(backend, Backend::Scalar) {
            continue;
        }
        for state in [StateType::Bf16, StateType::Fp16, StateType::Fp32] {
            for layout in [Layout::KLast, Layout::VLast] {
                measure(state, layout, backend, threads);
            }
        }
    }
}
