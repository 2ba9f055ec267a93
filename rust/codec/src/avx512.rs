//! 512-bit registers.
//!
//! Every method of a token may use the instructions that the token proves. Memory is touched only
//! through slices, whose length is checked against the width of the access; the checks vanish where
//! blocks have a fixed size.

use std::arch::x86_64::*;

use crate::lanes::{Simd, Task, Write, each};

/// Exists only on CPUs with AVX-512 F and BW.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

/// Bytes of a register.
const WIDTH: usize = 64;
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl Avx512 {
    /// The proof, if this CPU and its operating system allow it.
    #[must_use]
    pub fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw"))
            .then_some(Self(()))
    }

    /// Runs a task with all instructions enabled. What it streamed is visible to other threads
    /// afterwards.
    pub(crate) fn run<T: Task>(self, task: T) {
        #[target_feature(enable = "avx512f,avx512bw")]
        fn enabled<T: Task>(token: Avx512, task: T) {
            task.run(token);
            // SAFETY: every x86-64 CPU has SSE.
            #[allow(unused_unsafe, reason = "the intrinsic is unsafe up to Rust 1.92")]
            unsafe {
                _mm_sfence();
            }
        }
        // SAFETY: `self` proves the features.
        unsafe { enabled(self, task) }
    }

    /// The halves of a register of 16-bit elements.
    #[inline(always)]
    fn load_halves(self, from: &[u8]) -> [__m256i; 4] {
        assert_eq!(from.len(), 2 * WIDTH);
        // SAFETY: `self` proves AVX-512; the four loads read 32 bytes each of the 128.
        each!(i => unsafe { _mm256_loadu_si256(from.as_ptr().add(i * (WIDTH / 2)).cast()) })
    }

    /// `x` with every NaN made the canonical one.
    #[inline(always)]
    fn canonical(self, x: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            _mm512_mask_mov_ps(x, nan, _mm512_set1_ps(f32::from_bits(0x7fc0_0000)))
        }
    }

    /// The bf16 nearest to each element, in the low half of 32 bits.
    #[inline(always)]
    fn round_bf16(self, x: __m512) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let bits = _mm512_castps_si512(self.canonical(x));
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half))
        }
    }

    /// The low 16 bits of each 32, of two registers. Packing interleaves lanes of 16 bytes; the
    /// permutation undoes that.
    #[inline(always)]
    fn pack16(self, low: __m512i, high: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
            _mm512_permutexvar_epi64(order, _mm512_packus_epi32(low, high))
        }
    }

    #[inline(always)]
    fn join(self, low: __m256i, high: __m256i) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
    }
}

impl Simd for Avx512 {
    type Bits = __m512i;
    type F32 = __m512;
    const BLOCK: usize = WIDTH;

    #[inline(always)]
    fn splat(self, value: f32) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        [unsafe { _mm512_set1_ps(value) }; 4]
    }

    #[inline(always)]
    fn max(self, a: [__m512; 4], b: [__m512; 4]) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_max_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn div(self, a: [__m512; 4], b: [__m512; 4]) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_div_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul(self, a: [__m512; 4], b: [__m512; 4]) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_mul_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul_add(self, a: [__m512; 4], b: [__m512; 4], c: [__m512; 4]) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_fmadd_ps(a[i], b[i], c[i]) })
    }

    #[inline(always)]
    fn sub_mul(self, c: [__m512; 4], a: [__m512; 4], b: [__m512; 4]) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_fnmadd_ps(a[i], b[i], c[i]) })
    }

    #[inline(always)]
    fn load(self, from: &[u8]) -> __m512i {
        assert_eq!(from.len(), WIDTH);
        // SAFETY: `self` proves AVX-512; the slice has the bytes of a register.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store(self, value: __m512i, to: &mut [u8], write: Write) {
        assert_eq!(to.len(), WIDTH);
        let to: *mut __m512i = to.as_mut_ptr().cast();
        if write == Write::Streamed && to.is_aligned() {
            // SAFETY: `self` proves AVX-512; the slice has the bytes of a register and is aligned;
            // `run` ends with the fence that streaming needs.
            unsafe { _mm512_stream_si512(to, value) }
        } else {
            // SAFETY: `self` proves AVX-512; the slice has the bytes of a register.
            unsafe { _mm512_storeu_si512(to, value) }
        }
    }

    #[inline(always)]
    fn prefetch(self, row: &[u8]) {
        for line in row.chunks(64) {
            // SAFETY: a prefetch has no effect on memory; the address is within the slice.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) }
        }
    }

    #[inline(always)]
    fn zero(self) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn max_abs16(self, a: __m512i, x: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_max_epu16(a, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff))) }
    }

    #[inline(always)]
    fn max_abs32(self, a: __m512i, x: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_max_epu32(a, _mm512_and_si512(x, _mm512_set1_epi32(0x7fff_ffff))) }
    }

    #[inline(always)]
    fn reduce16(self, a: __m512i) -> u32 {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let a = _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64::<1>(a));
            let a = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            // There is an instruction for the smallest only: invert twice.
            let least = _mm_minpos_epu16(_mm_xor_si128(a, _mm_set1_epi16(-1)));
            0xffff - (_mm_cvtsi128_si32(least).cast_unsigned() & 0xffff)
        }
    }

    #[inline(always)]
    fn reduce32(self, a: __m512i) -> u32 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_reduce_max_epu32(a) }
    }

    #[inline(always)]
    fn load_i8(self, from: &[u8]) -> [__m512; 4] {
        assert_eq!(from.len(), WIDTH);
        // SAFETY: `self` proves AVX-512; the four loads read 16 bytes each of the 64.
        each!(i => unsafe {
            let q = _mm_loadu_si128(from.as_ptr().add(i * (WIDTH / 4)).cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q))
        })
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u8]) -> [__m512; 4] {
        let x = self.load_halves(from);
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x[i]))) })
    }

    #[inline(always)]
    fn load_fp16(self, from: &[u8]) -> [__m512; 4] {
        let x = self.load_halves(from);
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_cvtph_ps(x[i]) })
    }

    #[inline(always)]
    fn load_fp32(self, from: &[u8]) -> [__m512; 4] {
        assert_eq!(from.len(), 4 * WIDTH);
        // SAFETY: `self` proves AVX-512; the four loads read 64 bytes each of the 256.
        each!(i => unsafe { _mm512_loadu_ps(from.as_ptr().add(i * WIDTH).cast()) })
    }

    #[inline(always)]
    fn to_i8(self, x: [__m512; 4]) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let [a, b, c, d] = each!(i => _mm512_cvt_roundps_epi32::<NEAREST>(x[i]));
            // Packing saturates and interleaves lanes of 16 bytes; the permutation undoes the
            // latter.
            let q = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, q)
        }
    }

    #[inline(always)]
    fn to_bf16(self, x: [__m512; 4]) -> [__m512i; 2] {
        let [a, b, c, d] = each!(i => self.round_bf16(x[i]));
        [self.pack16(a, b), self.pack16(c, d)]
    }

    #[inline(always)]
    fn to_fp16(self, x: [__m512; 4]) -> [__m512i; 2] {
        // SAFETY: `self` proves AVX-512.
        let [a, b, c, d] = each!(i => unsafe { _mm512_cvtps_ph::<NEAREST>(self.canonical(x[i])) });
        [self.join(a, b), self.join(c, d)]
    }

    #[inline(always)]
    fn to_fp32(self, x: [__m512; 4]) -> [__m512i; 4] {
        // SAFETY: `self` proves AVX-512.
        each!(i => unsafe { _mm512_castps_si512(self.canonical(x[i])) })
    }
}
