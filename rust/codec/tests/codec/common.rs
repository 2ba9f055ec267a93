//! Two pools in owned buffers, filled from a seed, and everything a round trip leaves behind.

use std::num::NonZeroUsize;

use radixstate_codec::{
    Backend, Checkpoint, Format, Layout, Pair, Plan, Shape, Spec, StateType, Strided, Window,
};

/// What an unwritten byte looks like.
pub(crate) const UNWRITTEN: u8 = 0x7f;

/// Bytes of the one window of every case: odd, and more than a register.
pub(crate) const WINDOW_BYTES: usize = 101;

/// What the elements of a state are drawn from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Values {
    /// Around one.
    Usual,
    /// Every finite bit pattern, subnormals included.
    Finite,
    /// Usual, with a few zeros, subnormals, largest finite values, Inf and NaN.
    Edges,
    /// Every bit pattern.
    Any,
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) state: StateType,
    pub(crate) layout: Layout,
    pub(crate) format: Format,
    pub(crate) shape: Shape,
    pub(crate) layers: usize,
    pub(crate) slots: usize,
    /// Bytes by which every buffer and every row is pushed off alignment.
    pub(crate) skew: usize,
    pub(crate) values: Values,
    pub(crate) seed: u64,
}

/// Every byte after a store of slots into reversed slots and a load into a second active pool.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) finite: Vec<bool>,
    pub(crate) checkpoint: Vec<u8>,
    pub(crate) scale: Vec<u8>,
    pub(crate) window: Vec<u8>,
    pub(crate) reloaded: Vec<u8>,
    pub(crate) reloaded_window: Vec<u8>,
}

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }
}

/// A buffer that starts at a cache line, or `skew` bytes after one.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    fn new(len: usize, skew: usize) -> Self {
        let bytes = vec![UNWRITTEN; len + 64 + skew];
        let address = bytes.as_ptr().addr();
        Self {
            start: address.next_multiple_of(64) - address + skew,
            bytes,
            len,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }

    fn address(&mut self) -> usize {
        self.bytes.as_mut_ptr().expose_provenance() + self.start
    }
}

impl Case {
    /// A pool whose layer holds `[slots, heads, rows, row_bytes]`, with `skew` bytes between rows,
    /// heads and slots.
    fn pool(&self, heads: usize, rows: usize, row_bytes: usize) -> (Memory, Strided) {
        let row_stride = row_bytes + self.skew;
        let head_stride = rows * row_stride + self.skew;
        let slot_stride = heads * head_stride + self.skew;
        let layer = self.slots * slot_stride;
        let mut memory = Memory::new(self.layers * layer, self.skew);
        let base = memory.address();
        let layers = (0..self.layers).map(|i| base + i * layer).collect();
        (
            memory,
            Strided {
                layers,
                slots: self.slots,
                slot_stride,
                head_stride,
                row_stride,
            },
        )
    }

    fn matrix(&self) -> (usize, usize) {
        match self.layout {
            Layout::KLast => (self.shape.d_v, self.shape.d_k),
            Layout::VLast => (self.shape.d_k, self.shape.d_v),
        }
    }

    pub(crate) fn active(&self) -> (Memory, Strided) {
        let (rows, columns) = self.matrix();
        self.pool(self.shape.heads, rows, columns * self.state.bytes())
    }

    pub(crate) fn checkpoint(&self) -> (Memory, Strided) {
        let (rows, columns) = self.matrix();
        let bytes = match self.format {
            Format::Native => self.state.bytes(),
            Format::Bf16 => 2,
            Format::Int8 => 1,
        };
        self.pool(self.shape.heads, rows, columns * bytes)
    }

    pub(crate) fn scale(&self) -> (Memory, Strided) {
        self.pool(
            self.shape.heads,
            1,
            self.shape.d_k * self.state.scale().bytes(),
        )
    }

    pub(crate) fn window(&self) -> (Memory, Strided) {
        self.pool(1, 1, WINDOW_BYTES)
    }

    pub(crate) fn spec(
        &self,
        active: Strided,
        pool: Strided,
        scale: Strided,
        windows: Vec<Window>,
    ) -> Spec {
        let checkpoint = Checkpoint {
            format: self.format,
            rows: pool,
            scales: (self.format == Format::Int8).then_some(scale),
        };
        Spec {
            state: self.state,
            layout: self.layout,
            shape: self.shape,
            active,
            checkpoint,
            windows,
        }
    }

    /// Slots in order to slots in reverse order; slot 0 takes no part.
    pub(crate) fn pairs(&self) -> Vec<Pair> {
        let n = self.slots as u32;
        (1..n)
            .map(|slot| Pair {
                source: slot,
                destination: n - slot,
            })
            .collect()
    }

    /// Fills a pool with elements of the case's values.
    pub(crate) fn fill(&self, memory: &mut Memory) {
        let mut random = Random::new(self.seed);
        let size = self.state.bytes();
        // A skew that splits elements only changes which bits meet in one.
        for element in memory.bytes_mut().chunks_exact_mut(size) {
            let bits = self.element(&mut random);
            element.copy_from_slice(&bits.to_ne_bytes()[..size]);
        }
    }

    fn element(&self, random: &mut Random) -> u32 {
        let (exponent, one, width) = match self.state {
            StateType::Bf16 => (0x7f80, 0x3f80, 16),
            StateType::Fp16 => (0x7c00, 0x3c00, 16),
            StateType::Fp32 => (0x7f80_0000, 0x3f80_0000, 32),
        };
        let bits = random.next() >> (32 - width);
        let fraction = bits & !exponent;
        let finite = if bits & exponent == exponent {
            fraction
        } else {
            bits
        };
        let usual = fraction | one;
        match self.values {
            Values::Usual => usual,
            Values::Finite => finite,
            Values::Any => bits,
            Values::Edges => match random.next() % 4096 {
                0 => exponent,
                1 => exponent | 1,
                2 => exponent - 1,
                3..400 => 0,
                400..800 => fraction,
                _ => usual,
            },
        }
    }

    /// Stores, then loads into a second active pool.
    pub(crate) fn run(&self, backend: Backend, threads: usize) -> Outcome {
        let threads = NonZeroUsize::new(threads).expect("at least one thread");
        let (mut active, active_pool) = self.active();
        let (checkpoint, checkpoint_pool) = self.checkpoint();
        let (scale, scale_pool) = self.scale();
        let (mut window, window_pool) = self.window();
        let (window_kept, window_kept_pool) = self.window();
        let (reloaded, reloaded_pool) = self.active();
        let (reloaded_window, reloaded_window_pool) = self.window();
        self.fill(&mut active);
        self.fill(&mut window);
        let plan = |active: Strided, window: Strided| {
            let windows = vec![Window {
                active: window,
                checkpoint: window_kept_pool.clone(),
                bytes: WINDOW_BYTES,
                // Else most verdicts would be the window's, whatever the state holds.
                element: (self.seed % 2 == 1).then_some(self.state),
            }];
            let spec = self.spec(active, checkpoint_pool.clone(), scale_pool.clone(), windows);
            Plan::new(spec)
                .expect("the spec is sound")
                .with_backend(backend)
        };
        let pairs = self.pairs();
        // SAFETY: every pool lies within a buffer of its own, which nobody else uses now.
        let finite =
            unsafe { plan(active_pool, window_pool).store(&pairs, threads) }.expect("sound pairs");
        // SAFETY: as above.
        unsafe { plan(reloaded_pool, reloaded_window_pool).load(&pairs, threads) }
            .expect("sound pairs");
        Outcome {
            finite,
            checkpoint: checkpoint.bytes().to_vec(),
            scale: scale.bytes().to_vec(),
            window: window_kept.bytes().to_vec(),
            reloaded: reloaded.bytes().to_vec(),
            reloaded_window: reloaded_window.bytes().to_vec(),
        }
    }

    /// Clears a slot of a filled pool and of its window. What both hold then, and what they should.
    pub(crate) fn clear(&self, slot: u32, threads: usize) -> [(Vec<u8>, Vec<u8>); 2] {
        let threads = NonZeroUsize::new(threads).expect("at least one thread");
        let (mut active, active_pool) = self.active();
        let (mut window, window_pool) = self.window();
        self.fill(&mut active);
        self.fill(&mut window);
        let (rows, columns) = self.matrix();
        let row = columns * self.state.bytes();
        let cleared = [
            zeroed(
                &mut active,
                &active_pool,
                [slot as usize, self.shape.heads, rows, row],
            ),
            zeroed(
                &mut window,
                &window_pool,
                [slot as usize, 1, 1, WINDOW_BYTES],
            ),
        ];
        let (_checkpoint, checkpoint_pool) = self.checkpoint();
        let (_scale, scale_pool) = self.scale();
        let (_kept, kept_pool) = self.window();
        let windows = vec![Window {
            active: window_pool,
            checkpoint: kept_pool,
            bytes: WINDOW_BYTES,
            element: None,
        }];
        let plan = Plan::new(self.spec(active_pool, checkpoint_pool, scale_pool, windows))
            .expect("the spec is sound");
        // SAFETY: every pool lies within a buffer of its own, which nobody else uses now.
        unsafe { plan.clear(slot, threads) }.expect("a sound slot");
        let [state, window_cleared] = cleared;
        [
            (active.bytes().to_vec(), state),
            (window.bytes().to_vec(), window_cleared),
        ]
    }

    /// Every backend leaves the bytes that the oracle leaves.
    pub(crate) fn agree(&self, threads: usize) {
        let oracle = self.run(Backend::Scalar, 1);
        for backend in Backend::available() {
            assert!(
                self.run(backend, threads) == oracle,
                "{backend:?} with {threads} threads differs in {self:?}"
            );
        }
    }
}

/// What a buffer holds, with zeros in all rows of one slot of all layers.
fn zeroed(memory: &mut Memory, pool: &Strided, [slot, heads, rows, row]: [usize; 4]) -> Vec<u8> {
    let base = memory.address();
    let mut bytes = memory.bytes().to_vec();
    for layer in &pool.layers {
        for (head, index) in (0..heads).flat_map(|head| (0..rows).map(move |index| (head, index))) {
            let start = layer - base
                + slot * pool.slot_stride
                + head * pool.head_stride
                + index * pool.row_stride;
            bytes[start..start + row].fill(0);
        }
    }
    bytes
}
