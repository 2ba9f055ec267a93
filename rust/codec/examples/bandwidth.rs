//! Measures store and load against `memcpy`, in GB/s of bytes read plus bytes written.
//!
//! ```text
//! cargo run --release -p radixstate-codec --example bandwidth -- [threads] [--json]
//! ```
//!
//! States are those of a Qwen3-Next: 36 layers, 32 heads, 128 x 128. `memcpy` copies as many bytes
//! as the states have, in turns with the codec. Rates are medians over the rounds, and so is the
//! ratio of the two of a round: others that use the machine slow down both. What one round touches
//! has left the cache by the next. With `--json`, one object per line and direction.
//! `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` puts all of it into huge pages.

use std::num::NonZeroUsize;
use std::time::Instant;

use radixstate_codec::{
    Backend, Checkpoint, Format, Layout, Pair, Plan, Shape, Spec, StateType, Strided,
};

const LAYERS: usize = 36;
const SHAPE: Shape = Shape {
    heads: 32,
    d_k: 128,
    d_v: 128,
};
/// Slots that are moved in turns; twice as many as one call moves at most, so that none is in the
/// cache.
const SLOTS: usize = 8;
const PAIRS: [usize; 2] = [1, 4];
const ROUNDS: usize = 25;
/// Rounds before those: the first write to a page costs more than the copy.
const WARM_UP: usize = 8;

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
    fn pool(&mut self, columns: usize, rows: usize, bytes: usize) -> Strided {
        let row_stride = columns * bytes;
        let head_stride = rows * row_stride;
        let slot_stride = SHAPE.heads * head_stride;
        let base = self.address();
        let layers = (0..LAYERS)
            .map(|layer| base + layer * (SLOTS + 1) * slot_stride)
            .collect();
        Strided {
            layers,
            slots: SLOTS + 1,
            slot_stride,
            head_stride,
            row_stride,
        }
    }
}

/// Fills with numbers of every type that are near each other, so that few codes are zero, which
/// some machines write faster.
fn fill(buffer: &mut Buffer) {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    for bytes in buffer.0.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.copy_from_slice(&(x & 0x80ff_80ff_80ff_80ff | 0x3f00_3f00_3f00_3f00).to_ne_bytes());
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// GB/s in one round.
struct Round {
    memcpy: f64,
    store: f64,
    load: f64,
}

/// `memcpy` by the given number of threads, of which this is one.
fn copy(source: &[u8], target: &mut [u8], threads: usize) {
    let part = source.len().div_ceil(threads);
    let mut parts = source.chunks(part).zip(target.chunks_mut(part));
    std::thread::scope(|scope| {
        let mine = parts.next();
        for (x, y) in parts {
            scope.spawn(move || y.copy_from_slice(x));
        }
        mine.into_iter().for_each(|(x, y)| y.copy_from_slice(x));
    });
}

/// Two pools of one type, and two buffers to copy between.
struct Bench {
    state: StateType,
    layout: Layout,
    plan: Plan,
    copied: [Buffer; 2],
    /// Keep the memory of the plan.
    _pools: [Buffer; 3],
}

impl Bench {
    fn new(state: StateType, layout: Layout) -> Self {
        let (rows, columns) = match layout {
            Layout::KLast => (SHAPE.d_v, SHAPE.d_k),
            Layout::VLast => (SHAPE.d_k, SHAPE.d_v),
        };
        let slots = SLOTS + 1;
        let mut active = Buffer::new(slots * state_bytes(state));
        let mut q = Buffer::new(slots * elements());
        let mut scale = Buffer::new(slots * scale_bytes(state));
        fill(&mut active);
        let spec = Spec {
            state,
            layout,
            shape: SHAPE,
            active: active.pool(columns, rows, state.bytes()),
            checkpoint: Checkpoint {
                format: Format::Int8,
                rows: q.pool(columns, rows, 1),
                scales: Some(scale.pool(SHAPE.d_k, 1, state.scale().bytes())),
            },
            windows: Vec::new(),
        };
        let plan = Plan::new(spec).expect("the spec is sound");
        let mut copied = [(); 2].map(|()| Buffer::new(SLOTS * state_bytes(state)));
        // Pages that were never written are one page, which stays in the cache.
        copied.iter_mut().for_each(fill);
        Self {
            state,
            layout,
            plan,
            copied,
            _pools: [active, q, scale],
        }
    }

    fn measure(&mut self, backend: Backend, pairs: usize, threads: NonZeroUsize) -> Vec<Round> {
        let plan = self.plan.clone().with_backend(backend);
        let bytes = state_bytes(self.state) * pairs;
        let moved = bytes + (elements() + scale_bytes(self.state)) * pairs;
        let rate = |bytes: usize, work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            bytes as f64 / start.elapsed().as_secs_f64() / 1e9
        };
        let rounds = (0..WARM_UP + ROUNDS).map(|round| {
            // A load reads what was stored half the slots ago.
            let stored = turn(round, pairs);
            let loaded = turn(round + SLOTS / 2 / pairs, pairs);
            let [from, to] = &mut self.copied;
            let part = (stored[0].source as usize - 1) * state_bytes(self.state)..;
            let from = &from.0[part.clone()][..bytes];
            let to = &mut to.0[part][..bytes];
            Round {
                memcpy: rate(2 * bytes, &mut || copy(from, to, threads.get())),
                store: rate(moved, &mut || {
                    // SAFETY: the pools lie within the buffers of `self`, which nobody else uses now.
                    let finite = unsafe { plan.store(&stored, threads) };
                    drop(finite.expect("the pairs are sound"));
                }),
                load: rate(moved, &mut || {
                    // SAFETY: as above.
                    unsafe { plan.load(&loaded, threads) }.expect("the pairs are sound")
                }),
            }
        });
        rounds.skip(WARM_UP).collect()
    }

    fn print(
        &self,
        backend: Backend,
        pairs: usize,
        threads: NonZeroUsize,
        json: bool,
        rounds: &[Round],
    ) {
        let state = self.state_name();
        let layout = self.layout_name();
        let memcpy = median(rounds.iter().map(|round| round.memcpy));
        for (direction, pick) in [
            ("store", (|round| round.store) as fn(&Round) -> f64),
            ("load", |round| round.load),
        ] {
            let rate = median(rounds.iter().map(pick));
            let ratio = median(rounds.iter().map(|round| pick(round) / round.memcpy));
            if json {
                print!(
                    r#"{{"type": "{state}", "layout": "{layout}", "direction": "{direction}", "#
                );
                print!(r#""threads": {threads}, "pairs": {pairs}, "backend": "{backend}", "#);
                println!(
                    r#""gb_per_s": {rate:.3}, "memcpy_gb_per_s": {memcpy:.3}, "ratio": {ratio:.3}}}"#
                );
            } else {
                print!(
                    "{:7} {state:5} {layout:7} {direction:6} {pairs} pairs ",
                    backend.to_string()
                );
                println!(
                    "{rate:6.1} GB/s  memcpy {memcpy:6.1}  {:4.0}%",
                    100.0 * ratio
                );
            }
        }
    }

    fn state_name(&self) -> &'static str {
        match self.state {
            StateType::Bf16 => "bf16",
            StateType::Fp16 => "fp16",
            StateType::Fp32 => "fp32",
        }
    }

    fn layout_name(&self) -> &'static str {
        match self.layout {
            Layout::KLast => "k_last",
            Layout::VLast => "v_last",
        }
    }
}

/// Elements of one slot, all layers.
fn elements() -> usize {
    LAYERS * SHAPE.heads * SHAPE.d_k * SHAPE.d_v
}

fn state_bytes(state: StateType) -> usize {
    elements() * state.bytes()
}

fn scale_bytes(state: StateType) -> usize {
    LAYERS * SHAPE.heads * SHAPE.d_k * state.scale().bytes()
}

/// The pairs whose turn it is.
fn turn(round: usize, pairs: usize) -> Vec<Pair> {
    let first = round * pairs % SLOTS + 1;
    (first..first + pairs)
        .map(|slot| slot as u32)
        .map(|slot| Pair {
            source: slot,
            destination: slot,
        })
        .collect()
}

fn main() {
    let mut arguments: Vec<_> = std::env::args().skip(1).collect();
    let json = arguments.iter().any(|argument| argument == "--json");
    arguments.retain(|argument| argument != "--json");
    let threads = arguments.first().map_or(1, |n| {
        n.parse().expect("threads must be a number of at least 1")
    });
    let threads = NonZeroUsize::new(threads).expect("threads must be at least 1");
    if !json {
        println!("{threads} threads, {LAYERS} layers, {SHAPE:?}, medians of {ROUNDS} rounds");
    }
    for state in [StateType::Bf16, StateType::Fp16, StateType::Fp32] {
        for layout in [Layout::KLast, Layout::VLast] {
            let mut bench = Bench::new(state, layout);
            for backend in Backend::available()
                .into_iter()
                .filter(|backend| !matches!(backend, Backend::Scalar))
            {
                for pairs in PAIRS {
                    let rounds = bench.measure(backend, pairs, threads);
                    bench.print(backend, pairs, threads, json, &rounds);
                }
            }
        }
    }
}
