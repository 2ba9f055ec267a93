//! From addresses to slices. The only place that does so; knows nothing of numbers.

use std::marker::PhantomData;
use std::ops::Range;

use crate::spec::{HeadBytes, Pair, Spec, StateType, Strided, Window};

/// The matrix of one head, for reading: rows of bytes.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    base: *const u8,
    rows: usize,
    row_bytes: usize,
    row_stride: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Matrix<'a> {
    #[inline(always)]
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        assert!(row < self.rows);
        // SAFETY: the row is one of the matrix's, whose memory is valid for 'a and not written during
        // it.
        unsafe { std::slice::from_raw_parts(self.base.add(row * self.row_stride), self.row_bytes) }
    }
}

/// The matrix of one head, for writing: rows of bytes.
pub(crate) struct MatrixMut<'a> {
    base: *mut u8,
    rows: usize,
    row_bytes: usize,
    row_stride: usize,
    memory: PhantomData<&'a mut [u8]>,
}

impl MatrixMut<'_> {
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [u8] {
        let [row] = self.rows(row);
        row
    }

    /// Zeroes all rows.
    fn clear(&mut self) {
        for row in 0..self.rows {
            self.row(row).fill(0);
        }
    }

    /// `N` rows from `first` on.
    #[inline(always)]
    pub(crate) fn rows<const N: usize>(&mut self, first: usize) -> [&mut [u8]; N] {
        assert!(first + N <= self.rows);
        // SAFETY: the rows are the matrix's, whose memory is valid for 'a and has no other user
        // during it; they do not overlap, since the spec was checked, and the borrow of
        // `self` keeps them from being handed out twice.
        std::array::from_fn(|i| unsafe {
            std::slice::from_raw_parts_mut(
                self.base.add((first + i) * self.row_stride),
                self.row_bytes,
            )
        })
    }
}

/// One head of one pair: what to read and where to write. A pool without scales has empty ones.
pub(crate) struct Item<'a> {
    pub(crate) pair: usize,
    pub(crate) source: Matrix<'a>,
    pub(crate) source_scale: &'a [u8],
    pub(crate) target: MatrixMut<'a>,
    pub(crate) target_scale: &'a mut [u8],
}

/// One window of one pair.
struct Passing<'a> {
    pair: usize,
    source: &'a [u8],
    target: &'a mut [u8],
    element: Option<StateType>,
}

/// One of the two pools of a plan, as the source or the target of a transfer.
#[derive(Clone)]
struct End<'a> {
    rows: &'a Strided,
    row_bytes: usize,
    scales: Option<&'a Strided>,
    scale_bytes: usize,
    windows: Vec<&'a Strided>,
}

impl<'a> End<'a> {
    fn active(spec: &'a Spec) -> Self {
        Self {
            rows: &spec.active,
            row_bytes: spec.shape.matrix(spec.layout).1 * spec.state.bytes(),
            scales: None,
            scale_bytes: 0,
            windows: spec.windows.iter().map(|window| &window.active).collect(),
        }
    }

    fn checkpoint(spec: &'a Spec, head: HeadBytes) -> Self {
        Self {
            rows: &spec.checkpoint.rows,
            row_bytes: head.row,
            scales: spec.checkpoint.scales.as_ref(),
            scale_bytes: head.scales,
            windows: spec
                .windows
                .iter()
                .map(|window| &window.checkpoint)
                .collect(),
        }
    }
}

/// The address of one head of one slot, or of one slot of a pool without heads.
fn address(pool: &Strided, layer: usize, slot: u32, head: usize) -> *mut u8 {
    let offset = slot as usize * pool.slot_stride + head * pool.head_stride;
    std::ptr::with_exposed_provenance_mut(pool.layers[layer] + offset)
}

/// A part of a transfer. No two shares, and no two items of one share, write the same memory.
pub(crate) struct Share<'a> {
    spec: &'a Spec,
    pairs: &'a [Pair],
    source: End<'a>,
    target: End<'a>,
    heads: Range<usize>,
    windows: Range<usize>,
}

/// Which way a transfer goes.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    Store,
    Load,
}

/// Splits a transfer into at most `parts` shares of about equal size.
///
/// # Safety
///
/// Until the last share and the last item taken from one are gone:
/// - every byte of the source slots is valid for reads and is not written;
/// - every byte of the destination slots is valid for writes and has no other reader or writer;
/// - the spec has passed its check with the same `head`, every slot is in range, and the destination
///   slots are distinct.
pub(crate) unsafe fn split<'a>(
    spec: &'a Spec,
    head: HeadBytes,
    pairs: &'a [Pair],
    direction: Direction,
    parts: usize,
) -> Vec<Share<'a>> {
    let active = End::active(spec);
    let checkpoint = End::checkpoint(spec, head);
    let (source, target) = match direction {
        Direction::Store => (active, checkpoint),
        Direction::Load => (checkpoint, active),
    };
    let columns = spec.active.layers.len() * pairs.len();
    let heads = columns * spec.shape.heads;
    let windows = columns * spec.windows.len();
    let parts = parts.min(heads).max(1);
    let cut = |n: usize, part: usize| n / parts * part + (n % parts).min(part);
    (0..parts)
        .map(|part| Share {
            spec,
            pairs,
            source: source.clone(),
            target: target.clone(),
            heads: cut(heads, part)..cut(heads, part + 1),
            windows: cut(windows, part)..cut(windows, part + 1),
        })
        .collect()
}

impl<'a> Share<'a> {
    pub(crate) fn spec(&self) -> &'a Spec {
        self.spec
    }

    /// Layer, pair and head (or window) of a position: the innermost of `inner` moves fastest.
    fn place(&self, index: usize, inner: usize) -> (usize, usize, usize) {
        let outer = index / inner;
        (
            outer / self.pairs.len(),
            outer % self.pairs.len(),
            index % inner,
        )
    }

    fn source_matrix(&self, index: usize) -> Matrix<'a> {
        let (layer, pair, head) = self.place(index, self.spec.shape.heads);
        Matrix {
            base: address(self.source.rows, layer, self.pairs[pair].source, head),
            rows: self.spec.shape.matrix(self.spec.layout).0,
            row_bytes: self.source.row_bytes,
            row_stride: self.source.rows.row_stride,
            memory: PhantomData,
        }
    }

    fn target_matrix(&self, index: usize) -> MatrixMut<'a> {
        let (layer, pair, head) = self.place(index, self.spec.shape.heads);
        MatrixMut {
            base: address(self.target.rows, layer, self.pairs[pair].destination, head),
            rows: self.spec.shape.matrix(self.spec.layout).0,
            row_bytes: self.target.row_bytes,
            row_stride: self.target.rows.row_stride,
            memory: PhantomData,
        }
    }

    /// Takes the next head; none is given twice.
    pub(crate) fn next_head(&mut self) -> Option<Item<'a>> {
        let index = self.heads.next()?;
        let (layer, pair, head) = self.place(index, self.spec.shape.heads);
        let Pair {
            source,
            destination,
        } = self.pairs[pair];
        let source_scale = self.source.scales.map_or(&[][..], |scales| {
            let start = address(scales, layer, source, head);
            // SAFETY: the caller of `split` vouches for the scales of the source slots.
            unsafe { std::slice::from_raw_parts(start, self.source.scale_bytes) }
        });
        let target_scale = self.target.scales.map_or(&mut [][..], |scales| {
            let start = address(scales, layer, destination, head);
            // SAFETY: the caller of `split` vouches for the scales of the destination slots, and
            // that they are distinct; shares have distinct positions and each gives a
            // position once.
            unsafe { std::slice::from_raw_parts_mut(start, self.target.scale_bytes) }
        });
        Some(Item {
            pair,
            source: self.source_matrix(index),
            source_scale,
            target: self.target_matrix(index),
            target_scale,
        })
    }

    /// Zeroes what the share would write of a load. Reads nothing.
    pub(crate) fn clear(mut self) {
        while let Some(index) = self.heads.next() {
            self.target_matrix(index).clear();
        }
        while let Some(index) = self.windows.next() {
            self.target_window(index).fill(0);
        }
    }

    /// Copies the share's windows of a load. They are small: `memcpy` serves every backend.
    pub(crate) fn load_windows(mut self) {
        while let Some(window) = self.next_window() {
            window.target.copy_from_slice(window.source);
        }
    }

    /// Copies the share's windows of a store; calls `refuse` with each pair of which one is not
    /// finite.
    #[inline(always)]
    pub(crate) fn store_windows(mut self, refuse: impl Fn(usize)) {
        while let Some(window) = self.next_window() {
            let mut finite = true;
            let blocks = window.target.chunks_mut(WINDOW_BLOCK);
            for (target, source) in blocks.zip(window.source.chunks(WINDOW_BLOCK)) {
                target.copy_from_slice(source);
                finite &= window
                    .element
                    .is_none_or(|element| all_finite(element, source));
            }
            if !finite {
                refuse(window.pair);
            }
        }
    }

    /// Takes the next window; none is given twice.
    fn next_window(&mut self) -> Option<Passing<'a>> {
        let index = self.windows.next()?;
        let (layer, pair, window) = self.place(index, self.spec.windows.len());
        let Window { bytes, element, .. } = self.spec.windows[window];
        let from = address(
            self.source.windows[window],
            layer,
            self.pairs[pair].source,
            0,
        );
        // SAFETY: the caller of `split` vouches for the windows of the source slots.
        let source = unsafe { std::slice::from_raw_parts(from, bytes) };
        Some(Passing {
            pair,
            source,
            target: self.target_window(index),
            element,
        })
    }

    /// The window at a position that was just taken from `windows`.
    fn target_window(&mut self, index: usize) -> &'a mut [u8] {
        let (layer, pair, window) = self.place(index, self.spec.windows.len());
        let slot = self.pairs[pair].destination;
        let to = address(self.target.windows[window], layer, slot, 0);
        // SAFETY: the caller of `split` vouches for the windows of the destination slots, and that
        // they are distinct; shares have distinct positions and each gives a position once.
        unsafe { std::slice::from_raw_parts_mut(to, self.spec.windows[window].bytes) }
    }
}

/// Bytes of a window that are copied and then asked whether they are finite: they are still in the
/// nearest cache, and whole elements.
const WINDOW_BLOCK: usize = 4096;

/// Whether every element is finite. A rest that is no whole element is not asked.
#[inline(always)]
fn all_finite(element: StateType, bytes: &[u8]) -> bool {
    match element {
        StateType::Bf16 => no_sixteen_bits(bytes, 0x7f80),
        StateType::Fp16 => no_sixteen_bits(bytes, 0x7c00),
        StateType::Fp32 => {
            let exponent = 0x7f80_0000;
            let found =
                |x: &[u8]| u32::from_ne_bytes([x[0], x[1], x[2], x[3]]) & exponent == exponent;
            !bytes.chunks_exact(4).fold(false, |any, x| any | found(x))
        }
    }
}

/// Whether no element has all bits of the exponent. Goes on when one has: so it is vectorized.
#[inline(always)]
fn no_sixteen_bits(bytes: &[u8], exponent: u16) -> bool {
    let found = |x: &[u8]| u16::from_ne_bytes([x[0], x[1]]) & exponent == exponent;
    !bytes.chunks_exact(2).fold(false, |any, x| any | found(x))
}

/// What only vector code asks.
#[cfg(target_arch = "x86_64")]
impl<'a> Share<'a> {
    /// Bytes of states that the whole transfer writes.
    pub(crate) fn transfer_bytes(&self) -> usize {
        let rows = self.spec.shape.heads * self.spec.shape.matrix(self.spec.layout).0;
        self.spec.active.layers.len() * self.pairs.len() * rows * self.target.row_bytes
    }

    /// What the next item will read.
    pub(crate) fn ahead(&self) -> Option<Matrix<'a>> {
        (!self.heads.is_empty()).then(|| self.source_matrix(self.heads.start))
    }
}

// SAFETY: a share is the only user of the memory it writes, and nobody writes what it reads.
unsafe impl Send for Share<'_> {}
