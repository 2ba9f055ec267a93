//! 256-bit registers.
//!
//! Every method of a token may use the instructions that the token proves. Memory is touched only
//! through slices, whose length is checked against the width of the access; the checks vanish where
//! blocks have a fixed size.

use std::arch::x86_64::*;

use crate::lanes::{Simd, Task, Write, each};

/// Exists only on CPUs with AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

/// Bytes of a register.
const WIDTH: usize = 32;

impl Avx2 {
    /// The proof, if this CPU and its operating system allow it.
    #[must_use]
    pub fn new() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }

    /// Runs a task with all instructions enabled. What it streamed is visible to other threads
    /// afterwards.
    pub(crate) fn run<T: Task>(self, task: T) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enabled<T: Task>(token: Avx2, task: T) {
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
    fn load_halves(self, from: &[u8]) -> [__m128i; 4] {
        assert_eq!(from.len(), 2 * WIDTH);
        // SAFETY: `self` proves AVX2; the four loads read 16 bytes each of the 64.
        each!(i => unsafe { _mm_loadu_si128(from.as_ptr().add(i * (WIDTH / 2)).cast()) })
    }

    /// `x` with every NaN made the canonical one.
    #[inline(always)]
    fn canonical(self, x: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
            _mm256_blendv_ps(x, _mm256_set1_ps(f32::from_bits(0x7fc0_0000)), nan)
        }
    }

    /// The bf16 nearest to each element, in the low half of 32 bits.
    #[inline(always)]
    fn round_bf16(self, x: __m256) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let bits = _mm256_castps_si256(self.canonical(x));
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half))
        }
    }

    /// The low 16 bits of each 32, of two registers. Packing interleaves lanes of 16 bytes; the
    /// permutation undoes that.
    #[inline(always)]
    fn pack16(self, low: __m256i, high: __m256i) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high)) }
    }

    #[inline(always)]
    fn join(self, low: __m128i, high: __m128i) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_set_m128i(high, low) }
    }
}

impl Simd for Avx2 {
    type Bits = __m256i;
    type F32 = __m256;
    const BLOCK: usize = WIDTH;

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2.
        [unsafe { _mm256_set1_ps(value) }; 4]
    }

    #[inline(always)]
    fn max(self, a: [__m256; 4], b: [__m256; 4]) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2.
        each!(i => unsafe { _mm256_max_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn div(self, a: [__m256; 4], b: [__m256; 4]) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2.
        each!(i => unsafe { _mm256_div_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 4], b: [__m256; 4]) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2.
        each!(i => unsafe { _mm256_mul_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 4], b: [__m256; 4], c: [__m256; 4]) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2 and FMA.
        each!(i => unsafe { _mm256_fmadd_ps(a[i], b[i], c[i]) })
    }

    #[inline(always)]
    fn sub_mul(self, c: [__m256; 4], a: [__m256; 4], b: [__m256; 4]) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2 and FMA.
        each!(i => unsafe { _mm256_fnmadd_ps(a[i], b[i], c[i]) })
    }

    #[inline(always)]
    fn load(self, from: &[u8]) -> __m256i {
        assert_eq!(from.len(), WIDTH);
        // SAFETY: `self` proves AVX2; the slice has the bytes of a register.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store(self, value: __m256i, to: &mut [u8], write: Write) {
        assert_eq!(to.len(), WIDTH);
        let to: *mut __m256i = to.as_mut_ptr().cast();
        if write == Write::Streamed && to.is_aligned() {
            // SAFETY: `self` proves AVX2; the slice has the bytes of a register and is aligned;
            // `run` ends with the fence that streaming needs.
            unsafe { _mm256_stream_si256(to, value) }
        } else {
            // SAFETY: `self` proves AVX2; the slice has the bytes of a register.
            unsafe { _mm256_storeu_si256(to, value) }
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
    fn zero(self) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    fn max_abs16(self, a: __m256i, x: __m256i) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_max_epu16(a, _mm256_and_si256(x, _mm256_set1_epi16(0x7fff))) }
    }

    #[inline(always)]
    fn max_abs32(self, a: __m256i, x: __m256i) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_max_epu32(a, _mm256_and_si256(x, _mm256_set1_epi32(0x7fff_ffff))) }
    }

    #[inline(always)]
    fn reduce16(self, a: __m256i) -> u32 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let a = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            // There is an instruction for the smallest only: invert twice.
            let least = _mm_minpos_epu16(_mm_xor_si128(a, _mm_set1_epi16(-1)));
            0xffff - (_mm_cvtsi128_si32(least).cast_unsigned() & 0xffff)
        }
    }

    #[inline(always)]
    fn reduce32(self, a: __m256i) -> u32 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let a = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_max_epu32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            let a = _mm_max_epu32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a));
            _mm_cvtsi128_si32(a).cast_unsigned()
        }
    }

    #[inline(always)]
    fn load_i8(self, from: &[u8]) -> [__m256; 4] {
        assert_eq!(from.len(), WIDTH);
        // SAFETY: `self` proves AVX2; the four loads read 8 bytes each of the 32.
        each!(i => unsafe {
            let q = _mm_loadl_epi64(from.as_ptr().add(i * (WIDTH / 4)).cast());
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q))
        })
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u8]) -> [__m256; 4] {
        let x = self.load_halves(from);
        // SAFETY: `self` proves AVX2.
        each!(i => unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x[i]))) })
    }

    #[inline(always)]
    fn load_fp16(self, from: &[u8]) -> [__m256; 4] {
        let x = self.load_halves(from);
        // SAFETY: `self` proves F16C.
        each!(i => unsafe { _mm256_cvtph_ps(x[i]) })
    }

    #[inline(always)]
    fn load_fp32(self, from: &[u8]) -> [__m256; 4] {
        assert_eq!(from.len(), 4 * WIDTH);
        // SAFETY: `self` proves AVX2; the four loads read 32 bytes each of the 128.
        each!(i => unsafe { _mm256_loadu_ps(from.as_ptr().add(i * WIDTH).cast()) })
    }

    #[inline(always)]
    fn to_i8(self, x: [__m256; 4]) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let [a, b, c, d] = each!(i => _mm256_cvtps_epi32(x[i]));
            // Packing saturates and interleaves lanes of 16 bytes; the permutation undoes the
            // latter.
            let q = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_permutevar8x32_epi32(q, order)
        }
    }

    #[inline(always)]
    fn to_bf16(self, x: [__m256; 4]) -> [__m256i; 2] {
        let [a, b, c, d] = each!(i => self.round_bf16(x[i]));
        [self.pack16(a, b), self.pack16(c, d)]
    }

    #[inline(always)]
    fn to_fp16(self, x: [__m256; 4]) -> [__m256i; 2] {
        // SAFETY: `self` proves F16C.
        let [a, b, c, d] = each!(i => unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.canonical(x[i])) });
        [self.join(a, b), self.join(c, d)]
    }

    #[inline(always)]
    fn to_fp32(self, x: [__m256; 4]) -> [__m256i; 4] {
        // SAFETY: `self` proves AVX2.
        each!(i => unsafe { _mm256_castps_si256(self.canonical(x[i])) })
    }
}
