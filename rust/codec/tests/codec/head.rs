//! The contract of the int8 format, written a second time.

use std::num::NonZeroUsize;

use radixstate_codec::{
    Backend, Checkpoint, Format, Layout, Pair, Plan, Shape, Spec, StateType, Strided,
};

pub(crate) const PAIR: [Pair; 1] = [Pair {
    source: 1,
    destination: 1,
}];

/// One slot of one layer and head: the elements as bits, row by row.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) state: StateType,
    pub(crate) layout: Layout,
    pub(crate) d_k: usize,
    pub(crate) d_v: usize,
    pub(crate) elements: Vec<u32>,
}

/// A stored and reloaded head: scales and elements as bits.
pub(crate) struct Stored {
    finite: bool,
    pub(crate) scale: Vec<u32>,
    q: Vec<i8>,
    pub(crate) reloaded: Vec<u32>,
}

impl Head {
    fn bytes(&self) -> Vec<u8> {
        let size = self.state.bytes();
        self.elements
            .iter()
            .flat_map(|bits| bits.to_ne_bytes().into_iter().take(size))
            .collect()
    }

    /// Stores with a backend and loads with it.
    pub(crate) fn store(&self, backend: Backend) -> Stored {
        let bytes = self.bytes();
        let scale_size = self.state.scale().bytes();
        // Slot 0 is the padding sink: it stays as it is, filled with ones.
        let mut active = [vec![0xff; bytes.len()], bytes.clone()].concat();
        let mut q = vec![0xff; 2 * self.elements.len()];
        let mut scale = vec![0xff; 2 * self.d_k * scale_size];
        let plan = self
            .plan([&mut active, &mut q, &mut scale])
            .with_backend(backend);
        // SAFETY: the pools are the three buffers, which nobody else uses now.
        let finite =
            unsafe { plan.store(&PAIR, NonZeroUsize::MIN) }.expect("slot 1 is in range")[0];
        let mut reloaded = vec![0xff; 2 * bytes.len()];
        let plan = self
            .plan([&mut reloaded, &mut q, &mut scale])
            .with_backend(backend);
        // SAFETY: as above.
        unsafe { plan.load(&PAIR, NonZeroUsize::MIN) }.expect("slot 1 is in range");
        assert_eq!(active[bytes.len()..], bytes, "the source is as it was");
        for buffer in [&active, &q, &scale, &reloaded] {
            assert!(
                buffer[..buffer.len() / 2].iter().all(|&byte| byte == 0xff),
                "the padding sink is as it was"
            );
        }
        Stored {
            finite,
            scale: elements(&scale[self.d_k * scale_size..], scale_size),
            q: q[self.elements.len()..]
                .iter()
                .map(|byte| byte.cast_signed())
                .collect(),
            reloaded: elements(&reloaded[bytes.len()..], self.state.bytes()),
        }
    }

    pub(crate) fn plan(&self, [active, q, scale]: [&mut Vec<u8>; 3]) -> Plan {
        let columns = if self.layout == Layout::KLast {
            self.d_k
        } else {
            self.d_v
        };
        let pool = |buffer: &mut Vec<u8>, row_stride| Strided {
            layers: vec![buffer.as_mut_ptr().expose_provenance()],
            slots: 2,
            slot_stride: buffer.len() / 2,
            head_stride: buffer.len() / 2,
            row_stride,
        };
        let spec = Spec {
            state: self.state,
            layout: self.layout,
            shape: Shape {
                heads: 1,
                d_k: self.d_k,
                d_v: self.d_v,
            },
            active: pool(active, columns * self.state.bytes()),
            checkpoint: Checkpoint {
                format: Format::Int8,
                rows: pool(q, columns),
                scales: Some(pool(scale, 0)),
            },
            windows: Vec::new(),
        };
        Plan::new(spec).expect("the spec is sound")
    }

    /// Indices of the elements of a channel.
    pub(crate) fn channel(&self, k: usize) -> Vec<usize> {
        match self.layout {
            Layout::KLast => (0..self.d_v).map(|v| v * self.d_k + k).collect(),
            Layout::VLast => (0..self.d_v).map(|v| k * self.d_v + v).collect(),
        }
    }

    /// Compares what every backend stores with the formula.
    pub(crate) fn check(&self) {
        for backend in Backend::available() {
            let stored = self.store(backend);
            let finite = (0..self.d_k)
                .filter(|&k| !self.check_channel(k, &stored))
                .count()
                == 0;
            assert_eq!(stored.finite, finite, "{backend:?}");
        }
    }

    /// Compares one channel with the formula; says whether it is finite.
    fn check_channel(&self, k: usize, stored: &Stored) -> bool {
        let places = self.channel(k);
        let values: Vec<f32> = places
            .iter()
            .map(|&i| value(self.state, self.elements[i]))
            .collect();
        if values.iter().any(|x| !x.is_finite()) {
            assert_eq!(stored.scale[k], canonical_nan(self.state.scale()));
            for i in places {
                assert_eq!(
                    (stored.q[i], stored.reloaded[i]),
                    (0, canonical_nan(self.state))
                );
            }
            return false;
        }
        let amax = values.iter().fold(0.0_f32, |amax, x| amax.max(x.abs()));
        let mut bits = nearest(self.state.scale(), amax.max(1e-8) / 127.0);
        if amax == largest(self.state) && self.state != StateType::Fp16 {
            bits -= 1;
        }
        assert_eq!(stored.scale[k], bits, "amax {amax:e}");
        let scale = value(self.state.scale(), bits);
        for (i, x) in places.into_iter().zip(values) {
            let q = (x / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
            assert_eq!(stored.q[i], q, "{x:e} / {scale:e}");
            assert_eq!(
                stored.reloaded[i],
                nearest(self.state, f32::from(q) * scale),
                "{q} * {scale:e}"
            );
            assert!(value(self.state, stored.reloaded[i]).is_finite());
        }
        true
    }
}

pub(crate) fn elements(bytes: &[u8], size: usize) -> Vec<u32> {
    let widen = |element: &[u8]| {
        let mut wide = [0; 4];
        wide[..size].copy_from_slice(element);
        u32::from_le_bytes(wide)
    };
    bytes.chunks_exact(size).map(widen).collect()
}

pub(crate) fn canonical_nan(state: StateType) -> u32 {
    match state {
        StateType::Bf16 => 0x7fc0,
        StateType::Fp16 => 0x7e00,
        StateType::Fp32 => 0x7fc0_0000,
    }
}

pub(crate) fn largest(state: StateType) -> f32 {
    value(
        state,
        match state {
            StateType::Bf16 => 0x7f7f,
            StateType::Fp16 => 0x7bff,
            StateType::Fp32 => 0x7f7f_ffff,
        },
    )
}

/// The number with these bits, from the definition of the format.
pub(crate) fn value(state: StateType, bits: u32) -> f32 {
    let fraction_bits = match state {
        StateType::Bf16 => 7,
        StateType::Fp16 => 10,
        StateType::Fp32 => return f32::from_bits(bits),
    };
    let (bias, top) = if state == StateType::Fp16 {
        (15, 31)
    } else {
        (127, 255)
    };
    let exponent = (bits & 0x7fff) >> fraction_bits;
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
    let magnitude = match exponent {
        0 => fraction * 2_f64.powi(1 - bias),
        e if e == top && fraction == 0.0 => f64::INFINITY,
        e if e == top => f64::NAN,
        e => (1.0 + fraction) * 2_f64.powi(e as i32 - bias),
    };
    (if bits & 0x8000 == 0 {
        magnitude
    } else {
        -magnitude
    }) as f32
}

/// The nearest bits, the even of two: by bisection over all that the format has.
pub(crate) fn nearest(state: StateType, x: f32) -> u32 {
    if state == StateType::Fp32 {
        return x.to_bits();
    }
    if x.is_infinite() {
        return if state == StateType::Bf16 {
            0x7f80
        } else {
            0x7c00
        } | if x < 0.0 { 0x8000 } else { 0 };
    }
    let magnitude = f64::from(x.abs());
    let (mut low, mut high) = (0, 0x7fff);
    while high - low > 1 {
        let middle = u32::midpoint(low, high);
        // NaN compares as false and so counts as too large.
        if f64::from(value(state, middle)) <= magnitude {
            low = middle
        } else {
            high = middle
        }
    }
    let below = f64::from(value(state, low));
    // Where the format ends, Inf stands for the next step.
    let above = match f64::from(value(state, low + 1)) {
        next if next.is_finite() => next,
        _ => 2.0 * below - f64::from(value(state, low - 1)),
    };
    let up = above - magnitude < magnitude - below
        || (above - magnitude == magnitude - below && low & 1 == 1);
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    sign | if up { low + 1 } else { low }
}
