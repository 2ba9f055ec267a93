//! Numbers as bit patterns: reading, rounding, and the arithmetic of one channel. Knows no SIMD and
//! no pools.

/// Smallest amax that a scale is made from, so that no scale is zero.
pub(crate) const SMALLEST_AMAX: f32 = 1e-8;

/// Steps of the scale from zero to the largest quantized value.
pub(crate) const STEPS: f32 = 127.0;

/// An element type of states or scales. Bit patterns are held in the low bits of a `u32`.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Type of the scales of such a state.
    type Scale: Element;
    const BYTES: usize;
    /// Bits of the largest finite value.
    const LARGEST: u32;
    /// Bits of the canonical NaN.
    const NAN: u32;

    fn read(bytes: &[u8]) -> u32;
    fn write(bits: u32, bytes: &mut [u8]);
    fn to_f32(bits: u32) -> f32;
    /// Rounds to nearest even; every NaN becomes the canonical one.
    fn round(value: f32) -> u32;

    /// Bits without the sign: ordered like absolute values, with NaN above Inf above finite.
    fn abs(bits: u32) -> u32 {
        bits & (u32::MAX >> (33 - 8 * Self::BYTES))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Bf16;
#[derive(Clone, Copy)]
pub(crate) struct Fp16;
#[derive(Clone, Copy)]
pub(crate) struct Fp32;

impl Element for Bf16 {
    type Scale = Self;
    const BYTES: usize = 2;
    const LARGEST: u32 = 0x7f7f;
    const NAN: u32 = 0x7fc0;

    fn read(bytes: &[u8]) -> u32 {
        read_u16(bytes)
    }

    fn write(bits: u32, bytes: &mut [u8]) {
        write_u16(bits, bytes);
    }

    fn to_f32(bits: u32) -> f32 {
        f32::from_bits(bits << 16)
    }

    fn round(value: f32) -> u32 {
        if value.is_nan() {
            return Self::NAN;
        }
        let bits = value.to_bits();
        let odd = (bits >> 16) & 1;
        (bits + 0x7fff + odd) >> 16
    }
}

impl Element for Fp16 {
    type Scale = Fp32;
    const BYTES: usize = 2;
    const LARGEST: u32 = 0x7bff;
    const NAN: u32 = 0x7e00;

    fn read(bytes: &[u8]) -> u32 {
        read_u16(bytes)
    }

    fn write(bits: u32, bytes: &mut [u8]) {
        write_u16(bits, bytes);
    }

    fn to_f32(bits: u32) -> f32 {
        let (sign, exponent, fraction) = ((bits & 0x8000) << 16, (bits >> 10) & 0x1f, bits & 0x3ff);
        match exponent {
            // A subnormal is a whole number of steps of 2^-24.
            0 => f32::from_bits(sign | (fraction as f32 * f32::from_bits(0x3380_0000)).to_bits()),
            0x1f => f32::from_bits(sign | 0x7f80_0000 | (fraction << 13)),
            _ => f32::from_bits(sign | ((exponent + 112) << 23) | (fraction << 13)),
        }
    }

    fn round(value: f32) -> u32 {
        if value.is_nan() {
            return Self::NAN;
        }
        let (sign, bits) = (
            (value.to_bits() >> 16) & 0x8000,
            value.to_bits() & 0x7fff_ffff,
        );
        let rounded = if bits < 0x3880_0000 {
            // Below 2^-14 the result is a whole number of steps of 2^-24; scaling by 2^24 is exact.
            (f32::from_bits(bits) * 16_777_216.0).round_ties_even() as u32
        } else {
            // A carry out of the fraction lands in the exponent, where it belongs.
            (bits - (112 << 23) + 0xfff + ((bits >> 13) & 1)) >> 13
        };
        sign | rounded.min(0x7c00)
    }
}

impl Element for Fp32 {
    type Scale = Self;
    const BYTES: usize = 4;
    const LARGEST: u32 = 0x7f7f_ffff;
    const NAN: u32 = 0x7fc0_0000;

    fn read(bytes: &[u8]) -> u32 {
        u32::from_ne_bytes(bytes.try_into().expect("an fp32 has four bytes"))
    }

    fn write(bits: u32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&bits.to_ne_bytes());
    }

    fn to_f32(bits: u32) -> f32 {
        f32::from_bits(bits)
    }

    fn round(value: f32) -> u32 {
        if value.is_nan() {
            Self::NAN
        } else {
            value.to_bits()
        }
    }
}

fn read_u16(bytes: &[u8]) -> u32 {
    u32::from(u16::from_ne_bytes(
        bytes.try_into().expect("a 16-bit element has two bytes"),
    ))
}

fn write_u16(bits: u32, bytes: &mut [u8]) {
    let bits = u16::try_from(bits).expect("a 16-bit element has 16 bits");
    bytes.copy_from_slice(&bits.to_ne_bytes());
}

/// Bits of the scale of a channel whose largest absolute value has the bits `amax`.
pub(crate) fn scale<E: Element>(amax: u32) -> u32 {
    if amax > E::LARGEST {
        return E::Scale::NAN;
    }
    let scale = E::Scale::round(E::to_f32(amax).max(SMALLEST_AMAX) / STEPS);
    let reloaded = E::round(STEPS * E::Scale::to_f32(scale));
    if reloaded > E::LARGEST {
        scale - 1
    } else {
        scale
    }
}

/// One quantized element. A NaN scale gives zero.
pub(crate) fn quantize(value: f32, scale: f32) -> i8 {
    if scale.is_nan() {
        return 0;
    }
    (value / scale).round_ties_even().clamp(-STEPS, STEPS) as i8
}

/// Bits of one reloaded element.
pub(crate) fn dequantize<E: Element>(q: i8, scale: f32) -> u32 {
    E::round(f32::from(q) * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_types_survive_a_round_trip_through_fp32() {
        fn check<E: Element>() {
            for bits in 0..=0xffff {
                let back = E::round(E::to_f32(bits));
                assert_eq!(
                    back,
                    if E::abs(bits) > E::LARGEST + 1 {
                        E::NAN
                    } else {
                        bits
                    }
                );
            }
        }
        check::<Bf16>();
        check::<Fp16>();
    }

    #[test]
    fn rounding_takes_the_nearest_and_the_even_of_two() {
        fn check<E: Element>() {
            for bits in 0..E::LARGEST {
                let (low, high) = (f64::from(E::to_f32(bits)), f64::from(E::to_f32(bits + 1)));
                let middle = (f64::midpoint(low, high)) as f32;
                assert_eq!(E::round(middle), bits + (bits & 1));
                assert_eq!(E::round(middle.next_down()), bits);
                assert_eq!(E::round(middle.next_up()), bits + 1);
            }
            assert_eq!(E::round(f32::INFINITY), E::LARGEST + 1);
            assert_eq!(E::round(f32::MAX), E::LARGEST + 1);
        }
        check::<Bf16>();
        check::<Fp16>();
    }

    #[test]
    fn only_the_largest_finite_amax_needs_the_smaller_scale() {
        fn smaller<E: Element>(amax: u32) -> bool {
            scale::<E>(amax) != E::Scale::round(E::to_f32(amax).max(SMALLEST_AMAX) / STEPS)
        }
        assert!((0..Bf16::LARGEST).all(|amax| !smaller::<Bf16>(amax)));
        assert!(smaller::<Bf16>(Bf16::LARGEST));
        assert!((0..=Fp16::LARGEST).all(|amax| !smaller::<Fp16>(amax)));
        assert!((Fp32::LARGEST - 100_000..Fp32::LARGEST).all(|amax| !smaller::<Fp32>(amax)));
        assert!(smaller::<Fp32>(Fp32::LARGEST));
    }

    #[test]
    fn every_finite_channel_reloads_finite_and_within_half_a_step() {
        fn check<E: Element>(amax: u32) {
            let s = E::Scale::to_f32(scale::<E>(amax));
            let x = E::to_f32(amax);
            let back = E::to_f32(dequantize::<E>(quantize(x, s), s));
            assert!(s > 0.0 && back.is_finite(), "amax {amax:#x}");
            // Half a step, then rounding of the scale (2^-9 of 127 steps) and of the result.
            let bound = f64::from(s) * (0.5 + 127.0 / 256.0) + f64::from(x) / 256.0;
            assert!(
                (f64::from(x) - f64::from(back)).abs() <= bound,
                "amax {amax:#x}"
            );
        }
        (0..=Bf16::LARGEST).for_each(check::<Bf16>);
        (0..=Fp16::LARGEST).for_each(check::<Fp16>);
        (0..=Fp32::LARGEST).step_by(9973).for_each(check::<Fp32>);
        check::<Fp32>(Fp32::LARGEST);
    }

    #[test]
    fn storing_a_loaded_element_again_with_its_scale_is_exact() {
        fn check<E: Element>(amax: u32, x: u32) {
            let s = E::Scale::to_f32(scale::<E>(amax));
            let q = quantize(E::to_f32(x), s);
            let again = quantize(E::to_f32(dequantize::<E>(q, s)), s);
            assert_eq!(q, again, "amax {amax:#x}, x {x:#x}");
        }
        fn check_channel<E: Element>(amax: u32) {
            (0..=127)
                .for_each(|i| check::<E>(amax, E::round(E::to_f32(amax) * (i as f32 / STEPS))));
            (amax.saturating_sub(40)..=amax).for_each(|x| check::<E>(amax, x));
        }
        (0..=Bf16::LARGEST).for_each(check_channel::<Bf16>);
        (0..=Fp16::LARGEST).for_each(check_channel::<Fp16>);
        (0..=Fp32::LARGEST)
            .step_by(99_991)
            .for_each(check_channel::<Fp32>);
        check_channel::<Fp32>(Fp32::LARGEST);
        // Every element of every channel of fp16 subnormals, whose steps are as coarse as the
        // scale's.
        (0..1024).for_each(|amax| (0..=amax).for_each(|x| check::<Fp16>(amax, x)));
    }
}
